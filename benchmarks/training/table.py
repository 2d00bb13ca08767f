"""Rowcast over stock PyTorch, for two kinds of data, two optimizers and two widths, while both train.

Question: how many samples per second do both processes of rowcast train with a cache of a tenth of the rows, compared
with one process of stock PyTorch with every row in memory, on the same cores? Method: `steady.py`, turns of about a
second, while the others are stopped; ratios within a round, to the faster of stock that decodes its batches itself and
stock with a DataLoader worker; medians and quartiles. Decoding TSV costs a core much, decoding npy next to nothing.
Look at the free cores first: if they are fewer than the cores, other programs were running and the figures are
unreliable.

    python -m benchmarks.training.table FOLDER --rounds 8        the folder holds train.tsv and day_0_*.npy of one log

takes about 11 minutes on 2 quiet cores; a smoke run of one line: `--rounds 2 --seconds 0.5 --only npy --only sgd --only
64 --name smoke`.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import write_result
from benchmarks.training import ours
from benchmarks.training.free_cores import free_cores
from benchmarks.training.recorded import touched, train_batches
from benchmarks.training.steady import STOCKS, WARM_STEPS, Turn, commands, faster_stock, in_turn, ratios, speed
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.runtime.machine import usable_cores

CONFIG = Path(__file__).parents[2] / "examples" / "retail.toml"
CAPACITY = 10.0  # percent of the rows that an epoch touches
EPOCHS = 200  # more than any contestant trains in its turns
OURS = ("rowcast", "rowcast, background")
FORMATS, OPTIMIZERS, DIMS = ("npy", "tsv"), ("adagrad", "sgd"), (16, 64)
HEAD = (
    "| data | optimizer | dimension | stock, samples/s | stock with a worker | rowcast over the faster | in the "
    "background "
    "| waited for rows | free cores |"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    data: str
    optimizer: str
    dim: int

    @property
    def settings(self) -> list[str]:
        """Without the location of the data."""
        return [
            f'data.format="criteo-{self.data}"',
            f"data.epochs={EPOCHS}",
            "data.eval_fraction=0",
            f"tables_from.embedding_dim={self.dim}",
            f"model.bottom_mlp=[512,256,64,{self.dim}]",
            f'optimizer.sparse.kind="{self.optimizer}"',
        ]


def path_setting(folder: Path, data: str) -> str:
    return f'data.path="{folder / "train.tsv" if data == "tsv" else folder}"'


def capacity_of(job: Job) -> str:
    rows = touched(job, train_batches(job, None))
    return ours.capacity_setting(job, rows.rows, CAPACITY, rows.largest_batch)


def line(cell: Cell, found: dict[str, list[Turn]], free: list[float]) -> str:
    def over(name: str) -> str:
        low, median, high = statistics.quantiles(ratios(found, name), n=4)
        return f"**{median:.2f}** ({low:.2f} to {high:.2f})"

    speeds = {name: f"{speed(found[name]):,.0f}" for name in STOCKS}
    speeds[faster_stock(found)] += " (faster)"
    waited = [sum(turn.waited_s for turn in found[name]) / sum(turn.wall_s for turn in found[name]) for name in OURS]
    cells = [
        cell.data,
        cell.optimizer,
        str(cell.dim),
        *speeds.values(),
        *map(over, OURS),
        f"{100 * max(waited):.2f} %",
        f"{min(free):.2f} to {max(free):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def measured(cell: Cell, folder: Path, rounds: int, seconds: float) -> tuple[dict[str, list[Turn]], list[float]]:
    """Turns of each contestant; free cores before and after them, while all are stopped."""
    settings = [*cell.settings, path_setting(folder, cell.data)]
    job = load_job(CONFIG, (*settings, 'cache.capacity="1GiB"', "data.epochs=1"))
    free = [free_cores()]
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as scratch:
        started = commands(CONFIG, settings, capacity_of(job), Path(scratch))
        found = in_turn(started, WARM_STEPS * job.data.batch_size, rounds, seconds)
    return found, [*free, free_cores()]


def cells(only: list[str]) -> Iterator[Cell]:
    for data, optimizer, dim in itertools.product(FORMATS, OPTIMIZERS, DIMS):
        if all(word in (data, optimizer, str(dim)) for word in only):
            yield Cell(data=data, optimizer=optimizer, dim=dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.2, help="of a turn")
    parser.add_argument("--name", default="table", help="of the file in build: speed-NAME.json")
    parser.add_argument("--only", action="append", default=[], help="npy, tsv, adagrad, sgd, 16 or 64; repeatable")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: quartiles need at least 2")
    lines, content = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"], []
    for cell in cells(options.only):
        found, free = measured(cell, options.folder.resolve(), options.rounds, options.seconds)
        lines.append(line(cell, found, free))
        print(lines[-1], file=sys.stderr, flush=True)
        speeds = {name: [turn.samples_per_s for turn in own] for name, own in found.items()}
        content.append({"settings": cell.settings, "free_cores": free, "samples_per_s": speeds})
    print(
        f"{options.rounds} rounds of {options.seconds:g} s, {usable_cores()} cores, a cache of {CAPACITY:g} % of the "
        "rows touched"
    )
    print("\n".join(lines))
    write_result(f"speed-{options.name}", rounds=options.rounds, seconds=options.seconds, cells=content)


if __name__ == "__main__":
    main()
