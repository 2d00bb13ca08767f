"""Trains one job with every contestant in turn, in one run, and prints one table: speed, loss, and what limits.

    rowcast N %     both processes, a cache of N % of the distinct rows that the run touches (at least one batch)
    stock           one process, nn.EmbeddingBag(sparse=True) and torch.optim, every row in memory, or on the device
    host tables     the same, tables in host memory and the dense part on the device (only if that differs)
    all rows, ours  our kernels with every row on the device, nothing read, planned or moved: the floor
    page-in         one process: a batch's distinct rows are read from a memory-mapped file and written back (Adagrad)
    fbgemm          FBGEMM's table-batched embeddings on a CPU; torchrec: TorchRec's collection (`make bench-env`)

Each round runs every contestant once, in an order that rotates from round to round. A speed is the median of the
rounds, a ratio the median of the ratios to stock within a round. The loss is the mean of the last 100 steps:
contestants that train the same thing agree in it.

    make bench                                          the built-in stream, DLRM and an embedding-bound model
    python -m benchmarks.training --config examples/retail.toml --set data.path='"train.tsv"' --name retail
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.machine import machine, write_result
from benchmarks.processes import turns
from benchmarks.training import ours
from benchmarks.training.outcome import Outcome
from benchmarks.training.peer_folder import why_not, write_folder
from benchmarks.training.recorded import Touched, touched, train_batches
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.machine import usable_cores
from rowcast.trainer.device.cuda import choose_device

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
CAPACITIES = (1.0, 5.0, 10.0, 100.0)  # percent
Contestant = Callable[[], Outcome]


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    config: Path
    settings: tuple[str, ...]
    steps: int | None
    job: Job
    device: str
    touched: Touched


def run_process(command: Sequence[str]) -> Outcome:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3600, cwd=ROOT, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with code {ended.returncode}: {ended.stderr.strip()[-2000:]}")
    return msgspec.json.decode(ended.stdout.splitlines()[-1], type=Outcome)


def peer(kind: str, folder: Path) -> Contestant:
    command = [str(PEER_PYTHON), str(ROOT / "benchmarks" / "peers" / "fused_dlrm.py"), kind, str(folder)]
    return lambda: run_process(command)


def single_process(match: Match, module: str, *options: str) -> Contestant:
    steps = [] if match.steps is None else ["--steps", str(match.steps)]
    settings = [f"--set={setting}" for setting in match.settings]
    command = [
        sys.executable,
        "-m",
        f"benchmarks.training.{module}",
        "--config",
        str(match.config),
        *settings,
        *steps,
        *options,
    ]
    return lambda: run_process(command)


def rowcast(match: Match, percent: float) -> Contestant:
    capacity = ours.capacity_setting(match.job, match.touched.rows, percent, match.touched.largest_batch)
    return lambda: ours.run(match.config, [*match.settings, capacity], match.steps)


def contestants(match: Match, capacities: Sequence[float], peers: Path | None) -> dict[str, Contestant]:
    everyone = {f"rowcast {percent:g} %": rowcast(match, percent) for percent in capacities}
    everyone["stock"] = single_process(match, "stock", f"--tables={match.device}", f"--device={match.device}")
    if match.device != "cpu":
        everyone["host tables"] = single_process(match, "stock", "--tables=cpu", f"--device={match.device}")
    everyone["all rows, ours"] = single_process(match, "resident")
    if match.device == "cpu" and why_not(match.job) is None and match.job.optimizer.sparse.kind == "adagrad":
        everyone["page-in"] = single_process(match, "stock", "--paged")
    if peers is not None:
        everyone |= {kind: peer(kind, peers) for kind in ("fbgemm", "torchrec")}
    return everyone


def in_turn(everyone: Mapping[str, Contestant], rounds: int) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {name: [] for name in everyone}
    for number, name in turns(list(everyone), rounds):
        outcome = everyone[name]()
        found[name].append(outcome)
        print(f"round {number}: {name}: {outcome.samples_per_s:,.0f} samples/s", file=sys.stderr, flush=True)
    return found


def ratio(found: Mapping[str, Sequence[Outcome]], name: str, to: str = "stock") -> float:
    return statistics.median(
        own.samples_per_s / other.samples_per_s for own, other in zip(found[name], found[to], strict=True)
    )


def table(found: Mapping[str, Sequence[Outcome]]) -> str:
    lines = ["| contestant | samples/s | ms a step | to stock | loss | waited for rows |", "|---|---|---|---|---|---|"]
    for name, outcomes in found.items():
        rate = statistics.median(outcome.samples_per_s for outcome in outcomes)
        step_ms = statistics.median(1e3 * outcome.wall_s / outcome.steps for outcome in outcomes)
        waits = [outcome.waited_share for outcome in outcomes if outcome.waited_share is not None]
        waited = f"{100 * statistics.median(waits):.2f} %" if waits else ""
        lines.append(
            f"| {name} | {rate:,.0f} | {step_ms:.2f} | {ratio(found, name):.2f} | {outcomes[-1].loss:.5f} | {waited} |"
        )
    return "\n".join(lines)


def needs(found: Mapping[str, Sequence[Outcome]]) -> str:
    lines = []
    for name, outcomes in found.items():
        last = outcomes[-1]
        if last.need:
            moved = ", ".join(f"{what} {value:,.3g}/s" for what, value in last.need.items())
            cores = ", ".join(f"{stage} {value:.2f}" for stage, value in last.cores.items())
            lines.append(f"{name}: {moved}\n    cores: {cores}")
    return "\n".join(lines)


def closed_form(match: Match, batches: int, samples: int) -> dict[str, float]:
    """What a sample needs with any contestant, from the job and the data alone."""
    lookups = len(match.job.features)  # of single-hot data
    return {
        "look-ups a sample": lookups,
        "row bytes a sample": lookups * 4 * match.job.tables[0].embedding_dim,
        "samples a step": samples / batches,
        "distinct rows of the run": match.touched.rows,
        "distinct rows of the largest batch": match.touched.largest_batch,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--name", required=True, help="of the file in build")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--capacity", type=float, action="append", help="percent; repeatable")
    parser.add_argument("--only", action="append", help="names of contestants; repeatable")
    options = parser.parse_args()
    settings = (*options.overrides, "data.eval_fraction=0")
    job = load_job(options.config, (*settings, 'cache.capacity="1GiB"'))
    batches = train_batches(job, options.steps)
    match = Match(
        config=options.config,
        settings=settings,
        steps=options.steps,
        job=job,
        device=str(choose_device(job.trainer.device)),
        touched=touched(job, batches),
    )
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as folder:
        peers = peers_folder(Path(folder), match, batches)
        everyone = contestants(match, options.capacity or CAPACITIES, peers)
        chosen = {name: run for name, run in everyone.items() if not options.only or name in options.only}
        found = in_turn(chosen | {"stock": everyone["stock"]}, options.rounds)
    need = closed_form(match, len(batches), sum(scheduled.batch.size for scheduled in batches))
    print(f"{options.config.name} {' '.join(settings)}, device {match.device}, medians of {options.rounds} rounds")
    print(table(found))
    print(needs(found))
    print(", ".join(f"{name}: {value:,.0f}" for name, value in need.items()))
    print(" ".join(f"{name}={value}" for name, value in machine().items()))
    ratios = {name: ratio(found, name) for name in found}
    # the location of the data does not affect the figures
    told = [setting for setting in settings if not setting.startswith("data.path")]
    content = {"settings": told, "device": match.device, "need": need, "to_stock": ratios}
    write_result(f"training-{options.name}", **content, outcomes=msgspec.to_builtins(found))


def peers_folder(folder: Path, match: Match, batches: Sequence[ScheduledBatch]) -> Path | None:
    """The folder in which contestants of the other environment find the job; None, with the reason on stderr, if they
    cannot take part.
    """
    reason = peers_reason(match.job, match.device)
    if reason is not None:
        print(f"fbgemm and torchrec do not take part: {reason}", file=sys.stderr)
        return None
    write_folder(folder, match.job, batches, usable_cores())
    return folder


def peers_reason(job: Job, device: str) -> str | None:
    """Why contestants of the other environment cannot take part; None if they can."""
    if device != "cpu":
        return "they are compared on a CPU"
    if not PEER_PYTHON.exists():
        return "their environment is missing: make bench-env"
    return why_not(job)


if __name__ == "__main__":
    main()
