"""Plans of a run made in advance, with their rows: what a contestant needs to train without a prefetcher."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from benchmarks.training.replay import RecordedPlan, Recording
from rowcast.job.file import with_values
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.first_batches import MEASURED_BATCHES, divide_capacity, measure
from rowcast.prefetcher.planner.planner import groupers_of, job_planner
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.prefetcher.stores.records import first_records
from rowcast.protocol.batch import ScheduledBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Touched:
    rows: int  # distinct
    largest_batch: int  # distinct rows of the batch that touches most


def train_batches(job: Job, steps: int | None) -> list[ScheduledBatch]:
    return [
        scheduled for scheduled in islice(schedule(job, open_reader(job), steps), steps) if scheduled.kind == "train"
    ]


def touched(job: Job, batches: Sequence[ScheduledBatch]) -> Touched:
    groupers = groupers_of(group_specs(job))
    keys = [[grouper.group(grouper.lookups(scheduled.batch)).keys for grouper in groupers] for scheduled in batches]
    distinct = [len(np.unique(np.concatenate(own))) for own in zip(*keys, strict=True)]
    return Touched(rows=sum(distinct), largest_batch=max(sum(map(len, own)) for own in keys))


def slots_for(job: Job, batches: Sequence[ScheduledBatch], rows: int) -> tuple[int, ...]:
    """Slots per group, `rows` in total."""
    groups = group_specs(job)
    if len(groups) == 1:
        return (min(rows, groups[0].num_rows),)
    nbytes = rows * max(group.record_bytes for group in groups)
    return divide_capacity(groups, measure(groups, batches), capacity_bytes=nbytes)


def recorded_plans(job: Job, batches: Sequence[ScheduledBatch], slots: tuple[int, ...]) -> Iterator[RecordedPlan]:
    job = with_values(job, {"lookahead": {"bundle": 1}})
    planner = job_planner(job, group_specs(job), [slots], batches[:MEASURED_BATCHES])
    coming = iter(batches)
    for scheduled in batches:
        while planner.wants_batch:
            following = next(coming, None)
            planner.end() if following is None else planner.add(following)
        yield RecordedPlan(scheduled.batch, planner.plan().steps[0])


def record(job: Job, batches: Sequence[ScheduledBatch], slots: tuple[int, ...], device: torch.device) -> Recording:
    """The rows are those of untrained tables."""
    return Recording(
        group_specs(job),
        recorded_plans(job, batches, slots),
        slots,
        device,
        lambda group, keys: first_records(group, job.job.seed, keys).reshape(-1),
    )
