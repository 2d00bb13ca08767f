"""What a run touches: the distinct rows of every step. It is read once and every setting is then simulated over it.

It takes 8 bytes for each distinct row of each batch, and nothing for the tables. All of it is needed at once, because the bound
(`belady`) knows the whole future.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from prefetcher.analysis.progress import Tick
from prefetcher.planner.grouping import I32, I64, Grouper
from protocol.batch import Kind, ScheduledBatch
from protocol.tables import GroupSpec

NEVER = 2**31 - 1  # the next use of a row that is not used again


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    step: int
    kind: Kind
    train_step: int
    epoch: int
    num_lookups: int
    keys: tuple[I64, ...]  # of each group: the distinct rows, ascending


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberedRows:
    """One group's rows of a recording, numbered by ascending key, so that what is known of each can stand in an array."""

    num_rows: int
    rows: list[I32]  # of each step: the numbers of its distinct rows, ascending
    next_uses: list[I32]  # of each step: the position of the next step that uses each of them, or NEVER


class Recording:
    """The steps of a run, in order without gaps. A step's position counts from 0 in the recording."""

    def __init__(self, groups: tuple[GroupSpec, ...], steps: list[RecordedStep]) -> None:
        self.groups = groups
        self.steps = steps

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def num_train(self) -> int:
        return sum(step.kind == "train" for step in self.steps)

    @property
    def num_lookups(self) -> int:
        return sum(step.num_lookups for step in self.steps)

    @property
    def unique_rows(self) -> int:
        """Distinct rows of each step, added up."""
        return sum(len(keys) for step in self.steps for keys in step.keys)

    @cached_property
    def numbered(self) -> tuple[NumberedRows, ...]:
        """Of each group; made when a policy first asks for it."""
        return tuple(numbered_rows([step.keys[index] for step in self.steps]) for index in range(len(self.groups)))


def record(groups: tuple[GroupSpec, ...], batches: Iterable[ScheduledBatch], tick: Tick) -> Recording:
    """Reads all of `batches`; `tick` is called after each."""
    num_features = sum(group.num_features for group in groups)
    groupers = [Grouper(group, num_features) for group in groups]
    steps = []
    for scheduled in batches:
        steps.append(record_step(groupers, scheduled))
        tick()
    return Recording(groups, steps)


def record_step(groupers: list[Grouper], scheduled: ScheduledBatch) -> RecordedStep:
    batch = scheduled.batch
    return RecordedStep(
        step=scheduled.step,
        kind=scheduled.kind,
        train_step=scheduled.train_step,
        epoch=scheduled.epoch,
        num_lookups=len(batch.ids),
        keys=tuple(grouper.group(grouper.lookups(batch)).keys for grouper in groupers),
    )


def numbered_rows(keys: list[I64]) -> NumberedRows:
    """From the distinct keys of each step, ascending."""
    distinct, numbers = np.unique(np.concatenate([np.zeros(0, np.int64), *keys]), return_inverse=True)
    ends = np.cumsum([len(some) for some in keys])
    rows: list[I32] = np.split(numbers.astype(np.int32), ends[:-1]) if keys else []
    upcoming: npt.NDArray[np.int32] = np.full(len(distinct), NEVER, np.int32)
    next_uses: list[I32] = []
    for position in range(len(rows) - 1, -1, -1):
        next_uses.append(upcoming[rows[position]])
        upcoming[rows[position]] = position
    return NumberedRows(num_rows=len(distinct), rows=rows, next_uses=next_uses[::-1])
