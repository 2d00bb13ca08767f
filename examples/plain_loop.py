"""The plain loop: the same training with every table in memory, in stock PyTorch. On a CPU, rowcast equals it bit for bit."""

import argparse
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rowcast.job.file import load_job
from rowcast.job.learning_rate import learning_rate
from rowcast.job.schema import Job, SparseOptimizer, Table
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.runtime.cores import usable_cores
from rowcast.trainer.models import Embedded, Sequences
from rowcast.trainer.models.model_side import DenseSide

STOCK: dict[str, Callable[[nn.Parameter, SparseOptimizer], torch.optim.Optimizer]] = {
    "sgd": lambda weight, settings: torch.optim.SGD([weight], lr=settings.lr),
    "adagrad": lambda weight, settings: torch.optim.Adagrad([weight], lr=settings.lr, eps=settings.epsilon),
    "adam": lambda weight, settings: torch.optim.SparseAdam(
        [weight], lr=settings.lr, betas=settings.betas, eps=settings.epsilon
    ),
}  # row-wise Adagrad torch.optim lacks


class PlainTable:
    """One table, the bags of its features, and its optimizer; weight and state are trained in place."""

    def __init__(self, table: Table, first_feature: int, settings: SparseOptimizer, tensors: dict[str, Tensor]) -> None:
        # features from first_feature of the job's
        self.table, self.first_feature, self.settings = table, first_feature, settings
        # in the table's dtype; look-ups are of its fp32 values
        self.rounded = tensors[f"embedding_bags.{table.name}.weight"]
        self.embedding = nn.Embedding(table.num_embeddings, table.embedding_dim, device="meta")
        self.embedding.weight = nn.Parameter(self.rounded.float())
        prefix = f"optimizer.{table.name}."
        self.state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        # master: fp32 weights before rounding
        self.trained = nn.Parameter(self.state.pop("master", self.embedding.weight.detach()))
        self.optimizer = STOCK[settings.kind](self.trained, settings) if settings.kind in STOCK else None
        # goes on from the state of an earlier run; Adam counts steps from its own first one
        if self.optimizer is not None:
            self.optimizer.state[self.trained] |= self.state | ({"step": 0} if settings.kind == "adam" else {})

    def forward(self, batch: Batch) -> list[Embedded]:
        """Pooled embeddings [B, D] of each of the table's features, or its sequences, from one call of nn.Embedding."""
        first_bag, end_bag = (
            n * batch.size for n in (self.first_feature, self.first_feature + len(self.table.features))
        )
        offsets = torch.arange(len(batch.ids) + 1) if batch.offsets is None else torch.tensor(batch.offsets)
        counts, lookups = offsets[first_bag : end_bag + 1].diff(), slice(int(offsets[first_bag]), int(offsets[end_bag]))
        self.touched = torch.from_numpy(np.unique(batch.ids[lookups]))
        rows = self.embedding(torch.tensor(batch.ids[lookups]))
        rows = rows if batch.weights is None else rows * torch.tensor(batch.weights[lookups])[:, None]
        if self.table.pooling == "none":  # rows as they are, and 0.0 for -0.0, as sums have it
            features = zip(
                (rows + 0.0).split(counts.view(-1, batch.size).sum(1).tolist()),
                counts.view(-1, batch.size),
                strict=True,
            )
            return [
                Sequences(values=own, offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int())
                for own, lengths in features
            ]
        pooled = torch.zeros(len(counts), self.table.embedding_dim).index_add(
            0, torch.arange(len(counts)).repeat_interleave(counts), rows
        )
        pooled = pooled / counts.clamp(min=1)[:, None] if self.table.pooling == "mean" else pooled
        return list(pooled.view(-1, batch.size, self.table.embedding_dim).unbind())

    @torch.no_grad()
    def update(self, train_step: int) -> None:
        """One step on the gradient of the last forward; where the model ignores the table, that is zero."""
        weight, rows, settings, lr = self.trained, self.touched, self.settings, learning_rate(self.settings, train_step)
        looked_up = self.embedding.weight
        weight.grad = torch.zeros_like(weight) if looked_up.grad is None else looked_up.grad
        g = weight.grad[rows]
        if settings.clip_rows is not None:
            weight.grad[rows] = g = g * (settings.clip_rows / ((g * g).sum(1, keepdim=True).sqrt() + 1e-6)).clamp(
                max=1.0
            )
        if settings.kind == "adam":  # the rows that the batch touches, also by a zero gradient
            weight.grad = torch.sparse_coo_tensor(rows[None], g, weight.shape, check_invariants=True)
        if self.optimizer is not None:
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
        else:
            self.state["sum"][rows] += (g * g).mean(1, keepdim=True)
            weight[rows] -= lr * g / (self.state["sum"][rows].sqrt() + settings.epsilon)
        weight.grad = looked_up.grad = None
        looked_up.copy_(self.rounded.copy_(weight))  # to the nearest, ties to even; in fp32 all three are one memory


def run_plain_loop(
    job: Job, start: dict[str, Tensor], batches: Iterable[ScheduledBatch]
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains on `batches`; gives the loss of each train step, and the tables, row state and dense weights after the last."""
    tensors = {name: tensor.clone() for name, tensor in start.items()}
    tables = [
        PlainTable(table, job.features.index(table.features[0]), job.optimizer.sparse, tensors) for table in job.tables
    ]
    if (first := next(batches := iter(batches), None)) is None:
        return [], tensors
    side, losses = DenseSide(job, num_dense=first.batch.dense.shape[1]), []
    side.model.load_state_dict({name: start[name] for name in side.model.state_dict()})
    for scheduled in itertools.chain([first], batches):
        batch, training = scheduled.batch, scheduled.kind == "train"
        with torch.set_grad_enabled(training):
            embeddings = [feature for table in tables for feature in table.forward(batch)]
            outputs = side.forward(torch.tensor(batch.dense), embeddings, training=training)
        if training:
            torch.autograd.backward(loss := side.loss(outputs, torch.tensor(batch.labels)))
            side.step(scheduled.train_step)
            for table in tables:
                table.update(scheduled.train_step)
            losses.append(loss.item())
    return losses, tensors | side.model.state_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with every table in memory, from an export of --max-steps 0.")
    for name in ("--config", "--start", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--max-steps", type=int, help="train steps")
    parser.add_argument("--losses", type=Path, default="/dev/null", help="file for one float32 a train step")
    options = parser.parse_args()
    job = load_job(options.config)
    # in one thread: the first square root of a process may be inaccurate in several (pytorch#188792)
    torch.ones(1).sqrt()
    torch.set_num_threads(usable_cores() if job.trainer.threads == "auto" else job.trainer.threads)
    losses, end = run_plain_loop(job, load_file(options.start), schedule(job, open_reader(job), options.max_steps))
    save_file(end, options.out)
    np.array(losses, np.float32).tofile(options.losses)


if __name__ == "__main__":
    main()
