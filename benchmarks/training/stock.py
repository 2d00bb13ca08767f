"""Contestant: one process of stock PyTorch. One `nn.EmbeddingBag(sparse=True)` per table, torch.optim, our readers, our
models.

    --tables cpu   --device cuda     tables in host memory, the dense part on the device: what people do today
    --tables cuda  --device cuda     every row on the device
    --tables cpu   --device cpu      every row in memory

    --worker     a process of a torch DataLoader decodes the batches; without it the training thread does
    --paged      another contestant: a batch's rows are read from a memory-mapped file and written back (`paged.py`)

    python -m benchmarks.training.stock --config job.toml [--set ...] --steps 141
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import prometheus_client
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.training.outcome import LOSSES, Outcome, tell
from benchmarks.training.paged import PagedRows
from rowcast.job.file import load_job
from rowcast.job.optimizers import SparseOptimizer
from rowcast.job.schema import Job
from rowcast.job.tables import TableSpec, table_specs
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import Batch
from rowcast.protocol.first_values import initial_rows
from rowcast.runtime.machine import usable_cores
from rowcast.trainer.models import build_dense_optimizer, build_model
from rowcast.trainer.models.job_model import mean_loss

ARRAYS = ("dense", "labels", "ids", "offsets")  # of a batch; bags with weights are not compared
DECODED_AHEAD = 4  # batches


class Rows(Protocol):
    """The rows of all tables, and what trains them."""

    def look_up(self, batch: Batch) -> Sequence[Tensor]:
        """Returns f32 [B, D] of each feature."""

    def update(self) -> None:
        """Called after the backward pass of what `look_up` returned."""


class StockRows:
    """Implements `Rows` over torch.nn and torch.optim."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._device, self._num_features = device, len(job.features)
        self._embeddings = StockEmbeddings(job, device)
        self._optimizer = sparse_optimizer(job.optimizer.sparse, self._embeddings.parameters())

    def look_up(self, batch: Batch) -> list[Tensor]:
        pooled: list[Tensor] = self._embeddings(inputs_of(batch, self._num_features, self._device))
        return pooled

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class StockEmbeddings(nn.Module):
    """The job's tables with their first values; for a batch it returns one f32 [B, D] per feature."""

    def __init__(self, job: Job, device: torch.device) -> None:
        super().__init__()
        self.tables = table_specs(job)
        self.bags = nn.ModuleList(self._bag(job, table, device) for table in self.tables)

    def _bag(self, job: Job, table: TableSpec, device: torch.device) -> nn.EmbeddingBag:
        rows = initial_rows(job.job.seed, table, np.arange(table.num_embeddings, dtype=np.int64))
        return nn.EmbeddingBag.from_pretrained(
            torch.from_numpy(rows).to(device), freeze=False, mode=table.pooling, sparse=True
        )

    def forward(self, inputs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """`inputs`: ids i64 [n] and offsets i64 [B] per feature."""
        bags = chain.from_iterable(
            [bag] * len(table.features) for bag, table in zip(self.bags, self.tables, strict=True)
        )
        return [bag(ids, offsets) for bag, (ids, offsets) in zip(bags, inputs, strict=True)]


def inputs_of(batch: Batch, num_features: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    ids = torch.from_numpy(batch.ids).to(device, non_blocking=True)
    if batch.offsets is None:
        starts = torch.arange(batch.size, device=device)
        return [(own, starts) for own in ids.view(num_features, batch.size)]
    offsets = torch.from_numpy(batch.offsets).to(device)
    ends = batch.offsets[:: batch.size]
    firsts = offsets[:-1].view(num_features, batch.size)
    return [(ids[a:b], own - a) for own, a, b in zip(firsts, ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


class RowwiseAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad on sparse gradients, which torch.optim lacks: one accumulator per row, the mean square."""

    def __init__(self, parameters: Iterator[nn.Parameter], settings: SparseOptimizer) -> None:
        super().__init__(parameters, {})
        self._settings = settings

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            grad = weight.grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            state = self.state[weight]
            if not state:
                state["sum"] = torch.full((len(weight), 1), self._settings.initial_accumulator, device=weight.device)
            sums = state["sum"].index_select(0, rows) + values.square().mean(1, keepdim=True)
            state["sum"].index_copy_(0, rows, sums)
            change = values / (sums.sqrt() + self._settings.epsilon)
            weight.index_add_(0, rows, change, alpha=-self._settings.lr)


def sparse_optimizer(settings: SparseOptimizer, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """The job's row optimizer on sparse gradients: torch.optim's where it has one."""
    if settings.kind == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr)
    if settings.kind == "adam":
        return torch.optim.SparseAdam(parameters, lr=settings.lr, betas=settings.betas, eps=settings.epsilon)
    if settings.kind == "rowwise_adagrad":
        return RowwiseAdagrad(parameters, settings)
    return torch.optim.Adagrad(
        parameters, lr=settings.lr, eps=settings.epsilon, initial_accumulator_value=settings.initial_accumulator
    )


def train_batches(job: Job, steps: int | None) -> Iterator[Batch]:
    return (scheduled.batch for scheduled in schedule(job, open_reader(job), steps) if scheduled.kind == "train")


class Decoded(IterableDataset[dict[str, Tensor]]):
    """The batches as tensors, which a worker passes in shared memory."""

    def __init__(self, job: Job, steps: int | None) -> None:
        self._job, self._steps = job, steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in train_batches(self._job, self._steps):
            arrays = {name: getattr(batch, name) for name in ARRAYS}
            yield {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}


def decoded_by_worker(job: Job, steps: int | None) -> Iterator[Batch]:
    for tensors in DataLoader(Decoded(job, steps), batch_size=None, num_workers=1, prefetch_factor=DECODED_AHEAD):
        yield Batch(**{name: tensor.numpy() for name, tensor in tensors.items()})


def run(
    job: Job,
    steps: int | None,
    rows: Rows,
    device: torch.device,
    count: Callable[[int], None] = lambda samples: None,
    *,
    worker: bool = False,
) -> Outcome:
    """`count` receives the number of samples of every step. `worker`: a separate process decodes the batches."""
    batches = decoded_by_worker(job, steps) if worker else train_batches(job, steps)
    model = build_model(job, len(open_reader(job).dense_names)).to(device)
    dense = build_dense_optimizer(job, model.parameters())
    losses: list[Tensor] = []
    samples, began_s, began_cpu_s = 0, time.perf_counter(), time.process_time()
    for batch in batches:
        pooled = [own.to(device) for own in rows.look_up(batch)]
        loss = mean_loss(
            model(torch.from_numpy(batch.dense).to(device), pooled), torch.from_numpy(batch.labels).to(device)
        )
        dense.zero_grad()
        torch.autograd.backward(loss)
        dense.step()
        rows.update()
        losses.append(loss.detach())
        samples += batch.size
        count(batch.size)
    last = torch.stack(losses[-LOSSES:]).mean().item()  # waits for the device
    wall_s = time.perf_counter() - began_s
    cores = {"process": (time.process_time() - began_cpu_s) / wall_s}
    return Outcome(samples=samples, steps=len(losses), wall_s=wall_s, loss=last, cores=cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tables", default="cpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--port", type=int, help="serves rowcast_samples_total while it trains")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--paged", action="store_true")
    options = parser.parse_args()
    job = load_job(options.config, tuple(options.overrides))
    torch.set_num_threads(job.first_threads(usable_cores()))
    trained = prometheus_client.Counter("rowcast_samples", "Trained.")
    if options.port is not None:
        prometheus_client.start_http_server(options.port, "127.0.0.1")
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as folder:
        rows = PagedRows(job, Path(folder) / "rows") if options.paged else StockRows(job, torch.device(options.tables))
        tell(run(job, options.steps, rows, device, trained.inc, worker=options.worker))


if __name__ == "__main__":
    main()
