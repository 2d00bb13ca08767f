"""What does finding the ids of a coming batch cost, against the time of the script's own loader?

    python -m benchmarks.id_program

Loaders hold their samples in memory, which is the hardest case: nothing is parsed or read. Each step is recorded once,
as in a script. Processor time of one thread, the least of 25 rounds, us a batch: the loader, the batch's form, the
program, and the distinct rows, which a planner needs whatever finds the ids.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.machine import machine, write_result
from rowcast.trainer.adopt.id_program import Program, Recorder, TableKey, leaves_of
from rowcast.trainer.adopt.records import distinct_rows

ROUNDS, CALLS = 25, 10
TABLE = TableKey("", 1_000_000)
Step = Callable[[Any], Iterator[Tensor]]  # a batch -> the ids of each look-up, each of a table of its own


class Clicks(Dataset[Any]):
    """One sample at a time: 13 floats, 26 ids and a label."""

    def __init__(self, num: int) -> None:
        self.dense, self.ids = torch.rand(num, 13).numpy(), torch.randint(0, 1_000_000, (num, 26)).numpy()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> Any:
        return self.dense[at], self.ids[at], 1.0


def by_table(samples: list[Any]) -> Any:
    """Offsets and ids of each table for bags, as DLRM has them."""
    dense, ids, labels = (torch.from_numpy(np.array(own)) for own in zip(*samples, strict=True))
    offsets = torch.stack([torch.arange(len(samples)) for _ in range(26)])
    return torch.log(dense + 1), offsets, ids.t(), labels


FLOATS = torch.rand(40 * 256, 40) * 1000
SHIFTS = torch.arange(26) * 1000
SHAPES: dict[str, tuple[DataLoader[Any], Step]] = {
    "a row of ids for each table, 2,048 x 26": (
        DataLoader(Clicks(8 * 2048), 2048, collate_fn=by_table),
        lambda batch: (batch[2][table] for table in range(26)),
    ),
    "columns of a float matrix, 256 x 24": (
        DataLoader(TensorDataset(FLOATS, FLOATS[:, 0]), 256),
        lambda batch: (batch[0][:, table : table + 1].long() for table in range(24)),
    ),
    "one table, ids plus offsets, 2,048 x 26": (
        DataLoader(Clicks(8 * 2048), 2048),
        lambda batch: iter([batch[1] + batch[1].new_tensor(SHIFTS.tolist()).unsqueeze(0)]),
    ),
}


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    print(
        f"{'look-ups':42s} {'operations':>10s} {'loader':>8s} {'form':>6s} {'program':>8s} {'share':>7s} {'rows':>7s}"
    )
    results = {name: measured(*shape) for name, shape in SHAPES.items()}
    line = "{operations:10d} {loader:8.0f} {form:6.1f} {program:8.1f} {share:6.1f} % {rows:7.0f}"
    for name, result in results.items():
        print(f"{name:42s} " + line.format(**result))
    write_result("id_program", results=results)


def measured(loader: DataLoader[Any], step: Step) -> dict[str, Any]:
    batches = endless(loader)
    batch = next(batches)
    leaves = leaves_of(batch)
    recorder = Recorder(leaves)
    with recorder:
        looked_up = list(step(batch))
    for ids in looked_up:
        recorder.note(TABLE, ids)
    program = Program(recorder, is_alone=True)
    hints = [ids for _, ids in program.run(leaves) if isinstance(ids, Tensor)]
    assert all(torch.equal(hint, ids) for hint, ids in zip(hints, looked_up, strict=True))
    times = {
        "loader": least_us(lambda: next(batches)),
        "form": least_us(lambda: leaves_of(batch)),
        "program": least_us(lambda: program.run(leaves)),
        "rows": least_us(lambda: [distinct_rows(TABLE.num_embeddings, ids.reshape(-1).numpy()) for ids in hints]),
    }
    share = 100 * (times["form"] + times["program"]) / times["loader"]
    return {**times, "operations": program.num_operations, "share": share}


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def least_us(call: Callable[[], object]) -> float:
    least = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(CALLS):
            call()
        least = min(least, time.process_time() - began)
    return 1e6 * least / CALLS


if __name__ == "__main__":
    main()
