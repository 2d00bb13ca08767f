"""Scans a log: the distinct rows of every step of a run, read once and asked with every setting.

It takes 8 bytes per distinct row of each batch, and nothing for the tables. All of it is needed at once, because the
bound (`belady`) knows the whole future.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rowcast.analysis.progress import Tick
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.grouping import Grouping
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.runtime.arrays import I32, I64

NEVER = 2**31 - 1  # the next use of a row that is not used again
EMPTY = Batch(dense=np.zeros((0, 0), np.float32), labels=np.zeros(0, np.float32), ids=np.zeros(0, np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """A group's rows in a step: all that the planner needs to move rows. Implements `horizon.NeededRows`."""

    keys: I64  # distinct, ascending
    num_lookups: int
    nbytes: int  # of the look-ups by row, which an "auto" horizon counts

    @classmethod
    def of(cls, grouping: Grouping) -> "StepRows":
        return cls(keys=grouping.keys, num_lookups=grouping.num_lookups, nbytes=grouping.nbytes)

    @property
    def num_unique(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedStep:
    scheduled: ScheduledBatch  # without the batch's arrays
    num_lookups: int
    rows: tuple[StepRows, ...]  # of each group

    @property
    def trains(self) -> bool:
        return self.scheduled.kind == "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberedRows:
    """One group's rows of a scan, numbered by ascending key, so that arrays can hold what is known about each."""

    num_rows: int
    rows: list[I32]  # per step: the numbers of its distinct rows, ascending
    next_uses: list[I32]  # per step: the position of the next step that uses each of them, or NEVER


class Scan:
    """The steps of a run, in order without gaps. Positions count from 0 in the scan."""

    def __init__(self, groups: tuple[GroupSpec, ...], steps: Sequence[ScannedStep]) -> None:
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
        return sum(rows.num_unique for step in self.steps for rows in step.rows)

    def keys(self, group: int) -> list[I64]:
        """Of each step."""
        return [step.rows[group].keys for step in self.steps]

    @cached_property
    def numbered(self) -> tuple[NumberedRows, ...]:
        return tuple(numbered_rows(self.keys(index)) for index in range(len(self.groups)))


def scan(groups: tuple[GroupSpec, ...], batches: Iterable[ScheduledBatch], tick: Tick) -> Scan:
    groupers = groupers_of(groups)
    steps = []
    for scheduled in batches:
        rows = tuple(StepRows.of(grouper.group(grouper.lookups(scheduled.batch))) for grouper in groupers)
        num_lookups = len(scheduled.batch.ids)
        steps.append(ScannedStep(scheduled=without_arrays(scheduled), num_lookups=num_lookups, rows=rows))
        tick()
    return Scan(groups, steps)


def without_arrays(scheduled: ScheduledBatch) -> ScheduledBatch:
    return scheduled.holding(EMPTY)


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
