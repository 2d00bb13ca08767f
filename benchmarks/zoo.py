"""Do the built-in models over pooled features reach the AUC of plain PyTorch, on real logs?

    python -m benchmarks.zoo FOLDER...       folders with a log as day_0_dense.npy, day_0_sparse.npy, day_0_labels.npy

Method: the log's first samples in their order, one epoch, the last tenth held out. rowcast's side is the plain loop
(examples/plain_loop.py), whose bits both processes have. The other side is written once more from the papers, with
torch.nn.EmbeddingBag, torch.optim and AUC by ranks: no code of rowcast but its reader. Both begin with the same first
values, of a new seed each time, so that what differs is the model and not chance.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.plain_loop import PlainTable, run_plain_loop
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.job.tables import table_specs
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.prefetcher.stores.first_values import initial_rows
from rowcast.protocol.batch import Batch
from rowcast.trainer.models import build_model
from rowcast.trainer.models.job_model import JobModel

DIM, ROWS_LR, DENSE_LR, BATCH_SIZE = 8, 0.05, 0.002, 1024
FILES = ("day_0_dense.npy", "day_0_sparse.npy", "day_0_labels.npy")
MODELS: dict[str, dict[str, Any]] = {
    "wide-deep": {"top_mlp": [64, 32, 1]},
    "deepfm": {"top_mlp": [64, 32, 1]},
    "dlrm": {"bottom_mlp": [64, DIM], "top_mlp": [64, 32, 1]},
    "dcnv2": {"bottom_mlp": [64, DIM], "top_mlp": [64, 32, 1], "cross_layers": 2, "cross_rank": 32},
}
Weights = dict[str, Tensor]


def cut(folder: Path, samples: int, out: Path) -> list[int]:
    """Writes the first samples of a log; returns the rows of each table."""
    for name in FILES:
        np.save(out / name, np.load(folder / name, mmap_mode="r")[:samples])
    ids = np.load(out / "day_0_sparse.npy")
    return [int(most) + 1 for most in ids.max(axis=0)]


def job_of(kind: str, data: Path, rows: Sequence[int], seed: int) -> Job:
    return parse_job(
        {
            "job": {"run_dir": str(data / "run"), "seed": seed},
            "data": {"format": "criteo-npy", "path": str(data), "batch_size": BATCH_SIZE, "eval_fraction": 0.1},
            "tables_from": {
                "cardinalities": list(rows),
                "embedding_dim": DIM,
                "init": "normal:0.1",
                "linear": kind in ("wide-deep", "deepfm"),
            },
            "model": {"kind": kind, **MODELS[kind]},
            "optimizer": {"sparse": {"kind": "adagrad", "lr": ROWS_LR}, "dense": {"kind": "adam", "lr": DENSE_LR}},
            "cache": {"capacity": "1GiB"},
        }
    )


def batches_of(job: Job, kind: str) -> Iterator[Batch]:
    return (scheduled.batch for scheduled in schedule(job, open_reader(job), None) if scheduled.kind == kind)


def first_values(job: Job, num_dense: int) -> Weights:
    """What an export before the first step holds."""
    start = dict(build_model(job, num_dense).state_dict())
    for table in table_specs(job):
        rows = initial_rows(job.job.seed, table, np.arange(table.num_embeddings))
        start[f"embedding_bags.{table.name}.weight"] = torch.from_numpy(rows)
        start[f"optimizer.{table.name}.sum"] = torch.zeros(rows.shape)
    return start


def our_auc(job: Job, start: Weights, num_dense: int) -> float:
    _, end = run_plain_loop(job, start, schedule(job, open_reader(job), None))
    tables = [PlainTable(own, job.features.index(own.features[0]), job.optimizer.sparse, end) for own in job.tables]
    side = JobModel(job, num_dense)
    side.model.load_state_dict({name: end[name] for name in side.model.state_dict()})

    def scores(batch: Batch) -> Tensor:
        embeddings = [feature for table in tables for feature in table.forward(batch)]
        logits: Tensor = side.forward(torch.from_numpy(batch.dense), embeddings, {}, training=False)
        return logits

    return auc_of(job, scores)


def auc_of(job: Job, scores: Any) -> float:
    with torch.no_grad():
        found = [(scores(batch).numpy(), batch.labels) for batch in batches_of(job, "eval")]
    return area_under_curve(*(np.concatenate(own) for own in zip(*found, strict=True)))


# the other side


class Paper(nn.Module):
    """A model as its paper has it, over tables of its own for vectors and for linear weights."""

    def __init__(self, job: Job, start: Weights) -> None:
        super().__init__()
        self.kind = job.model.kind
        rows = [start[f"embedding_bags.{table.name}.weight"] for table in job.tables]
        self.vectors = nn.ModuleList(bag(own[:, :DIM]) for own in rows)
        self.weights = nn.ModuleList(bag(own[:, DIM:]) for own in rows if own.shape[1] > DIM)
        dense = {
            name: own.clone() for name, own in start.items() if not name.startswith(("embedding_bags.", "optimizer."))
        }
        self.dense: Weights = {name: own.requires_grad_() for name, own in dense.items()}

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """dense f32 [B, num_dense], ids i64 [features, B, 1] -> logits [B]."""
        w, vectors = self.dense, [own(of) for own, of in zip(self.vectors, ids, strict=True)]
        match self.kind:
            case "dlrm":
                x = relu_mlp(w, "bottom_mlp", dense)
                every = torch.stack([x, *vectors], 1)
                i, j = torch.tril_indices(every.shape[1], every.shape[1], -1)
                x = torch.cat([x, torch.einsum("bid,bjd->bij", every, every)[:, i, j]], 1)
            case "dcnv2":
                x = first = torch.cat([relu_mlp(w, "bottom_mlp", dense), *vectors], 1)
                for n in range(MODELS["dcnv2"]["cross_layers"]):
                    narrow = x @ w[f"cross.{n}.v.weight"].T
                    x = first * (narrow @ w[f"cross.{n}.w.weight"].T + w[f"cross.{n}.w.bias"]) + x
            case _:
                x = torch.cat([dense, *vectors], 1)
        logits = mlp(w, "top_mlp", x, lambda h, _: h.relu())
        if self.kind in ("wide-deep", "deepfm"):
            logits = logits + functional.linear(dense, w["wide.weight"], w["wide.bias"])
            for own, of in zip(self.weights, ids, strict=True):
                logits = logits + own(of)
        if self.kind == "deepfm":
            for j, own in enumerate(vectors[1:], 1):  # pair by pair
                logits = logits + sum((own * other).sum(1, keepdim=True) for other in vectors[:j])
        return logits[:, 0]


def bag(rows: Tensor) -> nn.EmbeddingBag:
    return nn.EmbeddingBag.from_pretrained(rows.clone(), freeze=False, mode="sum", sparse=True)


def relu_mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return mlp(w, name, x, lambda h, _: h.relu()).relu()


def paper_auc(job: Job, start: Weights) -> float:
    paper = Paper(job, start)
    optimizers = [
        torch.optim.Adagrad(paper.parameters(), lr=ROWS_LR),
        torch.optim.Adam(paper.dense.values(), lr=DENSE_LR),
    ]

    def scores(batch: Batch) -> Tensor:
        logits: Tensor = paper(torch.from_numpy(batch.dense), torch.from_numpy(batch.ids).view(-1, batch.size, 1))
        return logits

    for batch in batches_of(job, "train"):
        loss = functional.binary_cross_entropy_with_logits(scores(batch), torch.from_numpy(batch.labels))
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
    return auc_of(job, scores)


def mlp(w: Weights, name: str, x: Tensor, activation: Callable[[Tensor, int], Tensor]) -> Tensor:
    count = sum(key.startswith(f"{name}.") and key.endswith("weight") for key in w)
    for n in range(count):
        x = functional.linear(x, w[f"{name}.{n}.weight"], w[f"{name}.{n}.bias"])
        x = x if n == count - 1 else activation(x, n)
    return x


def area_under_curve(scores: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> float:
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # ties share the mean of their ranks
    positives = int(labels.sum())
    above = ranks[labels > 0.5].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(labels) - positives)))


def print_pairs(log: str, kind: str, found: Sequence[tuple[float, float]]) -> None:
    """A row of the table, from the AUC of rowcast and of plain PyTorch for each seed."""
    ours, theirs = np.array(found).T
    spread = [f"{own.mean():.4f} +- {own.std(ddof=min(1, len(own) - 1)):.4f}" for own in (ours, theirs)]
    print(f"| {log} | {kind} | {spread[0]} | {spread[1]} | {np.abs(ours - theirs).max():.5f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--kinds", default=",".join(MODELS))
    options = parser.parse_args()
    torch.ones(1).sqrt()
    torch.set_num_threads(1)
    print("| log | model | rowcast | plain PyTorch | largest difference of a seed |\n|---|---|---|---|---|")
    for folder in options.folders:
        with tempfile.TemporaryDirectory() as data:
            rows = cut(folder, options.samples, Path(data))
            num_dense = np.load(Path(data, "day_0_dense.npy"), mmap_mode="r").shape[1]
            for kind in options.kinds.split(","):
                found = []
                for seed in range(1, options.seeds + 1):
                    job = job_of(kind, Path(data), rows, seed)
                    start = first_values(job, num_dense)
                    found.append((our_auc(job, start, num_dense), paper_auc(job, start)))
                print_pairs(folder.name, kind, found)


if __name__ == "__main__":
    main()
