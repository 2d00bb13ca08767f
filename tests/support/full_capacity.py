"""A cache that holds every row, its slots shuffled, and the smallest trainer: tests compare it with the plain loop."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from examples.plain_loop import run_plain_loop
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, RecordPart, group_specs, make_keys
from rowcast.protocol.batch import Batch, Kind, ScheduledBatch
from rowcast.trainer.kernels import DTYPES, Kernels, part_of, torch_ops
from rowcast.trainer.kernels.choose import group_lookup, lookup_arrays
from rowcast.trainer.models import build_model
from rowcast.trainer.models.embedding import Embeddings, GroupLookup
from rowcast.trainer.models.job_model import JobModel
from tests.support import jobs

NUM_DENSE = 3
SPARE_SLOTS = 5
KINDS: tuple[Kind, ...] = ("train", "train", "train", "eval", "train", "train")


def make_job(
    tables: list[dict[str, Any]],
    optimizer: str = "sgd",
    model: dict[str, Any] | None = None,
    dense: dict[str, Any] | None = None,
    *,
    master: bool = False,
) -> Job:
    dim = tables[0]["embedding_dim"]
    return jobs.job(
        job={"seed": 3},
        tables=tables,
        model={"kind": "dlrm", **(model or {"bottom_mlp": [8, dim], "top_mlp": [7, 1]})},
        optimizer={
            "sparse": {"kind": optimizer, "lr": 0.05, "master": master},
            "dense": dense or {"kind": "sgd", "lr": 0.1},
        },
    )


def table(name: str, rows: int, dim: int, features: list[str], pooling: str = "sum") -> dict[str, Any]:
    return {"name": name, "num_embeddings": rows, "embedding_dim": dim, "features": features, "pooling": pooling}


class Regression(nn.Module):
    """A mean and a deviation of each sample, by maximum likelihood."""

    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_dense + sum(table.embedding_dim * len(table.features) for table in job.tables), 2)

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> tuple[Tensor, Tensor]:
        mean, deviation = self.linear(torch.cat([dense, *embeddings], dim=1)).unbind(1)
        return mean, deviation.exp()

    def loss(self, outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return nn.functional.gaussian_nll_loss(outputs[0], labels, outputs[1])


class Concatenated(nn.Module):
    """A custom model for tables of any width. It ignores features named in `ignore`."""

    def __init__(self, job: Job, num_dense: int, ignore: Sequence[str] = ()) -> None:
        super().__init__()
        self.used = [i for i, feature in enumerate(job.features) if feature not in ignore]
        widths = [table.embedding_dim for table in job.tables for _ in table.features]
        self.linear = nn.Linear(num_dense + sum(widths[i] for i in self.used), 1)

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> Tensor:
        logits: Tensor = self.linear(torch.cat([dense, *(embeddings[i].tanh() for i in self.used)], dim=1))
        return logits.squeeze(1)


def random_batch(
    job: Job, rng: np.random.Generator, size: int, lengths: tuple[int, int] | None, weighted: bool = False
) -> Batch:
    """`lengths`: the range of look-ups a bag, or None for one each."""
    num_bags = len(job.features) * size
    counts = (
        np.ones(num_bags, np.int64)
        if lengths is None
        else rng.integers(lengths[0], lengths[1], num_bags, endpoint=True)
    )
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    num_rows = np.repeat([table.num_embeddings for table in job.tables for _ in table.features], size)
    ids = (rng.random(offsets[-1]) ** 3 * np.repeat(num_rows, counts)).astype(np.int64)
    return Batch(
        dense=rng.standard_normal((size, NUM_DENSE), np.float32),
        labels=rng.integers(0, 2, size).astype(np.float32),
        ids=ids,
        offsets=None if lengths is None else offsets,
        weights=rng.standard_normal(len(ids), np.float32) if weighted else None,
    )


def random_schedule(
    job: Job, kinds: Sequence[Kind], size: int = 33, lengths: tuple[int, int] | None = None, weighted: bool = False
) -> list[ScheduledBatch]:
    """The last batch is a shorter one."""
    rng = np.random.default_rng(5)
    sizes = [size] * (len(kinds) - 1) + [size // 2]
    return [
        ScheduledBatch.at(
            step=step,
            kind=kind,
            train_step=kinds[:step].count("train"),
            epoch=0,
            batch=random_batch(job, rng, sizes[step], lengths, weighted),
        )
        for step, kind in enumerate(kinds)
    ]


def random_start(job: Job, num_dense: int = NUM_DENSE) -> dict[str, Tensor]:
    """Tables, row state and dense weights under their export names."""
    generator = torch.Generator().manual_seed(11)
    start = dict(build_model(job, num_dense).state_dict())
    for group in group_specs(job):
        for table in group.tables:
            weights = torch.randn(table.num_embeddings, table.embedding_dim, generator=generator)
            for part in group.parts:
                values = weights if part.initial is None else torch.full((len(weights), part.width), part.initial)
                start[export_name(table.name, part)] = values.to(DTYPES[part.dtype])
    return start


def export_name(table: str, part: RecordPart) -> str:
    return f"embedding_bags.{table}.weight" if part.name == "weight" else f"optimizer.{table}.{part.name}"


class FullGroup:
    """One group's records, and where each row lies."""

    def __init__(self, group: GroupSpec, num_features: int, start: dict[str, Tensor]) -> None:
        self.group = group
        self._num_features = num_features
        rows = [np.arange(table.num_embeddings) for table in group.tables]
        self._keys = np.concatenate(
            [make_keys(table.index, table_rows) for table, table_rows in zip(group.tables, rows, strict=True)]
        )
        self._slots = (
            np.random.default_rng(1).permutation(group.num_rows + SPARE_SLOTS)[: group.num_rows].astype(np.int32)
        )
        self.records = torch.zeros(group.num_rows + SPARE_SLOTS, group.record_floats)
        for table, part, slots in self._pieces():
            part_of(self.records, part)[slots] = start[export_name(table, part)]

    def _pieces(self) -> list[tuple[str, RecordPart, Tensor]]:
        ends = np.cumsum([table.num_embeddings for table in self.group.tables])
        slots = [torch.from_numpy(part).long() for part in np.split(self._slots, ends[:-1])]
        return [
            (table.name, part, slots)
            for table, slots in zip(self.group.tables, slots, strict=True)
            for part in self.group.parts
        ]

    def tensors(self) -> dict[str, Tensor]:
        return {export_name(table, part): part_of(self.records, part)[slots] for table, part, slots in self._pieces()}

    def lookup(self, batch: Batch) -> GroupLookup:
        """The group's part of a plan, by sorting."""
        offsets = np.arange(len(batch.ids) + 1) if batch.offsets is None else batch.offsets
        counts = np.diff(offsets).reshape(self._num_features, batch.size)[list(self.group.feature_positions)]
        places = [
            np.arange(offsets[f * batch.size], offsets[(f + 1) * batch.size]) for f in self.group.feature_positions
        ]
        lookups = np.concatenate(places)
        tables = np.repeat([table.index for table in self.group.feature_tables()], [len(place) for place in places])
        keys = tables << 48 | batch.ids[lookups]
        apart = self.group.unpooled_features  # a bag for each look-up
        bag_sizes = [np.ones(own.sum(), np.int64) if f in apart else own for f, own in enumerate(counts)]
        sequence_offsets = np.pad(np.cumsum(counts[list(apart)], axis=1), ((0, 0), (1, 0))).astype(np.int32)
        arrays = lookup_arrays(
            keys,
            self._slots[np.searchsorted(self._keys, keys)],
            None if batch.offsets is None else np.concatenate(bag_sizes),
            None if batch.weights is None else batch.weights[lookups],
            sequence_offsets if apart else None,
        )
        return group_lookup(arrays, batch.size)


def train(
    job: Job, start: dict[str, Tensor], batches: Sequence[ScheduledBatch], kernels: Kernels = torch_ops
) -> tuple[list[float], dict[str, Tensor]]:
    """`run_plain_loop` over the cache."""
    groups = [FullGroup(group, len(job.features), start) for group in group_specs(job)]
    embeddings = Embeddings([full.group for full in groups], [full.records for full in groups], kernels)
    side = JobModel(job, NUM_DENSE)
    side.model.load_state_dict({name: start[name] for name in side.model.state_dict()})
    losses = []
    for scheduled in batches:
        batch, training = scheduled.batch, scheduled.kind == "train"
        with torch.set_grad_enabled(training):
            features = embeddings([group.lookup(batch) for group in groups], scheduled.train_step)
            outputs = side.forward(torch.from_numpy(batch.dense), features, {}, training=training)
            loss = side.loss(outputs, torch.from_numpy(batch.labels))
        if training:
            torch.autograd.backward(loss)
            side.step(scheduled.train_step)
            losses.append(loss.item())
    end = {name: tensor for full in groups for name, tensor in full.tensors().items()}
    return losses, end | side.model.state_dict()


def bits(tensor: Tensor) -> Tensor:
    """For comparisons that tell 0.0 from -0.0."""
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_equal_to_plain_loop(job: Job, **batches: Any) -> None:
    start = random_start(job)
    scheduled = random_schedule(job, KINDS, **batches)
    plain_losses, plain = run_plain_loop(job, start, scheduled)
    losses, end = train(job, start, scheduled)
    assert losses == plain_losses
    assert end.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(bits(end[name]), bits(tensor)), f"{name} differs"
    assert any(not torch.equal(plain[name], tensor) for name, tensor in start.items()), "nothing was trained"
