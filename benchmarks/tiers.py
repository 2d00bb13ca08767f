"""What do the kinds of store cost, for one job in turn: memory, mapped, tiered, redis?

Method: the demo's click stream with rows of 272 bytes, two epochs, so that every row of the second one was trained
before. Both processes run as a user starts them, but each train step is padded to `--step-ms`. `tiered` and `redis`
keep `--memory-share` of the rows touched in memory. The table has the share of the time for which the trainer waited
for rows, the prefetcher's peak memory, the disk that the store took, rows from the cold tier over those that Belady's
would read with as much memory (from `prefetcher simulate`), late rows, and what the prefetcher has read from any disk
and written to any: the last checkpoint too, so that of `memory` is what to subtract.

"no look-ahead" is `tiered` with a horizon of `lookahead.depth` batches, which evicts like LRU; rows still come to
memory when their plan is made. "page faults" is `mapped` as it was before it read ahead.

Files lie in the folder for temporary files (TMPDIR), which must be on a disk. The disk is meant, not the page cache:
every tenth of a second, what the store's files have in the page cache is written and dropped, also from the mappings of
`mapped`, whose pages that were read ahead are then read again. With `--limit` nothing is dropped: the prefetcher runs
in a control group whose memory, page cache included, is limited, so the kernel drops what it would on a full machine. A
disk of a virtual machine may still be served from its host's memory.

    python -m benchmarks.tiers [--kind memory --kind tiered ...] [--steps 400] [--rounds 1]
    python -m benchmarks.tiers --kind memory --kind redis --url redis://localhost:6379
    python -m benchmarks.tiers --kind tiered --kind mapped --kind "page faults" --limit 350MiB       # as root
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.memory_group import memory_group
from benchmarks.processes import terminate, turns
from rowcast.job.units import parse_bytes
from rowcast.trainer.report.report_json import read_report

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
BATCH = 512
WIDTH = 64
JOB = {
    "data.batch_size": BATCH,
    "data.epochs": 2,
    "data.eval_fraction": 0,
    "data.synthetic.scale": 0.05,
    "tables_from.embedding_dim": WIDTH,
    "model.bottom_mlp": [64, WIDTH],
    "model.top_mlp": [64, 1],
    "checkpoint.every": 0,
    "prefetcher.threads": 1,
    "trainer.threads": 1,
    "metrics.prefetcher": "127.0.0.1:0",
    "metrics.trainer": "127.0.0.1:0",
}
DEPTH = 4
NO_LOOK_AHEAD, PAGE_FAULTS = "no look-ahead", "page faults"
KINDS = ("memory", PAGE_FAULTS, "mapped", "tiered", NO_LOOK_AHEAD)
HEADINGS = (
    "waits",
    "memory MiB",
    "disk MiB",
    "from cold",
    "of Belady's",
    "late rows",
    "read MiB",
    "written MiB",
)
WATCH_EVERY_S = 0.1
PAGEOUT, PROCESS_MADVISE, PIDFD_OPEN = 21, 440, 434  # Linux
MIB = 2**20

PADDED = """
import time
from rowcast.trainer.models.runner import StepRunner
train, ends = StepRunner.train, [0.0]
def padded(self, step, loss):
    train(self, step, loss)
    now = time.perf_counter()
    ends[0] = max(ends[0] + {step_s}, now) if ends[0] else now + {step_s}
    time.sleep(max(0.0, ends[0] - now))
StepRunner.train = padded
from rowcast.command_line.trainer import app
app()
"""
COMMAND = "from rowcast.command_line.prefetcher import app; app()"
WITHOUT_STAGING = """
from rowcast.prefetcher.stores.mapped_store import MappedStore
MappedStore.works_ahead, MappedStore.stage = False, lambda self, step, plan: None
"""


@dataclass(frozen=True, slots=True)
class Ran:
    samples_s: float
    waits: float  # share of the time
    memory: int  # the prefetcher's peak, bytes
    disk: int  # bytes
    from_cold: int
    late: int
    read: int  # bytes
    written: int


def settings(values: Mapping[str, object]) -> list[str]:
    return [f"--set={key}={json.dumps(value)}" for key, value in values.items()]


def store_of(kind: str, memory_rows: int, path: Path) -> dict[str, object]:
    name = {NO_LOOK_AHEAD: "tiered", PAGE_FAULTS: "mapped"}.get(kind, kind)
    values: dict[str, object] = {"store.kind": name}
    if name in ("tiered", "redis"):
        values["store.memory"] = f"{memory_rows} rows"
    if name in ("tiered", "mapped"):
        values["store.path"] = str(path)
    return values | ({"lookahead.horizon": DEPTH} if kind == NO_LOOK_AHEAD else {})


def run(kind: str, shared: Sequence[str], memory_rows: int, step_ms: float, limit: int | None) -> Ran:
    in_group: AbstractContextManager[list[str]] = nullcontext([]) if limit is None else memory_group(limit)
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as folder, in_group as prefix:
        tables, run_dir = Path(folder) / "tables", Path(folder) / "run"
        own = settings(store_of(kind, memory_rows, tables) | {"job.run_dir": str(run_dir)})
        programs = {
            "prefetcher": (WITHOUT_STAGING if kind == PAGE_FAULTS else "") + COMMAND,
            "trainer": PADDED.format(step_s=step_ms / 1e3),
        }
        prefixes = {"prefetcher": prefix, "trainer": []}
        started = {
            name: start(prefixes[name], code, [f"--config={DEMO}", *shared, *own]) for name, code in programs.items()
        }
        seen = Seen()
        with watching(started["prefetcher"].pid, tables, seen, drop=limit is None):
            log = started["prefetcher"].stderr
            assert log is not None, "a pipe"
            text: list[str] = []
            reader = threading.Thread(target=lambda: text.append(log.read()))
            reader.start()
            terminate({"trainer": started["trainer"]}, 3600)
            started["prefetcher"].wait(60)
            reader.join()
        if started["prefetcher"].returncode:
            raise RuntimeError(text[0][-2000:])
        report = read_report(run_dir / "report.json")
        tier = report.tier
        return Ran(
            samples_s=report.samples_per_s,
            waits=report.stall_share,
            memory=report.host_bytes,
            disk=max(seen.disk, tier.disk_bytes if tier else 0),
            from_cold=tier.rows_from_cold if tier else 0,
            late=tier.late_rows if tier else 0,
            read=seen.read,
            written=seen.written,
        )


def start(prefix: Sequence[str], code: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", code, "run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@dataclass(slots=True)
class Seen:
    """What a process took, in bytes."""

    disk: int = 0  # the most that its files in a folder took
    read: int = 0  # from any disk
    written: int = 0  # to any


@contextmanager
def watching(pid: int, folder: Path, seen: Seen, *, drop: bool) -> Iterator[None]:
    """Notes in `seen` what the process takes. `drop`: keeps its files in a folder out of the page cache."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_EVERY_S):
            seen.disk = max(seen.disk, visit_files(pid, folder, drop=drop))
            if drop:
                drop_mappings(pid, folder)
            note_bytes(pid, seen)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def note_bytes(pid: int, seen: Seen) -> None:
    try:
        fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except OSError:  # it has ended
        return
    if fields:
        seen.read, seen.written = int(fields["read_bytes"]), int(fields["write_bytes"])


def visit_files(pid: int, folder: Path, *, drop: bool) -> int:
    """Returns the bytes that the process's open files in a folder take."""
    total = 0
    for entry in os.scandir(f"/proc/{pid}/fd") if Path(f"/proc/{pid}/fd").exists() else ():
        try:
            if not os.readlink(entry.path).startswith(str(folder)):
                continue
            descriptor = os.open(entry.path, os.O_RDONLY)
        except OSError:  # closed meanwhile
            continue
        try:
            if drop:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(descriptor).st_blocks * 512
        finally:
            os.close(descriptor)
    return total


def drop_mappings(pid: int, folder: Path) -> None:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return
    ranges = [line.split()[0].split("-") for line in lines if str(folder) in line]
    if not ranges:
        return
    libc = ctypes.CDLL(None)
    descriptor = libc.syscall(PIDFD_OPEN, pid, 0)
    if descriptor < 0:
        return
    try:
        for begin, end in ranges:
            vector = (ctypes.c_uint64 * 2)(int(begin, 16), int(end, 16) - int(begin, 16))
            libc.syscall(PROCESS_MADVISE, descriptor, vector, 1, PAGEOUT, 0)
    finally:
        os.close(descriptor)


def simulated(shared: Sequence[str], memory_rows: int) -> dict[str, int]:
    """What `prefetcher simulate` says of `tiered`, its bound included."""
    command = [sys.executable, "-m", "rowcast.prefetcher", "simulate", f"--config={DEMO}", *shared, "--json"]
    command.append(f"--store-memory={memory_rows} rows")
    asked = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (result,) = json.loads(asked.stdout)["results"]
    return dict(result)


def touched_rows(shared: Sequence[str]) -> int:
    """With memory for all, each row enters once."""
    return simulated(shared, 2**30)["rows_entered"]


def row(kind: str, ran: Sequence[Ran], best: float, bound: int) -> str:
    def median(field: str) -> float:
        return float(statistics.median(getattr(own, field) for own in ran))

    from_cold, steady = median("from_cold"), median("samples_s")
    belady = f"{from_cold / bound:.3f}" if from_cold and bound else ""
    return (
        f"| {kind} | {steady:,.0f} | {steady / best:.3f} | {median('waits'):.1%} | {median('memory') / MIB:,.0f} | "
        f"{median('disk') / MIB:,.0f} | {from_cold:,.0f} | {belady} | {median('late'):,.0f} | "
        f"{median('read') / MIB:,.0f} | {median('written') / MIB:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*KINDS, "redis"]
    parser.add_argument("--kind", action="append", choices=choices, help="repeatable; all but redis by default")
    parser.add_argument("--steps", type=int, default=400, help="of both epochs")
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--memory-share", type=float, default=0.1, help="of the rows touched")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=parse_bytes, help="the prefetcher's memory with its page cache, such as 350MiB")
    parser.add_argument("--url", help="of the server of redis")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of both commands")
    options = parser.parse_args()
    samples = {"data.synthetic.samples": options.steps // 2 * BATCH, "lookahead.depth": DEPTH}
    capacity = [f"--set={setting}" for setting in options.set]
    shared = [*settings(JOB | samples), *capacity]
    touched = touched_rows(shared)
    memory_rows = int(options.memory_share * touched)
    shared += settings({"cache.capacity": f"{memory_rows // 2} rows"})
    planned = simulated(shared, memory_rows)
    print(machine())
    print(
        f"{options.steps} steps of {options.step_ms:g} ms, {touched:,} rows touched, {memory_rows:,} of them in memory,"
        f" {memory_rows // 2:,} on the device; load {os.getloadavg()[0]:.1f}. Simulated: {planned['rows_from_cold']:,} "
        f"rows from the cold tier, Belady's {planned['bound_rows_from_cold']:,}"
    )
    names = options.kind or list(KINDS)
    found: dict[str, list[Ran]] = {name: [] for name in names}
    for number, name in turns(names, options.rounds):
        server = settings({"store.url": options.url}) if name == "redis" else []
        found[name].append(run(name, [*shared, *server], memory_rows, options.step_ms, options.limit))
        print(f"round {number}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    best = statistics.median(own.samples_s for own in found[names[0]])
    print(f"| kind | samples/s | of {names[0]} | {' | '.join(HEADINGS)} |\n{'|---' * (3 + len(HEADINGS))}|")
    for name in names:
        print(row(name, found[name], best, planned["bound_rows_from_cold"]))


if __name__ == "__main__":
    main()
