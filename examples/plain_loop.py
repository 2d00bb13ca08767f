"""The plain loop: the same training with every table in memory, in stock PyTorch. On a CPU rowcast's results equal its
bits.

With --parts M each batch is cut into M contiguous slices. Their gradients are added in a fixed order before one step
(`add_up`), so the sum is the same for any number of trainers that split the parts.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rowcast.job.embedding_tables import Table
from rowcast.job.file import load_job
from rowcast.job.optimizers import SparseOptimizer, learning_rate
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.protocol.parts import belonging, part_of, part_seed
from rowcast.runtime.machine import usable_cores
from rowcast.trainer.kernels.torch_ops import taken
from rowcast.trainer.models import Embedded, Sequences
from rowcast.trainer.models.evaluate import EvalMetrics
from rowcast.trainer.models.job_model import JobModel

# the row optimizers of torch.optim; row-wise Adagrad, which it lacks, is below
STOCK: dict[str, Callable[[nn.Parameter, SparseOptimizer], torch.optim.Optimizer]] = {
    "sgd": lambda rows, its: torch.optim.SGD([rows], lr=its.lr),
    "adagrad": lambda rows, its: torch.optim.Adagrad([rows], lr=its.lr, eps=its.epsilon),
    "adam": lambda rows, its: torch.optim.SparseAdam([rows], lr=its.lr, betas=its.betas, eps=its.epsilon),
}


class PlainTable:
    """One table, the bags of its features, and its optimizer; weight and state are trained in place.

    first_feature: number of the first feature that looks up this table. tensors: named as in an export.
    """

    def __init__(self, table: Table, first_feature: int, job: Job, tensors: dict[str, Tensor]) -> None:
        self.settings = settings = job.optimizer.sparse
        self.table, self.first_feature = table, first_feature
        self.gradients = job.ranks.gradients
        prefix = f"optimizer.{table.name}."
        self.state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        # three forms of the weights: rounded to the table's dtype, the same in fp32 for look-ups, and the trained ones,
        # which with a master copy are not rounded; in fp32 without one, all three share memory
        self.rounded = tensors[f"embedding_bags.{table.name}.weight"]
        self.embedding = nn.Embedding(table.num_embeddings, table.width, device="meta")
        self.embedding.weight = nn.Parameter(self.rounded.float())
        self.trained = nn.Parameter(self.state.pop("master", self.embedding.weight.detach()))
        self.optimizer = STOCK[settings.kind](self.trained, settings) if settings.kind in STOCK else None
        if self.optimizer is not None:  # continues from an earlier run's state, but Adam counts its own steps
            steps = {"step": 0} if settings.kind == "adam" else {}
            self.optimizer.state[self.trained] |= self.state | steps

    def forward(self, batch: Batch) -> list[Embedded]:
        """Pooled rows [B, width] of each of the table's features, or its sequences, from one call of nn.Embedding."""
        counts, lookups = self.lookups(batch)
        rows = self.embedding(torch.tensor(batch.ids[lookups]))
        if batch.weights is not None:
            rows = rows * torch.tensor(batch.weights[lookups])[:, None]
        if self.table.pooling == "none":
            return self.sequences(taken(rows + 0.0, self.gradients), counts.view(-1, batch.size))
        bag_of_row = torch.arange(len(counts)).repeat_interleave(counts)
        pooled = torch.zeros(len(counts), self.table.width).index_add(0, bag_of_row, rows)
        if self.table.pooling == "mean":
            pooled = pooled / counts.clamp(min=1)[:, None]
        return list(taken(pooled, self.gradients).view(-1, batch.size, self.table.width).unbind())

    def lookups(self, batch: Batch) -> tuple[Tensor, slice]:
        """How many ids each bag has, i64 [features * B], and where in the batch the table's ids are."""
        first, end = self.first_feature * batch.size, (self.first_feature + len(self.table.features)) * batch.size
        offsets = torch.arange(len(batch.ids) + 1) if batch.offsets is None else torch.tensor(batch.offsets)
        return offsets[first : end + 1].diff(), slice(int(offsets[first]), int(offsets[end]))

    def sequences(self, rows: Tensor, counts: Tensor) -> list[Embedded]:
        """The rows unchanged; counts i64 [features, B]."""
        values = torch.split(rows, counts.sum(1).tolist())
        offsets = [torch.cat([own.new_zeros(1), own.cumsum(0)]).int() for own in counts]
        return [Sequences(values=of_feature, offsets=at) for of_feature, at in zip(values, offsets, strict=True)]

    @torch.no_grad()
    def update(self, train_step: int, batch: Batch) -> None:
        """One step of the batch's rows on their gradient, which is zero if the model ignores the table."""
        weight, settings, looked_up = self.trained, self.settings, self.embedding.weight
        rows = torch.from_numpy(np.unique(batch.ids[self.lookups(batch)[1]]))
        lr = learning_rate(settings, train_step)
        weight.grad = torch.zeros_like(weight) if looked_up.grad is None else looked_up.grad
        g = weight.grad[rows]
        if settings.clip_rows is not None:
            norms = (g * g).sum(1, keepdim=True).sqrt()
            weight.grad[rows] = g = g * (settings.clip_rows / (norms + 1e-6)).clamp(max=1.0)
        if settings.kind == "adam":  # trains every row of a sparse gradient, including rows with a zero gradient
            with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
                weight.grad = torch.sparse_coo_tensor(rows[None], g, weight.shape)
        if self.optimizer is not None:
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
        else:
            self.state["sum"][rows] += (g * g).mean(1, keepdim=True)
            weight[rows] -= lr * g / (self.state["sum"][rows].sqrt() + settings.epsilon)
        weight.grad = looked_up.grad = None
        looked_up.copy_(self.rounded.copy_(weight))  # rounded to the nearest, ties to even


Gradients = Sequence[Tensor | None]
Tables = Sequence[PlainTable]
Batches = Iterable[ScheduledBatch]


def part_gradients(
    job: Job, side: JobModel, tables: Tables, metrics: EvalMetrics, scheduled: ScheduledBatch, parts: int, part: int
) -> Gradients:
    """Runs one part: its loss and the gradients of rows and dense weights, by its share of the samples; or counts."""
    batch, training = part_of(scheduled.batch, part, parts, belonging(job)), scheduled.kind == "train"
    trained = [*(table.embedding.weight for table in tables), *side.model.parameters()]
    if batch.size == 0:
        return [None] * (1 + len(trained))
    if parts > 1:  # with one part, the random state continues from step to step
        torch.manual_seed(part_seed(job.job.seed, scheduled.train_step, part))
    with torch.set_grad_enabled(training):
        embeddings = [feature for table in tables for feature in table.forward(batch)]
        inputs = {name: torch.tensor(array) for name, array in batch.inputs.items()}
        outputs = side.forward(torch.tensor(batch.dense), embeddings, inputs, training=training)
        if not training:
            side.count(metrics, outputs, torch.tensor(batch.labels), part)
            return [None] * (1 + len(trained))
    loss, share = side.loss(outputs, torch.tensor(batch.labels)), torch.tensor(batch.size / scheduled.batch.size)
    torch.autograd.backward(loss, share)
    gradients = [weight.grad for weight in trained]
    for weight in trained:
        weight.grad = None
    if job.ranks.gradients == "bf16":  # of rows, and so are their sums; -0.0 becomes 0.0
        gradients[: len(tables)] = [own if own is None else own.bfloat16() + 0.0 for own in gradients[: len(tables)]]
    return [loss.detach() * share, *gradients]


def add_up(parts: Sequence[int], gradients_of: Callable[[int], Gradients]) -> Gradients:
    """Runs the parts from left to right and adds them as a tree: ((0 + 1) + (2 + 3)) + (4 + 5) for six of them."""
    if len(parts) == 1:
        return gradients_of(parts[0])
    half = 2 ** ((len(parts) - 1).bit_length() - 1)
    left, right = add_up(parts[:half], gradients_of), add_up(parts[half:], gradients_of)
    return [plus(*pair) for pair in zip(left, right, strict=True)]


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """A part without a gradient adds zeros; if no part has one, the result is None."""
    if a is None or b is None:
        some = b if a is None else a
        return None if some is None else some + 0.0
    return a + b


def until_patience_ends(job: Job, metrics: EvalMetrics, batches: Batches) -> Iterator[ScheduledBatch]:
    """Ends after eval.patience evaluations in a row without a lower loss than the best one before them."""
    lowest, num_worse, kind = math.inf, 0, "train"
    for scheduled in batches:
        if kind == "eval" and scheduled.kind == "train":
            found = metrics.close().result(scheduled.train_step, job.data.columns.labels, ())
            loss = math.nan if found is None or found.logloss is None else found.logloss
            lowest, num_worse = (loss, 0) if loss < lowest else (lowest, num_worse + 1)
            if num_worse == job.eval.patience > 0:
                return
        kind = scheduled.kind
        yield scheduled


def run_plain_loop(
    job: Job, start: dict[str, Tensor], batches: Batches, parts: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains on `batches`, or until eval.patience ends it; returns the loss of each train step, and the tables, row
    state and dense weights after the last."""
    tensors = {name: tensor.clone() for name, tensor in start.items()}
    tables = [PlainTable(table, job.features.index(table.features[0]), job, tensors) for table in job.tables]
    if (first := next(batches := iter(batches), None)) is None:
        return [], tensors
    side, losses = JobModel(job, num_dense=first.batch.dense.shape[1], parts=parts), []
    side.model.load_state_dict({name: start[name] for name in side.model.state_dict()})
    trained = [*(table.embedding.weight for table in tables), *side.model.parameters()]
    metrics = EvalMetrics(parts=parts, num_labels=len(job.data.columns.labels), names=side.eval_names)
    for scheduled in until_patience_ends(job, metrics, itertools.chain([first], batches)):
        loss, *gradients = add_up(range(parts), partial(part_gradients, job, side, tables, metrics, scheduled, parts))
        if scheduled.kind == "train":
            assert loss is not None, "a batch has samples"
            for weight, gradient in zip(trained, gradients, strict=True):
                weight.grad = None if gradient is None else gradient.to(weight.dtype)
            side.step(scheduled.train_step)
            for table in tables:
                table.update(scheduled.train_step, scheduled.batch)
            losses.append(loss.item())
    return losses, tensors | side.model.state_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with every table in memory, from an export of --max-steps 0.")
    for name in ("--config", "--start", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--max-steps", type=int, help="train steps")
    parser.add_argument("--parts", type=int, default=1, help="slices of a batch that give gradients of their own")
    parser.add_argument("--losses", type=Path, default="/dev/null", help="file for one float32 per train step")
    options = parser.parse_args()
    job = load_job(options.config)
    # the first square root of a process may be inaccurate if several threads compute it (pytorch#188792)
    torch.ones(1).sqrt()
    torch.set_num_threads(job.first_threads(usable_cores() if options.parts == 1 else 1))
    start, batches = load_file(options.start), schedule(job, open_reader(job), options.max_steps)
    try:
        losses, end = run_plain_loop(job, start, batches, options.parts)
    except KeyError as error:
        parser.error(f"--start has no tensor {error}; make it by `rowcast export` of a run of --max-steps 0")
    save_file(end, options.out)
    np.array(losses, np.float32).tofile(options.losses)


if __name__ == "__main__":
    main()
