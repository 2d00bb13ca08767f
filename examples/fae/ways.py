"""Trains the same model on the same samples in three ways, and counts the bytes between *far* and *near* memory.

    cpu          every row is far; a sample's pooled rows go near, and their gradients come back
    hybrid       FAE: hot batches find all rows near; a cold batch as `cpu`; before a batch of the other kind, all hot
                 rows go to the side that is used next
    look-ahead   rowcast's planner: the rows of coming batches go near before their step, and trained ones come back

Far and near are both the CPU's memory, and one thread does all in turn: no device's speed or overlap is measured.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rowcast.analysis.simulate.moves import entries
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.first_batches import MEASURED_BATCHES, measure, slots_of
from rowcast.prefetcher.planner.grouping import Grouping
from rowcast.prefetcher.planner.planner import RowPlanner, groupers_of, job_planner
from rowcast.prefetcher.stores.records import first_records
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.protocol.plan import BarrierPlan
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.kernels.choose import choose_kernels, group_lookup
from rowcast.trainer.models.embedding import Embedded, Embeddings, GroupLookup
from rowcast.trainer.models.evaluate import EvalMetrics
from rowcast.trainer.models.job_model import JobModel

Groupings = tuple[Grouping, ...]  # of each group
Batches = Sequence[ScheduledBatch]


class Trainer:
    """Has every row that the batches touch far, and slots for some of them near. Counts what moves between the two."""

    def __init__(self, job: Job, keys: Sequence[I64], num_near: Sequence[int], num_dense: int) -> None:
        """`keys`: i64 [n] of each group, ascending. `num_near`: slots of each group."""
        self.groups, self.keys = group_specs(job), keys
        made = [first_records(group, job.job.seed, own) for group, own in zip(self.groups, keys, strict=True)]
        self.far = [torch.from_numpy(records.view(np.float32)) for records in made]
        self.near = [torch.zeros(n, group.record_floats) for n, group in zip(num_near, self.groups, strict=True)]
        self.slots = [np.full(len(own), -1, np.int32) for own in keys]  # near, of each row
        self.groupers, kernels = groupers_of(self.groups), choose_kernels(torch.device("cpu"), job)
        self.embeddings = [Embeddings(self.groups, records, kernels) for records in (self.far, self.near)]
        self.side = JobModel(job, num_dense)
        self.metrics = EvalMetrics(names=self.side.eval_names)
        self.losses, self.hot_batches, self.bytes_near, self.bytes_far, self.processor_s = list[float](), 0, 0, 0, 0.0
        self.auc: float | None = None  # of the last evaluation

    def at(self, group: int, keys: I64) -> I64:
        return np.searchsorted(self.keys[group], keys)

    def move(self, group: int, rows: I64, near: bool) -> None:
        """Copies rows to the near or the far side."""
        slots, nbytes = self.slots[group][rows], len(rows) * self.groups[group].record_bytes
        if near:
            self.near[group][slots] = self.far[group][rows]
        else:
            self.far[group][rows] = self.near[group][slots]
        self.bytes_near, self.bytes_far = self.bytes_near + nbytes * near, self.bytes_far + nbytes * (not near)

    def grouped(self, scheduled: ScheduledBatch) -> Groupings:
        return tuple(grouper.group(grouper.lookups(scheduled.batch)) for grouper in self.groupers)

    def lookups(self, batch: Batch, groupings: Groupings, near: bool) -> Iterator[GroupLookup]:
        for g, (grouping, grouper) in enumerate(zip(groupings, self.groupers, strict=True)):
            rows = self.at(g, grouping.keys)
            unique_slots = self.slots[g][rows] if near else rows.astype(np.int32)
            slots, by_row = grouper.arrange(grouping, unique_slots)
            arrays = LookupArrays(
                slots=slots,
                unique_slots=unique_slots,
                segment_offsets=grouping.segment_offsets,
                bag_order=grouping.bag_order(by_row),
                lookup_order=None if grouping.weights is None else by_row,
                offsets=grouping.offsets,
                weights=grouping.weights,
            )
            yield group_lookup(arrays, batch.size)

    def step(self, scheduled: ScheduledBatch, groupings: Groupings, near: bool) -> None:
        """Trains or evaluates a batch on rows that are all near, or on all rows far."""
        batch, training = scheduled.batch, scheduled.kind == "train"
        with torch.set_grad_enabled(training):
            features = self.embeddings[near](list(self.lookups(batch, groupings, near)), scheduled.train_step)
            if not near:
                features = [self.sent(feature, training) for feature in features]
            inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
            outputs = self.side.forward(torch.from_numpy(batch.dense), features, inputs, training=training)
            labels = torch.from_numpy(batch.labels)
            if not training:
                return self.side.count(self.metrics, outputs, labels)
            loss = self.side.loss(outputs, labels)
        torch.autograd.backward(loss)
        self.side.step(scheduled.train_step)
        return self.losses.append(loss.item())

    def sent(self, feature: Embedded, training: bool) -> Embedded:
        """Copies what the model reads of far rows; gradients of the same size return."""
        if not isinstance(feature, torch.Tensor):
            raise ConfigError('a table has pooling = "none"; the ways compare pooled tables only')
        self.bytes_near += feature.nbytes
        self.bytes_far += feature.nbytes * training
        return feature.clone()


def hybrid(trainer: Trainer, batches: Batches, hot: Sequence[I64]) -> None:
    """`hot`: the rows of each group that are near in hot batches; without any, every look-up is on the CPU."""
    is_near = False
    for g, rows in enumerate(hot):
        trainer.slots[g][rows] = np.arange(len(rows))
    for scheduled in batches:
        groupings = trainer.grouped(scheduled)
        slots = [trainer.slots[g][trainer.at(g, own.keys)] for g, own in enumerate(groupings)]
        is_hot = all((of_group >= 0).all() for of_group in slots)
        if is_hot != is_near:
            for g, rows in enumerate(hot):
                trainer.move(g, rows, near=is_hot)
        trainer.hot_batches, is_near = trainer.hot_batches + is_hot, is_hot
        trainer.step(scheduled, groupings, near=is_hot)
    for g, rows in enumerate(hot if is_near else []):
        trainer.move(g, rows, near=False)


def look_ahead(trainer: Trainer, batches: Batches, planner: RowPlanner) -> None:
    known = {scheduled.step: (scheduled, trainer.grouped(scheduled)) for scheduled in batches}
    for entry in entries(planner, known.values(), planner.move):
        if isinstance(entry, BarrierPlan):
            for g, dirty in enumerate(entry.dirty):
                trainer.move(g, trainer.at(g, dirty.keys), near=False)
            continue
        for g, moves in enumerate(entry.levels[0]):
            victims, fetched = trainer.at(g, moves.evict_keys), trainer.at(g, moves.fetch_keys)
            trainer.move(g, victims[: moves.num_dirty], near=False)
            trainer.slots[g][victims] = -1
            trainer.slots[g][fetched] = moves.fetch_slots
            trainer.move(g, fetched, near=True)
        for step in entry.bundle.steps:
            trainer.step(*known[step.step], near=True)


def run(job: Job, batches: Batches, hot: I64, way: str) -> Trainer:
    """Trains a new model; `way` is cpu, hybrid or look-ahead. `hot`: keys of FAE's hot rows, for hybrid.

    Raises ConfigError if a table is not pooled, or if cache.capacity cannot hold a batch of look-ahead."""
    groups = group_specs(job)
    of_group = [[grouper.group(grouper.lookups(s.batch)).keys for s in batches] for grouper in groupers_of(groups)]
    keys = [np.unique(np.concatenate(own)) for own in of_group]
    hot_rows = [np.flatnonzero(np.isin(own, hot if way == "hybrid" else [])) for own in keys]
    first = batches[:MEASURED_BATCHES]
    slots = slots_of(job, groups, measure(groups, first)) if way == "look-ahead" else [len(own) for own in hot_rows]
    trainer = Trainer(job, keys, slots, batches[0].batch.dense.shape[1])
    began = time.process_time()
    if way == "look-ahead":
        look_ahead(trainer, batches, job_planner(job, groups, [tuple(slots)], first))
    else:
        hybrid(trainer, batches, hot_rows)
    trainer.processor_s = time.process_time() - began
    evaluation = trainer.metrics.close().result(0, job.data.columns.labels, ())
    trainer.auc = None if evaluation is None else evaluation.auc
    return trainer
