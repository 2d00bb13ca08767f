"""A script over a table of 10^8 rows of 16 columns, 1 % on the device: `python -m benchmarks.adopt_large FOLDER`.

The table is made in FOLDER, which needs 6.4 GB, by the script's own first values. Prints the time of each part, and the
peak of both processes' own memory (RssAnon: without pages of files, which the kernel drops) beside the cache's bytes.
With `--compare` the script is also trained as it is, and every value is compared; choose `--rows` that fit.
With `--save` it saves itself in FOLDER/run every 20 steps and goes on from there, if there is a save. For each save it
prints the bytes of the layer over those of the rows with another value since the last, and at the end a checksum of all
rows that were looked up. `--steps 40`, then the same without it, has the checksum of one run.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rowcast
from rowcast.runtime.checkpoint_manifest import newest_checkpoint, read_manifest

DIM, BATCH, STEPS, EVERY = 16, 1024, 60, 20
MOST_SEEN: dict[int, int] = {}  # the most own memory of a process, in bytes


def look() -> None:
    """At this process and its children."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        pids = [os.getpid(), *map(int, file.read().split())]
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        kilobytes = next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
        MOST_SEEN[pid] = max(MOST_SEEN.get(pid, 0), 1024 * kilobytes)


class Model(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.items = nn.Embedding(rows, DIM)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.top(self.items(ids).flatten(1))
        return logits.squeeze(1)


def data(rows: int) -> tuple[Tensor, Tensor]:
    chosen = torch.Generator().manual_seed(2)
    ids = (torch.rand(BATCH * STEPS, 2, generator=chosen) ** 3 * rows).long()
    return ids, torch.rand(BATCH * STEPS, generator=chosen)


def train_and_save(model: Model, rows: int, run: Path, steps: int) -> None:
    ids, labels = data(rows)
    optimizer, begun_s = torch.optim.Adam(model.parameters(), lr=1e-3), time.perf_counter()
    done = rowcast.restore(run, model, optimizer)
    print(f"goes on at step {done}: {time.perf_counter() - begun_s:.1f} s", flush=True)
    loader = DataLoader(TensorDataset(ids, labels), batch_size=BATCH)
    for step, (x, y) in enumerate(rowcast.ahead(loader, skip=done), done + 1):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        look()
        if step % EVERY == 0:
            begun_s = time.perf_counter()
            rowcast.save(run, model, optimizer, step=step)
            seconds = time.perf_counter() - begun_s
            say_of_save(run, seconds, len(torch.unique(ids[: BATCH * step])))
        if step == steps:
            break
    with torch.no_grad():
        values = model.items(torch.unique(ids[: BATCH * steps]))
    print(f"SHA-256 of {len(values):,} rows after step {steps}: {hashlib.sha256(values.numpy().tobytes()).hexdigest()}")


def say_of_save(run: Path, seconds: float, moved: int) -> None:
    """`moved`: rows that dense Adam has moved since the last save, which are all that were looked up."""
    folder = newest_checkpoint(run)
    assert folder is not None, "it was saved"
    layer, useful = read_manifest(folder).layers[-1], moved * 4 * 3 * DIM
    written = sum(file.nbytes for file in layer.files)
    print(
        f"save of {layer.num_rows:,} rows in {seconds:.1f} s: {written:,} bytes, {written / useful:.3f} of those of "
        f"{moved:,} rows with other values; {sum(path.stat().st_size for path in run.rglob('*')):,} bytes on disk",
        flush=True,
    )


def train(model: Model, rows: int) -> list[Tensor]:
    """Returns the losses."""
    ids, labels = data(rows)
    optimizer, losses, begun_s = torch.optim.Adam(model.parameters(), lr=1e-3), [], time.perf_counter()
    for step, (x, y) in enumerate(DataLoader(TensorDataset(ids, labels), batch_size=BATCH)):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
        if step % 10 == 9 or step == 1:
            look()
            print(f"step {step}: {time.perf_counter() - begun_s:.1f} s", flush=True)
    return losses


def main(folder: Path, rows: int, init: str, saved_steps: int, *, compares: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begun_s = time.perf_counter()
    with rowcast.tables(folder, init=init):
        model = Model(rows)
    print(f"first values of {rows:,} rows: {time.perf_counter() - begun_s:.1f} s")
    look()
    alone = MOST_SEEN[os.getpid()]
    capacity = min(rows // 100, 1_000_000)
    adopted: Any = rowcast.adopt(model, capacity=f"{capacity} rows")
    losses = [] if saved_steps else train(adopted, rows)
    if saved_steps:
        train_and_save(adopted, rows, folder / "run", saved_steps)
    cache = capacity * 4 * (3 * DIM + 4)
    for pid, most in MOST_SEEN.items():
        who = "the script" if pid == os.getpid() else "the prefetcher"
        beside = most - (alone + cache if pid == os.getpid() else 0)
        print(f"{who}: {most / 2**20:,.0f} MiB of its own at most, {beside / 2**20:,.0f} beside torch and the cache")
    if compares:
        torch.manual_seed(0)
        plain = Model(rows)
        pairs = zip([*train(plain, rows), *plain.parameters()], [*losses, *adopted.parameters()], strict=True)
        differ = sum(int((one.detach() != other.detach()).sum()) for one, other in pairs)
        print(f"{differ} of {sum(own.numel() for own in plain.parameters()) + len(losses):,} values differ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--init", default="", help="a rule, such as normal:0.02, in place of the script's first values")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS, help="of --save")
    given = parser.parse_args()
    main(given.folder, given.rows, given.init, given.save * given.steps, compares=given.compare)
