"""Does training with both processes give the bits of the plain loop on a real click log?

Method: for each way of a pairwise cover (every pair of settings occurs in some run), start `prefetcher run` and
`trainer run` as separate processes, export what they trained, run `examples/plain_loop.py` over the same batches from
the export of `--max-steps 0`, and compare every bit: the loss of each step, every row and its optimizer state, every
dense weight. Rows of `redis` lie on a server that is started here.

    make exact ROWCAST_RETAIL=folder        the folder holds train.tsv, day_0_*.npy, bags.parquet and columns.json
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.commands import command
from examples.plain_loop import run_plain_loop
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.stores import STORES, Redis, StoreWithTier
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.first_batches import measure
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import ScheduledBatch
from rowcast.trainer.report.report_json import Report, read_report
from tests.support.redis_server import COMMAND, REASON, shared_server

Way = Mapping[str, str]
FACTORS: dict[str, tuple[str, ...]] = {
    "optimizer": ("sgd", "adagrad", "rowwise_adagrad", "adam"),
    "data": ("tsv", "npy", "bags"),
    "capacity": ("one batch", "a tenth", "everything"),
    "depth": ("1", "2", "4"),
    "horizon": ("1", "8", "64"),
    "ring": ("1MiB", "auto"),
    "shuffle": ("none", "window:4096"),
    "batch_size": ("2048", "4096"),
    "store": ("memory", "tiered", "redis"),
}
SYNTHETIC = ("synthetic",)  # replaces the values of "data" without a log
WITHOUT_SERVER = tuple(kind for kind in FACTORS["store"] if kind != "redis")  # replaces those of "store"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    way: Way
    differences: list[str]  # names of what differs; empty if every bit is equal
    report: Report
    plain_s: float


def pairwise_cover(factors: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Settings in which every two values of two factors meet; greedy, about the product of the two largest factors."""
    names = list(factors)
    missing = {
        frozenset([(a, x), (b, y)]) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }  # fmt: skip
    ways = []
    while missing:
        (seed, *_) = sorted(missing, key=sorted)
        way = dict(seed)
        for name in names:
            if name not in way:
                covered = {value: newly_covered(way, name, value, missing) for value in factors[name]}
                way[name] = max(covered, key=covered.__getitem__)
        missing -= {frozenset(pair) for pair in itertools.combinations(way.items(), 2)}
        ways.append({name: way[name] for name in names})
    return ways


def newly_covered(way: Way, name: str, value: str, missing: set[frozenset[tuple[str, str]]]) -> int:
    return sum(frozenset([(name, value), other]) in missing for other in way.items())


def job_text(way: Way, log: Path | None, run_dir: Path) -> str:
    dim = 16 if way["optimizer"] in ("sgd", "adam") else 12
    return "\n".join(
        [
            f'[job]\nseed = 7\nrun_dir = "{run_dir}"',
            f"[data]\nbatch_size = {way['batch_size']}\neval_fraction = 0.1\n{data_lines(way['data'], log)}",
            table_lines(way["data"], log, dim),
            f"[model]\nbottom_mlp = [64, {dim}]\ntop_mlp = [64, 1]",
            f'[optimizer]\nsparse = {{ kind = "{way["optimizer"]}", lr = 0.02 }}\ndense = {{ kind = "sgd", lr = 0.1 }}',
            f"[lookahead]\ndepth = {way['depth']}\nhorizon = {way['horizon']}",
            f'[transport]\nring = "{way["ring"]}"',
            '[metrics]\nprefetcher = "127.0.0.1:0"\ntrainer = "127.0.0.1:0"',
            '[cache]\ncapacity = "1TiB"',
            "",
        ]
    )


def data_lines(data: str, log: Path | None) -> str:
    match data:
        case "tsv":
            return f'format = "criteo-tsv"\npath = "{log}/train.tsv"'
        case "npy":
            return f'format = "criteo-npy"\npath = "{log}"'
        case "bags":
            return f'format = "parquet"\npath = "{log}/bags.parquet"'
    return 'format = "synthetic"\n[data.synthetic]\nsamples = 60000'


def table_lines(data: str, log: Path | None, dim: int) -> str:
    if data == "bags":
        return "\n".join(bag_tables(dim))
    sizes = (
        [2000, 50000, 7, 300, 120000, 40]
        if log is None
        else [column["num_ids"] for column in json.loads((log / "columns.json").read_text())]
    )
    return f"[tables_from]\nembedding_dim = {dim}\ncardinalities = {sizes}"


def bag_tables(dim: int) -> Iterator[str]:
    """An invoice's stock codes and families as bags; the codes of its first and last line share a table."""
    sizes = {"stock": 3776, "family": 124, "customer": 3362, "country": 39, "hour": 77, "day": 221}
    features = {
        "stock": ["cat_0", "cat_6", "cat_7"], "family": ["cat_1"], "customer": ["cat_2"],
        "country": ["cat_3"], "hour": ["cat_4"], "day": ["cat_5"],
    }  # fmt: skip
    for name, rows in sizes.items():
        pooling = "mean" if name == "family" else "sum"
        yield f'[[tables]]\nname = "{name}"\nnum_embeddings = {rows}\nembedding_dim = {dim}\npooling = "{pooling}"'
        yield f"features = {json.dumps(features[name])}"


def capacity_of(way: Way, job: Job, batches: Sequence[ScheduledBatch]) -> int:
    groups = group_specs(job)
    one_batch = max(measure(groups, [batch]).largest_batch_rows[0] for batch in batches)
    if way["capacity"] == "one batch":
        return one_batch
    return groups[0].num_rows if way["capacity"] == "everything" else max(one_batch, groups[0].num_rows // 10)


def store_settings(way: Way, capacity: int) -> list[str]:
    """A memory tier has hardly more rows than the device, so that rows come and go."""
    settings = STORES[way["store"]].settings
    tier = [f'store.memory="{capacity + 100} rows"'] if issubclass(settings, StoreWithTier) else []
    server = [f'store.url="{shared_server().url_text}"'] if settings is Redis else []
    return [f'store.kind="{way["store"]}"', *tier, *server]


def train(config: Path, run_dir: Path, settings: list[str], max_steps: int | None) -> dict[str, Tensor]:
    """Runs both processes to their end; returns the export of what they trained."""
    steps = [] if max_steps is None else ["--max-steps", str(max_steps)]
    command(
        "rowcast.deploy.local",
        "--config",
        str(config),
        *(f"--set={setting}" for setting in settings),
        *steps,
        "--fresh",
    )
    command("prefetcher", "export", "--run", str(run_dir), "--out", str(run_dir / "model.safetensors"))
    return load_file(run_dir / "model.safetensors")


def compare(
    way: Way,
    log: Path | None,
    folder: Path,
    max_steps: int | None,
    start_of: Callable[[Job, int], dict[str, Tensor]] | None = None,
) -> Outcome:
    """Trains one way twice, with the processes and with the plain loop. `start_of` returns the state before training,
    by default exported by the processes.
    """
    run_dir, config = folder / "run", folder / "job.toml"
    config.write_text(job_text(way, log, run_dir))
    shuffle = f"data.shuffle={json.dumps(way['shuffle'])}"
    job = load_job(config, (shuffle,))
    batches = list(schedule(job, open_reader(job), max_steps))
    capacity = capacity_of(way, job, batches)
    settings = [shuffle, f'cache.capacity="{capacity} rows"', *store_settings(way, capacity)]
    num_dense = batches[0].batch.dense.shape[1]
    start = train(config, run_dir, settings, 0) if start_of is None else start_of(job, num_dense)
    end = train(config, run_dir, settings, max_steps)
    began_s = time.perf_counter()
    losses, plain = run_plain_loop(job, start, batches)
    plain_s = time.perf_counter() - began_s
    differences = [name for name in plain if name not in end or not equal_bits(end[name], plain[name])]
    if (run_dir / "losses.f32").read_bytes() != np.array(losses, np.float32).tobytes():
        differences.append("losses")
    return Outcome(way=way, differences=differences, report=read_report(run_dir / "report.json"), plain_s=plain_s)


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Also for tensors with two bytes per element."""
    as_bytes = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*as_bytes)


def cover(log: Path | None, **narrowed: tuple[str, ...]) -> list[dict[str, str]]:
    """The pairwise cover of all ways that can run here."""
    data = {"data": SYNTHETIC} if log is None else {}
    stores = {"store": WITHOUT_SERVER} if COMMAND is None else {}
    return pairwise_cover(FACTORS | data | stores | narrowed)


def table_row(outcome: Outcome) -> str:
    report, way = outcome.report, outcome.way
    verdict = "equal" if not outcome.differences else f"DIFFERENT: {', '.join(outcome.differences[:3])}"
    return (
        f"| {' | '.join(way.values())} | {report.steps} | {report.rows_fetched} | {report.rows_evicted} | "
        f"{report.wall_s:.1f} | {outcome.plain_s:.1f} | {verdict} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--log", type=Path, default=os.environ.get("ROWCAST_RETAIL"), help="folder of the log; none: synthetic data"
    )
    parser.add_argument("--max-steps", type=int, help="train steps of each run; all by default")
    options = parser.parse_args()
    log = None if options.log is None else Path(options.log).absolute()
    torch.ones(1).sqrt()
    print(f"data: {log or 'synthetic, without a log'}; torch {torch.__version__}, {torch.get_num_threads()} threads")
    if COMMAND is None:
        print(f"redis is left out: {REASON}")
    print(f"| {' | '.join(FACTORS)} | steps | fetched | evicted | run s | plain s | bits |")
    print("|" + "---|" * (len(FACTORS) + 6))
    failed = 0
    for way in cover(log):
        with tempfile.TemporaryDirectory() as folder:
            outcome = compare(way, log, Path(folder), options.max_steps)
        failed += bool(outcome.differences)
        print(table_row(outcome), flush=True)
    print(f"{failed} of {len(cover(log))} runs differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
