"""Do `sasrec` and `hstu` reach the NDCG of a second implementation, on real logs?

    python -m benchmarks.sequences.second --config examples/sasrec.toml

rowcast's side is the plain loop (examples/plain_loop.py), whose bits both processes have. The other side is written
once more from the papers: sample by sample, without padding, with torch.optim and ranks counted in NumPy; no code of
rowcast but its reader, so both have the same batches and draws. Both begin with the same first values, of a new seed
each time. Dropout is 0, since its random numbers depend on the shapes that padding changes.

Prints for each seed: the loss of step 1, the largest difference of its gradients, and NDCG@10 after training.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

from benchmarks.zoo import Weights, first_values
from examples.plain_loop import PlainTable, part_gradients, run_plain_loop
from rowcast.job.file import load_job
from rowcast.job.models import NextItemSettings
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.trainer.models import build_model
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.models.ranking import RANK_BINS, count_ranks, ranking_figures


def batches_of(job: Job, kind: str) -> Iterator[ScheduledBatch]:
    return (scheduled for scheduled in schedule(job, open_reader(job), None) if scheduled.kind == kind)


class Ours:
    """The plain loop's tables and model, with given values."""

    def __init__(self, job: Job, values: Weights) -> None:
        self.job, self.side = job, JobModel(job, 0)
        self.tables = [PlainTable(own, 0, job.optimizer.sparse, dict(values)) for own in job.tables]
        self.side.model.load_state_dict({name: values[name] for name in self.side.model.state_dict()})

    def first_gradients(self, scheduled: ScheduledBatch) -> list[Tensor]:
        """Loss, and gradients of rows and of the model's parameters in their order."""
        found = part_gradients(self.job, self.side, self.tables, scheduled, 1, 0)
        return [own for own in found if own is not None]

    def ndcg(self) -> float:
        bins = torch.zeros(RANK_BINS, dtype=torch.int64)
        for scheduled in batches_of(self.job, "eval"):
            inputs = {name: torch.tensor(array) for name, array in scheduled.batch.inputs.items()}
            embeddings = [feature for table in self.tables for feature in table.forward(scheduled.batch)]
            with torch.no_grad():
                outputs = self.side.forward(torch.zeros(scheduled.batch.size, 0), embeddings, inputs, training=False)
            count_ranks(bins, self.side.ranks(outputs))
        return ranking_figures(bins.tolist(), [10])["ndcg@10"]


# the other side


class Plain:
    """A next-item model sample by sample, without padding, over one table."""

    def __init__(self, job: Job, values: Weights) -> None:
        assert isinstance(job.model, NextItemSettings)
        self.job = job
        [name] = (name for name in values if name.startswith("embedding_bags."))
        kept = {key: own.clone().requires_grad_() for key, own in values.items() if not key.startswith("optimizer.")}
        self.rows = kept.pop(name)
        self.dense = kept
        self.encode = partial({"sasrec": sasrec, "hstu": hstu}[job.model.kind], kept, job.model)

    def samples(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Each sample's positives, i64 [p], their scores [p], and the candidates' [p, C] without and with log q."""
        assert batch.offsets is not None
        candidates = torch.tensor(batch.inputs["negative.id"])
        log_counts = torch.tensor(batch.inputs["negative.log_q"]) + math.log(len(candidates))
        items, ends = torch.tensor(batch.ids), batch.offsets.tolist()
        others = self.rows[candidates]
        looked_up = self.rows[items]
        for sample in range(batch.size):
            history = slice(ends[sample], ends[sample + 1])
            positives = slice(ends[batch.size + sample], ends[batch.size + sample + 1])
            times = torch.tensor(batch.inputs["time"][history]) if "time" in batch.inputs else torch.zeros(0)
            vectors = self.encode(looked_up[history], times)
            vectors = vectors[len(vectors) - (positives.stop - positives.start) :]
            scores = vectors @ others.T
            yield items[positives], (vectors * looked_up[positives]).sum(1), scores, scores - log_counts

    def loss(self, batch: Batch) -> Tensor:
        candidates, losses = torch.tensor(batch.inputs["negative.id"]), []
        for positives, own, _, others in self.samples(batch):
            others = others.masked_fill(positives[:, None] == candidates, -torch.inf)
            losses.append((torch.cat([own[:, None], others], 1).logsumexp(1) - own).mean())
        return torch.stack(losses).mean()

    def first_gradients(self, scheduled: ScheduledBatch) -> list[Tensor]:
        loss = self.loss(scheduled.batch)
        names = [name for name, _ in build_model(self.job, 0).named_parameters()]
        return [loss.detach(), *torch.autograd.grad(loss, [self.rows, *(self.dense[name] for name in names)])]

    def train(self) -> None:
        sparse, dense = self.job.optimizer.sparse, self.job.optimizer.dense
        optimizers = [
            torch.optim.Adagrad([self.rows], lr=sparse.lr, eps=1e-10),
            torch.optim.AdamW(self.dense.values(), lr=dense.lr, weight_decay=dense.weight_decay),
        ]
        for scheduled in batches_of(self.job, "train"):
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.autograd.backward(self.loss(scheduled.batch))
            for optimizer in optimizers:
                optimizer.step()

    def ndcg(self) -> float:
        gains = []
        for scheduled in batches_of(self.job, "eval"):
            candidates = scheduled.batch.inputs["negative.id"]
            with torch.no_grad():
                for positives, own, others, _ in self.samples(scheduled.batch):
                    not_below = (others >= own[:, None]).numpy() & (candidates != positives[:, None].numpy())
                    gains.append(not_below.sum(1))
        ranks = np.concatenate(gains)
        return float(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0).mean())


def layer(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def norm(x: Tensor, scale_and_bias: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:]) * scale_and_bias[0] + scale_and_bias[1]


def by_head(values: Tensor, heads: int, weights_of: Callable[[slice], Tensor]) -> Tensor:
    """Attends head by head: values [n, D], and a function from a head's columns to its weights [n, n]."""
    width = values.shape[1] // heads
    columns = [slice(head * width, (head + 1) * width) for head in range(heads)]
    return torch.cat([weights_of(own) @ values[:, own] for own in columns], 1)


def sasrec(w: Weights, settings: NextItemSettings, items: Tensor, times: Tensor) -> Tensor:
    """Vectors [n, D] of a history [n, D], of at most settings.history items; the times play no part."""
    n, width = items.shape
    x = items * width**0.5 + w["place"][settings.history - n :]
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    for block in range(settings.blocks):
        name = f"blocks.{block}"
        query = layer(w, f"{name}.query", norm(x, w[f"{name}.norms.0"]))
        key, value = layer(w, f"{name}.key", x), layer(w, f"{name}.value", x)

        def weights(own: slice, query: Tensor = query, key: Tensor = key) -> Tensor:
            scores = query[:, own] @ key[:, own].T / (width // settings.heads) ** 0.5
            return torch.softmax(scores.masked_fill(later, -torch.inf), 1)

        x = x + layer(w, f"{name}.out", by_head(value, settings.heads, weights))
        x = x + layer(w, f"{name}.ffn.1", layer(w, f"{name}.ffn.0", norm(x, w[f"{name}.norms.1"])).relu())
    return norm(x, w["norm"])


def hstu(w: Weights, settings: NextItemSettings, items: Tensor, times: Tensor) -> Tensor:
    n, width = items.shape
    x, place = items, torch.arange(n)
    between = (times[:, None] - times).clamp(min=1)
    classes = torch.tensor([[int(of).bit_length() - 1 for of in row] for row in between.tolist()])
    for block in range(settings.blocks):
        name = f"layers.{block}"
        gate, value, query, key = silu(layer(w, f"{name}.into", layer_norm(x, (width,)))).chunk(4, 1)
        bias = w[f"{name}.distance"][(place[:, None] - place).clamp(min=0)] + w[f"{name}.time"][classes]

        def weights(own: slice, query: Tensor = query, key: Tensor = key, bias: Tensor = bias) -> Tensor:
            return silu(query[:, own] @ key[:, own].T + bias).tril() / settings.history

        x = x + layer(w, f"{name}.out", layer_norm(by_head(value, settings.heads, weights), (width,)) * gate)
    return x


def of_seed(job: Job) -> tuple[float, float]:
    """Trains both sides; prints their figures and returns their NDCG@10."""
    start = first_values(job, 0)
    ours, plain = Ours(job, start), Plain(job, start)
    first = next(batches_of(job, "train"))
    found, expected = ours.first_gradients(first), plain.first_gradients(first)
    apart = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    _, end = run_plain_loop(job, start, batches_of(job, "train"))
    plain.train()
    pair = Ours(job, end).ndcg(), plain.ndcg()
    losses, values = f"{found[0]:.6f} | {expected[0]:.6f}", f"{pair[0]:.4f} | {pair[1]:.4f}"
    print(f"| {job.job.seed} | {losses} | {max(apart[1:]):.1e} | {values} |", flush=True)
    return pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="section.key=value, as for rowcast train")
    options = parser.parse_args()
    torch.ones(1).sqrt()
    torch.set_num_threads(1)
    print("| seed | loss | of the other | gradients apart by | NDCG@10 | of the other |\n|---|---|---|---|---|---|")
    pairs = [
        of_seed(load_job(options.config, ("data.epochs=1", "model.dropout=0.0", *options.set, f"job.seed={seed}")))
        for seed in range(options.seeds)
    ]
    ours, theirs = np.array(pairs).T.mean(1)
    print(f"| mean | | | | {ours:.4f} | {theirs:.4f} |")


if __name__ == "__main__":
    main()
