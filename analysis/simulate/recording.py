"""Records the distinct rows of every step of a run, read once and simulated with every setting.

It takes 8 bytes per distinct row of each batch, and nothing for the tables. All of it is needed at once, because the
bound (`belady`) knows the whole future.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from rowcast.analysis.progress import Tick
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.grouping import Grouper, Grouping
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.runtime.arrays import I32, I64

OPTIONAL = ("offsets", "weights", "sequence_offsets")  # arrays that a grouping may lack
NEVER = 2**31 - 1  # the next use of a row that is not used again
Array = TypeVar("Array", bound=npt.NDArray[Any])
EMPTY = Batch(dense=np.zeros((0, 0), np.float32), labels=np.zeros(0, np.float32), ids=np.zeros(0, np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    scheduled: ScheduledBatch  # without the batch's arrays
    num_lookups: int
    groupings: tuple[Grouping, ...]  # of each group; keys only, other arrays are hollow

    @property
    def trains(self) -> bool:
        return self.scheduled.kind == "train"

    def keys(self, group: int) -> I64:
        return self.groupings[group].keys


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberedRows:
    """One group's rows of a recording, numbered by ascending key, so that arrays can hold what is known about each."""

    num_rows: int
    rows: list[I32]  # per step: the numbers of its distinct rows, ascending
    next_uses: list[I32]  # per step: the position of the next step that uses each of them, or NEVER


class RunRecording:
    """The steps of a run, in order without gaps. Positions count from 0 in the recording."""

    def __init__(self, groups: tuple[GroupSpec, ...], steps: list[RecordedStep]) -> None:
        self.groups = groups
        self.steps = steps

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def num_train(self) -> int:
        return sum(step.trains for step in self.steps)

    @property
    def num_lookups(self) -> int:
        return sum(step.num_lookups for step in self.steps)

    @property
    def unique_rows(self) -> int:
        """Distinct rows of each step, summed."""
        return sum(len(grouping.keys) for step in self.steps for grouping in step.groupings)

    @cached_property
    def numbered(self) -> tuple[NumberedRows, ...]:
        return tuple(numbered_rows([step.keys(index) for step in self.steps]) for index in range(len(self.groups)))


def record(groups: tuple[GroupSpec, ...], batches: Iterable[ScheduledBatch], tick: Tick) -> RunRecording:
    groupers = groupers_of(groups)
    steps = []
    for scheduled in batches:
        steps.append(record_step(groupers, scheduled))
        tick()
    return RunRecording(groups, steps)


def record_step(groupers: tuple[Grouper, ...], scheduled: ScheduledBatch) -> RecordedStep:
    batch = scheduled.batch
    groupings = tuple(hollow(grouper.group(grouper.lookups(batch))) for grouper in groupers)
    return RecordedStep(scheduled=without_arrays(scheduled), num_lookups=len(batch.ids), groupings=groupings)


def hollow(grouping: Grouping) -> Grouping:
    """Keeps the distinct rows, and of every look-up array only its size, which an "auto" horizon needs. The planner
    needs no more to move rows."""
    return replace(
        grouping,
        order=no_larger_than_one(grouping.order),
        segment_offsets=no_larger_than_one(grouping.segment_offsets),
        **{name: no_larger_than_one(array) for name in OPTIONAL if (array := getattr(grouping, name)) is not None},
    )


def no_larger_than_one(array: Array) -> Array:
    """Returns an array of the same dtype, length and nbytes in which all elements are the same bytes of memory."""
    return cast(Array, np.broadcast_to(array.dtype.type(0), array.shape))


def without_arrays(scheduled: ScheduledBatch) -> ScheduledBatch:
    return ScheduledBatch(
        step=scheduled.step, kind=scheduled.kind, train_step=scheduled.train_step, epoch=scheduled.epoch, batch=EMPTY
    )


def numbered_rows(keys: list[I64]) -> NumberedRows:
    """Numbers the rows. `keys` of each step: distinct, ascending."""
    distinct, numbers = np.unique(np.concatenate([np.zeros(0, np.int64), *keys]), return_inverse=True)
    ends = np.cumsum([len(some) for some in keys])
    rows: list[I32] = np.split(numbers.astype(np.int32), ends[:-1]) if keys else []
    upcoming: I32 = np.full(len(distinct), NEVER, np.int32)
    next_uses: list[I32] = []
    for position in range(len(rows) - 1, -1, -1):
        next_uses.append(upcoming[rows[position]])
        upcoming[rows[position]] = position
    return NumberedRows(num_rows=len(distinct), rows=rows, next_uses=next_uses[::-1])
