"""What was read of a job's data: how many rows each step touches, and which of the followed ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rowcast.analysis.simulate.recording import RecordedStep, Recording
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.capacity import Touched
from rowcast.prefetcher.planner.grouping import I64
from rowcast.protocol.batch import ScheduledBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenStep:
    recorded: RecordedStep  # followed rows only
    unique_rows: tuple[int, ...]  # of each group, followed or not
    num_samples: int
    id_bytes: int  # of all its rows while the batch is known ahead

    @property
    def keys_bytes(self) -> int:
        """What is kept."""
        return sum(grouping.keys.nbytes for grouping in self.recorded.groupings)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """P steps of G groups."""

    groups: tuple[GroupSpec, ...]
    shares: tuple[float, ...]  # of each group's rows, followed
    measured: Sequence[ScheduledBatch]  # the first batches, whole
    touched: Touched  # by them
    steps: Sequence[SeenStep]  # at least one
    num_counted: int  # the last so many steps count: all where a whole run was read
    epoch_samples: int | None  # None: the data does not say

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def is_whole_run(self) -> bool:
        return self.num_counted == len(self)

    @property
    def num_train(self) -> int:
        return sum(step.recorded.trains for step in self.steps)

    @property
    def num_samples(self) -> int:
        return sum(step.num_samples for step in self.steps)

    @property
    def num_lookups(self) -> int:
        return sum(step.recorded.num_lookups for step in self.steps)

    @property
    def id_bytes(self) -> float:
        """Of a batch that is known ahead, on average."""
        return sum(step.id_bytes for step in self.steps) / len(self)

    @cached_property
    def recording(self) -> Recording:
        return Recording(self.groups, [step.recorded for step in self.steps])

    @cached_property
    def unique_rows(self) -> I64:
        """[P, G] distinct rows."""
        return np.array([step.unique_rows for step in self.steps], np.int64)

    @cached_property
    def followed_rows(self) -> I64:
        """[P, G] distinct rows that are followed."""
        return np.array(
            [[grouping.num_unique for grouping in step.recorded.groupings] for step in self.steps], np.int64
        )

    @cached_property
    def first_touches(self) -> I64:
        """[P, G] followed rows that no earlier step touches."""
        return np.stack([first_touches(self.keys(g)) for g in range(len(self.groups))], axis=1)

    def keys(self, group: int) -> list[I64]:
        """The followed rows of each step, ascending."""
        return [step.recorded.keys(group) for step in self.steps]

    @property
    def distinct_rows(self) -> list[float]:
        """Of each group, touched by all steps; no more than there are."""
        followed = self.first_touches.sum(axis=0).tolist()
        return [
            min(rows / share, group.num_rows)
            for rows, share, group in zip(followed, self.shares, self.groups, strict=True)
        ]

    @property
    def largest_batch_rows(self) -> list[int]:
        return list(self.unique_rows.max(axis=0).tolist())

    @property
    def record_bytes(self) -> I64:
        """[G]"""
        return np.array([group.record_bytes for group in self.groups], np.int64)


def first_touches(keys: list[I64]) -> I64:
    """[P] how many of each step's rows occur in no step before."""
    _, firsts = np.unique(np.concatenate(keys), return_index=True)
    ends = np.cumsum([len(some) for some in keys])
    return np.bincount(np.searchsorted(ends, firsts, side="right"), minlength=len(keys))
