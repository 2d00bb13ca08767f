"""One next-item model as an adopted script and as a job: do they end alike, and what does each cost?

    python -m benchmarks.both_ways --pairs 3

Both have the same first values, batches and optimizers, and one thread. Processor time is that of all processes of a
run, from its command to its end, by wait4. Prints it for each pair, then losses and values that differ.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import softplus

import rowcast

ITEMS, LENGTH, BATCH, WIDTH, STEPS, CAPACITY = 20_000, 20, 64, 32, 300, "1MiB"
JOB = f"""
job = {{ name = "both", run_dir = "run" }}
data = {{ format = "benchmarks.both_ways:open_batches", batch_size = {BATCH}, columns = {{ label_values = "none" }} }}
model = {{ kind = "benchmarks.both_ways:build" }}
optimizer = {{ sparse = {{ kind = "adagrad", lr = 0.05 }} }}
cache = {{ capacity = "{CAPACITY}" }}
trainer = {{ threads = 1 }}
[[tables]]
name = "item"
num_embeddings = {ITEMS}
embedding_dim = {WIDTH}
features = ["history", "positive", "negative"]
pooling = "none"
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.0, norm_first=True, batch_first=True)

    def scores(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows f32 [3, B, L, D], of histories, positives and negatives -> of the last two f32 [B, L]."""
        history, positive, negative = rows
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.block(history + self.place.weight, src_mask=mask, is_causal=True)
        return (x * positive).sum(-1), (x * negative).sum(-1)

    def loss(self, outputs: tuple[Tensor, Tensor], labels: Tensor | None) -> Tensor:
        positive, negative = outputs
        return (softplus(-positive) + softplus(negative)).mean()


def batches() -> Iterator[Any]:
    """Ids of histories, positives and negatives, i64 [3, B, L]."""
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        items = (rng.random((BATCH, LENGTH + 1)) ** 2 * ITEMS).astype(np.int64)
        yield np.stack([items[:, :-1], items[:, 1:], rng.integers(0, ITEMS, (BATCH, LENGTH))])


# the job


class OfJob(Net):
    def forward(self, dense: Tensor, embeddings: list[rowcast.Sequences]) -> tuple[Tensor, Tensor]:
        return self.scores(torch.stack([own.values.view(-1, LENGTH, WIDTH) for own in embeddings]))

    def training_objects(self) -> list[Any]:
        self.adamw = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [self.adamw]

    def step(self, n: int) -> None:
        self.adamw.step()


def build(job: rowcast.Job, num_dense: int) -> nn.Module:
    return OfJob()


def open_batches(job: rowcast.Job) -> Callable[[str, int], Iterator[Any]]:
    def of(split: str, epoch: int) -> Iterator[Any]:
        for ids in batches() if split == "train" else ():
            yield {"sparse": dict(zip(job.features, ids, strict=True)), "labels": np.full(BATCH, np.nan, np.float32)}

    return of


# the script


class OfScript(Net):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.scores(self.items(ids))


def script(folder: Path) -> None:
    model = OfScript()
    first = load_file(folder / "first")
    first["items.weight"] = first["embedding_bags.item.weight"]
    model.load_state_dict({name: first[name] for name in model.state_dict()})
    model = rowcast.adopt(model, capacity=CAPACITY)
    rows = torch.optim.Adagrad(model.items.parameters(), lr=0.05)
    adamw = torch.optim.AdamW([*model.place.parameters(), *model.block.parameters()], lr=1e-3)
    losses = []
    for ids in rowcast.ahead(torch.from_numpy(own) for own in batches()):
        loss = model.loss(model(ids), None)
        torch.autograd.backward(loss)
        rows.step()
        adamw.step()
        model.zero_grad()
        losses.append(loss.item())
    np.array(losses, np.float32).tofile(folder / "losses")
    save_file({name: own.clone() for name, own in model.state_dict().items()}, folder / "script")


# both


def seconds(*arguments: str) -> float:
    """Runs a command of Python to its end. Returns its processor time and that of all processes that it waited for."""
    command = [sys.executable, "-m", *arguments]
    _, status, used = os.wait4(os.spawnv(os.P_NOWAIT, sys.executable, command), 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} ended with status {status}")
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains one model both ways.")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--script", type=Path, help="the adopted script alone, in this folder")
    options = parser.parse_args()
    if options.script:
        script(options.script)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB)

        def train(run: str, *more: str) -> tuple[float, dict[str, Tensor]]:
            job = ("--config", str(folder / "job.toml"), f"--set=job.run_dir={folder / run}", *more)
            used = seconds("rowcast", "train", *job)
            seconds("rowcast", "export", "--run", str(folder / run), "--out", str(folder / f"{run}.out"))
            return used, load_file(folder / f"{run}.out")

        save_file(train("none", "--max-steps=0")[1], folder / "first")
        ratios = []
        for pair in range(options.pairs):
            adopted = seconds("benchmarks.both_ways", "--script", name)
            job, end = train(f"run-{pair}")
            ratios.append(job / adopted)
            print(f"pair {pair}: adopted {adopted:.1f} s, job {job:.1f} s of processor time", flush=True)
        ended = load_file(folder / "script")
        end["items.weight"] = end["embedding_bags.item.weight"]
        differ = sum(int((own != end[name]).sum()) for name, own in ended.items())
        count = sum(map(torch.numel, ended.values()))
        ours, theirs = (np.fromfile(path, np.float32) for path in (folder / "losses", folder / "run-0" / "losses.f32"))
        print(f"job / adopted, median: {median(ratios):.2f}")
        print(f"differ: {(ours != theirs).sum()} of {len(ours)} losses, {differ} of {count} values")


if __name__ == "__main__":
    main()
