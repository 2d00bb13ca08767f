"""Defines the plan of a step: the prefetcher makes it, the trainer executes it."""

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from rowcast.protocol.batch import Kind
from rowcast.protocol.messages import ShareHeader
from rowcast.protocol.plan_layout import ExchangeArrays, GroupArrays
from rowcast.runtime.arrays import I32, I64


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMove:
    """A group's dirty rows at a barrier: row keys[i] has slot slots[i]; slots are distinct."""

    keys: I64  # [n]
    slots: I32  # [n]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupShare(ExchangeArrays[npt.NDArray[Any]]):
    """A rank's exchange with the others: arrays for the trainer, and the numbers that divide them."""

    header: ShareHeader


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan(GroupArrays[npt.NDArray[Any]]):
    """One group's plan in a step: arrays for the trainer, and keys, which stay in the prefetcher."""

    fetch_keys: I64  # [fetch] ascending: the rows to bring into fetch_slots
    # [evict] victims, dirty ones first, both kinds ascending; victim i leaves fetch_slots[i]
    evict_keys: I64
    num_dirty: int  # the first victims, which are written back; the others are dropped without a copy
    fill_after: int | None  # the last step that reads or writes any victim; None without victims
    # for the memory tier; empty if the store has none
    load_keys: I64  # [load] ascending: rows that enter the tier for this step
    spill_keys: I64  # [spill] rows that leave the tier once this step's rows are home
    share: GroupShare | None = None  # None: the batch is not divided

    @property
    def num_lookups(self) -> int:
        return int(self.segment_offsets[-1])

    @property
    def evict_slots(self) -> I32:
        slots: I32 = self.fetch_slots[: len(self.evict_keys)]
        return slots


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    step: int
    kind: Kind
    train_step: int  # training batches before this step
    epoch: int
    batch_size: int  # samples of the batch over all ranks
    after_step: int | None  # this plan's rows may be read once the RowsBack of this step are in the store
    groups: tuple[GroupPlan, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BarrierPlan:
    """An entry of the plan stream after a step: every dirty row is written back and stays resident, clean."""

    barrier: int  # 0, 1, ... over the run
    after_step: int | None  # the last step before it; None before the first
    dirty: tuple[RowMove, ...]  # one per group, by ascending key
    reason: str
    finished: bool  # True if the data has ended, False if a stop was requested
