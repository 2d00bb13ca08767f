"""The plain loop: the same training with every table in memory, in stock PyTorch. On a CPU, rowcast equals it bit for bit."""

import argparse
import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from prefetcher.readers.base import open_reader
from prefetcher.readers.schedule import schedule
from protocol.batch import Batch, ScheduledBatch
from protocol.cores import usable_cores
from protocol.job import Job, SparseOptimizer, Table
from protocol.job_file import load_job
from trainer.models import build_dense_optimizer, build_model, mean_loss


class PlainTable:
    """One table, the bags of its features, and its optimizer; weight and state are trained in place."""

    def __init__(self, table: Table, first_feature: int, settings: SparseOptimizer, tensors: dict[str, Tensor]) -> None:
        self.table, self.first_feature, self.settings = table, first_feature, settings  # features from first_feature of the job's
        self.embedding = nn.Embedding(table.num_embeddings, table.embedding_dim, device="meta")
        self.embedding.weight = nn.Parameter(tensors[f"embedding_bags.{table.name}.weight"])
        prefix = f"optimizer.{table.name}."
        self.state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        self.optimizer = self.stock_optimizer()

    def stock_optimizer(self) -> torch.optim.Optimizer | None:
        """torch.optim's, going on from `self.state`; None for row-wise Adagrad, which torch.optim lacks."""
        weights, settings = [self.embedding.weight], self.settings
        optimizer: torch.optim.Optimizer | None = torch.optim.SGD(weights, lr=settings.lr) if settings.kind == "sgd" else None
        if settings.kind == "adagrad":
            optimizer = torch.optim.Adagrad(weights, lr=settings.lr, eps=settings.epsilon)
            optimizer.state[weights[0]]["sum"] = self.state["sum"]
        elif settings.kind == "adam":
            optimizer = torch.optim.SparseAdam(weights, lr=settings.lr, betas=settings.betas, eps=settings.epsilon)
            optimizer.state[weights[0]] = {"step": 0, **self.state}
        return optimizer

    def forward(self, batch: Batch) -> list[Tensor]:
        """Pooled embeddings [B, D] of each of the table's features, from one call of nn.Embedding."""
        first_bag, end_bag = (n * batch.size for n in (self.first_feature, self.first_feature + len(self.table.features)))
        offsets = torch.arange(len(batch.ids) + 1) if batch.offsets is None else torch.tensor(batch.offsets)
        counts = offsets[first_bag : end_bag + 1].diff()
        lookups = slice(int(offsets[first_bag]), int(offsets[end_bag]))
        self.touched = torch.from_numpy(np.unique(batch.ids[lookups]))
        rows = self.embedding(torch.tensor(batch.ids[lookups]))
        if batch.weights is not None:
            rows = rows * torch.tensor(batch.weights[lookups])[:, None]
        bags = torch.arange(len(counts)).repeat_interleave(counts)
        pooled = torch.zeros(len(counts), self.table.embedding_dim).index_add(0, bags, rows)
        if self.table.pooling == "mean":
            pooled = pooled / counts.clamp(min=1)[:, None]
        return list(pooled.view(-1, batch.size, self.table.embedding_dim).unbind())

    @torch.no_grad()
    def update(self) -> None:
        """One step on the gradient of the last forward; where the model ignores the table, that is zero."""
        weight, rows, settings = self.embedding.weight, self.touched, self.settings
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        g = weight.grad[rows]
        if settings.kind == "adam":  # the rows that the batch touches, also by a zero gradient
            weight.grad = torch.sparse_coo_tensor(rows[None], g, weight.shape, check_invariants=True)
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            self.state["sum"][rows] += (g * g).mean(1, keepdim=True)
            weight[rows] -= settings.lr * g / (self.state["sum"][rows].sqrt() + settings.epsilon)
        weight.grad = None


def run_plain_loop(job: Job, start: dict[str, Tensor], batches: Iterable[ScheduledBatch]) -> tuple[list[float], dict[str, Tensor]]:
    """Trains on `batches`; gives the loss of each train step, and the tables, row state and dense weights after the last."""
    tensors = {name: tensor.clone() for name, tensor in start.items()}
    tables = [PlainTable(table, job.features.index(table.features[0]), job.optimizer.sparse, tensors) for table in job.tables]
    if (first := next(batches := iter(batches), None)) is None:
        return [], tensors
    model = build_model(job, num_dense=first.batch.dense.shape[1])
    model.load_state_dict({name: start[name] for name in model.state_dict()})
    torch.manual_seed(job.job.seed)  # for a model that draws random numbers, such as dropout
    optimizer = build_dense_optimizer(job, model.parameters())
    losses = []
    for scheduled in itertools.chain([first], batches):
        batch, training = scheduled.batch, scheduled.kind == "train"
        with torch.set_grad_enabled(training):
            embeddings = [feature for table in tables for feature in table.forward(batch)]
            loss = mean_loss(model.train(training)(torch.tensor(batch.dense), embeddings), torch.tensor(batch.labels))
        if training:
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            for table in tables:
                table.update()
            losses.append(loss.item())
    return losses, tensors | model.state_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with every table in memory, from an export of --max-steps 0.")
    for name in ("--config", "--start", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--max-steps", type=int, help="train steps")
    parser.add_argument("--losses", type=Path, default="/dev/null", help="file for one float32 a train step")
    options = parser.parse_args()
    job = load_job(options.config)
    torch.ones(1).sqrt()  # in one thread: the first square root of a process may be inaccurate in several (pytorch#188792)
    torch.set_num_threads(usable_cores() if job.trainer.threads == "auto" else job.trainer.threads)
    losses, end = run_plain_loop(job, load_file(options.start), schedule(job, open_reader(job), options.max_steps))
    save_file(end, options.out)
    np.array(losses, np.float32).tofile(options.losses)


if __name__ == "__main__":
    main()
