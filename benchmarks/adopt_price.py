"""What `rowcast.adopt` costs a script: `python -m benchmarks.adopt_price --case tenth`.

    tenth      a DLRM, 2,048 samples of 26 look-ups, sparse SGD; a tenth of the rows on the device
    dense      the same with Adam over all rows
    demanded   the same as `tenth`, from batches that are not read ahead: every row is asked for
    fits       every row fits, so tables stay ordinary

Runs the script adopted and as it is, in pairs of processes, and prints medians: processor time of a step, of the script
and its prefetcher, and seconds of a step.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import rowcast

BATCH, TABLES, DIM = 2048, 26, 16
WARM_STEPS = 12  # not measured
CASES = ("tenth", "dense", "demanded", "fits")
TICKS = os.sysconf("SC_CLK_TCK")


class Model(nn.Module):
    def __init__(self, rows: int, *, is_sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=is_sparse) for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, DIM))
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(
            nn.Linear(DIM + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        below, starts = self.bottom(dense), torch.arange(len(dense))
        vectors = torch.stack([below, *(table(ids[:, i], starts) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        first, second = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
        logits: Tensor = self.top(torch.cat([below, products[:, first, second]], 1))
        return logits.squeeze(1)


class Clicks(Dataset[Any]):
    """Batches; a few rows of each table are looked up most."""

    def __init__(self, rows: int, steps: int) -> None:
        chosen = torch.Generator().manual_seed(1)
        self.dense = torch.rand(steps, BATCH, 13, generator=chosen)
        self.ids = (torch.rand(steps, BATCH, TABLES, generator=chosen) ** 4 * rows).long()
        self.labels = torch.rand(steps, BATCH, generator=chosen)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.dense[step], self.ids[step], self.labels[step]


def processor_s(pid: int) -> float:
    """Returns the processor time that a process and its ended children have used, in seconds."""
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rpartition(")")[2].split()[11:15])) / TICKS


def children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return list(map(int, file.read().split()))


def measure(case: str, rows: int, steps: int, *, is_adopted: bool) -> None:
    """Trains and prints the ms of a step: of the script's processor, the prefetcher's, of the clock; and the loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(rows, is_sparse=case != "dense")
    states = 2 if case == "dense" else 0
    share = 4.0 if case == "fits" else 0.1
    if is_adopted:
        rowcast.adopt(model, capacity=int(share * TABLES * rows * 4 * (DIM * (1 + states) + 4)))
    parameters = model.parameters()
    rule = torch.optim.Adam(parameters, lr=1e-3) if case == "dense" else torch.optim.SGD(parameters, lr=0.1)
    clicks = Clicks(rows, steps)
    batches: Iterable[Any] = (
        (clicks[k] for k in range(steps)) if case == "demanded" else DataLoader(clicks, batch_size=None)
    )
    begun: list[float] = []
    for step, (dense, ids, labels) in enumerate(batches):
        if step == WARM_STEPS:
            begun = [time.process_time(), sum(map(processor_s, children())), time.perf_counter()]
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, ids), labels)
        rule.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        rule.step()
    ended = [time.process_time(), sum(map(processor_s, children())), time.perf_counter()]
    print(*(1e3 * (end - begin) / (steps - WARM_STEPS) for begin, end in zip(begun, ended, strict=True)), loss.item())


def one(case: str, rows: int, steps: int, which: str) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.adopt_price", "--case", case, "--only", which]
    out = subprocess.run(
        [*command, "--rows", str(rows), "--steps", str(steps)], capture_output=True, text=True, check=True
    ).stdout
    return list(map(float, out.split()))


def compare(case: str, rows: int, steps: int, pairs: int) -> None:
    found = [(one(case, rows, steps, "plain"), one(case, rows, steps, "adopted")) for _ in range(pairs)]
    assert all(plain[-1] == adopted[-1] for plain, adopted in found), "an adopted script ends with its own loss"
    for name, at in (("script, processor ms", 0), ("prefetcher, processor ms", 1), ("clock ms", 2)):
        plain, adopted = (statistics.median(pair[side][at] for pair in found) for side in (0, 1))
        print(f"{case}: {name} a step {plain:.1f} as it is, {adopted:.1f} adopted")
    ratios = [sum(adopted[:2]) / plain[0] for plain, adopted in found]
    pace = [plain[2] / adopted[2] for plain, adopted in found]
    print(
        f"{case}: processor time {statistics.median(ratios):.2f} of {', '.join(f'{own:.2f}' for own in sorted(ratios))}"
    )
    print(f"{case}: samples/s {statistics.median(pace):.2f} of {', '.join(f'{own:.2f}' for own in sorted(pace))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="tenth")
    parser.add_argument("--rows", type=int, default=100_000, help="of each of the 26 tables")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", choices=("plain", "adopted"), help="one run, in this process")
    given = parser.parse_args()
    if given.only:
        measure(given.case, given.rows, given.steps, is_adopted=given.only == "adopted")
    else:
        compare(given.case, given.rows, given.steps, given.pairs)
