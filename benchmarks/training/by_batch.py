"""The table of docs/speed.md by batch size: what a train step costs all processes of a contestant, in processor time.

    rowcast    both processes, the decoders and the launcher, a cache of 20,000 rows, 70,000 for batches from 1,024 on
               (a tenth of the rows that an epoch touches), 200,000 from 16,384 on; 64 batches are known ahead, so that
               no horizon grows
    stock      one process, nn.EmbeddingBag(sparse=True) and torch.optim, every row in memory
    page-in    one process that reads a batch's distinct rows from a memory-mapped file and writes them back
    fbgemm     one process over FBGEMM's fused tables, every row in memory, batches decoded in advance: `make bench-env`

The retail log as npy, DLRM 512-256-64-16, 512-256-1, Adagrad, one torch thread. Before its first turn a contestant
trains one epoch and a little, or the first steps of one if batches are so small that an epoch would take minutes; there
many rows that rowcast fetches are new. Turns and ratios are those of `steady.py`, with quartiles: a ratio is
rowcast's processor time a step over another's, in the same round. With --against, both processes of another checkout
with an environment of its own take turns too.

    python -m benchmarks.training.by_batch FOLDER              the folder holds day_0_*.npy; about 9 minutes
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.machine import write_result
from benchmarks.training import ours
from benchmarks.training.__main__ import PEER_PYTHON, ROOT, peers_reason
from benchmarks.training.free_cores import free_cores
from benchmarks.training.peer_folder import write_folder
from benchmarks.training.recorded import train_batches
from benchmarks.training.steady import Turn, commands, in_turn
from benchmarks.training.table import CONFIG, Cell, path_setting
from rowcast.job.file import load_job
from rowcast.job.schema import Job

BATCH_SIZES = (16, 256, 2048)
CACHES = ((16_384, 200_000), (1024, 70_000), (0, 20_000))  # batches from this size on, rows
MOST_WARM_STEPS = 300
BEYOND_EPOCH = 10  # steps
OURS, STOCK, PAGE_IN, FBGEMM = "rowcast", "stock", "page-in", "fbgemm"
HORIZON = 64
MORE = ("trainer.threads=1", f"lookahead.horizon={HORIZON}")
Found = dict[str, list[Turn]]


def settings_of(folder: Path, batch_size: int) -> list[str]:
    cell = Cell(data="npy", optimizer="adagrad", dim=16)
    return [*cell.settings, path_setting(folder, "npy"), f"data.batch_size={batch_size}", *MORE]


def everyone(
    job: Job, settings: Sequence[str], capacity: str, scratch: Path, against: Path | None
) -> dict[str, tuple[list[str], int]]:
    """Per contestant: its command, and the port where it serves its counters."""
    own = commands(CONFIG, settings, capacity, scratch)
    found = {name: own[name] for name in (OURS, STOCK)}
    paged, port = commands(CONFIG, settings, capacity, scratch)["stock"]
    found[PAGE_IN] = ([*paged, "--paged"], port)
    reason = peers_reason(job, "cpu")
    if reason is None:
        (port,) = ours.free_ports(1)
        (scratch / "peers").mkdir()
        write_folder(scratch / "peers", job, train_batches(job, None), threads=1)
        peer = [str(PEER_PYTHON), str(ROOT / "benchmarks" / "peers" / "fused_dlrm.py"), "fbgemm"]
        found[FBGEMM] = ([*peer, str(scratch / "peers"), str(port)], port)
    else:
        print(f"fbgemm does not take part: {reason}", file=sys.stderr)
    if against is not None:
        (_, *command), port = commands(CONFIG, settings, capacity, scratch / "against")[OURS]
        # in its own folder: there lies the package that Python finds first
        found[against.name] = (["env", "-C", str(against), str(against / ".venv" / "bin" / "python"), *command], port)
    return found


def measured(folder: Path, batch_size: int, rounds: int, seconds: float, against: Path | None) -> Found:
    settings = settings_of(folder, batch_size)
    job = load_job(CONFIG, (*settings, 'cache.capacity="1GiB"', "data.epochs=1"))
    batches = train_batches(job, None)
    rows = next(rows for least, rows in CACHES if batch_size >= least)
    capacity = f'cache.capacity="{rows} rows"'
    warm_steps = min(len(batches) + BEYOND_EPOCH, MOST_WARM_STEPS)
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as scratch:
        started = everyone(job, settings, capacity, Path(scratch), against)
        return in_turn(started, warm_steps * batch_size, rounds, seconds)


def step_ms(turns: Sequence[Turn], batch_size: int) -> list[float]:
    return [1e3 * batch_size * turn.processor_per_sample_s for turn in turns]


def with_quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def lines(found: Mapping[int, Found]) -> Iterator[str]:
    names = list(dict.fromkeys(name for of_size in found.values() for name in of_size))
    yield f"| ms of processor time a step | {' | '.join(f'batch {size:,}' for size in found)} |"
    yield "|---" * (1 + len(found)) + "|"
    for name in names:
        yield row(name, [with_quartiles(step_ms(own[name], size)) for size, own in found.items()])
    for process in next(iter(found.values()))[OURS][0].spent:
        shares = [
            statistics.median(1e3 * size * turn.spent[process] / turn.samples for turn in own[OURS])
            for size, own in found.items()
        ]
        yield row(f"rowcast: {process}", [f"{share:.2f}" for share in shares])
    for name in names[1:]:
        yield row(f"rowcast over {name}", [with_quartiles(over(own, name)) for own in found.values()])


def row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def over(found: Found, name: str) -> list[float]:
    """The processor time of rowcast's samples over that of the other's, round by round."""
    pairs = zip(found[OURS], found[name], strict=True)
    return [own.processor_per_sample_s / other.processor_per_sample_s for own, other in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch-size", type=int, nargs="+", default=list(BATCH_SIZES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--against", type=Path, help="another checkout, with .venv")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: quartiles need at least 2")
    against = None if options.against is None else options.against.resolve()
    free, found = [free_cores()], {}
    for size in options.batch_size:
        found[size] = measured(options.folder.resolve(), size, options.rounds, options.seconds, against)
        free.append(free_cores())
        print("\n".join(lines({size: found[size]})), file=sys.stderr, flush=True)
    print("\n".join(lines(found)))
    print(f"{options.rounds} rounds of {options.seconds:g} s, free cores {min(free):.2f} to {max(free):.2f}")
    result = {size: {name: step_ms(turns, size) for name, turns in own.items()} for size, own in found.items()}
    write_result("by-batch", rounds=options.rounds, seconds=options.seconds, free_cores=free, step_ms=result)


if __name__ == "__main__":
    main()
