"""What the prefetcher decides for one step, and what the trainer executes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.batch import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMove:
    """Rows that enter or leave the device: row keys[i] and slot slots[i] belong together; slots are distinct."""

    keys: npt.NDArray[np.int64]  # [n]
    slots: npt.NDArray[np.int32]  # [n]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """One group's part of a step. N look-ups of U distinct rows in F * B bags; bag = feature of the group * B + sample."""

    slots: npt.NDArray[np.int32]  # [N] slot of each look-up, feature-major
    unique_slots: npt.NDArray[np.int32]  # [U] slot of each distinct row, by ascending key
    segment_offsets: npt.NDArray[np.int32]  # [U + 1] where each distinct row's look-ups start in bag_order
    bag_order: npt.NDArray[np.int32]  # [N] the bag of each look-up, grouped by row, in look-up order within a row
    lookup_order: npt.NDArray[np.int32] | None  # [N] the look-up behind each entry of bag_order; only where weights are given
    offsets: npt.NDArray[np.int32] | None  # [F * B + 1] bag boundaries in slots, or None: every bag holds one look-up
    weights: npt.NDArray[np.float32] | None  # [N] per look-up, or None
    fetch: RowMove  # rows to bring, by ascending key; fetch.slots[i] == evict.slots[i] for every victim i
    evict: RowMove  # victims, dirty ones first, each part by ascending key
    num_dirty: int  # dirty victims: evict[:num_dirty] travel home, the others are dropped without a copy
    fill_after: int | None  # the last step that reads or writes any victim; None without victims


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    step: int
    rank: int = 0
    kind: Kind
    train_step: int  # training batches before this step
    epoch: int
    after_step: int | None  # RowsBack of this step must be in the store before this plan's rows may be read
    groups: tuple[GroupPlan, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BarrierPlan:
    """An entry of the plan stream after a step: every dirty row comes home and stays resident, clean."""

    barrier: int  # 0, 1, ... over the run
    after_step: int | None  # the last step before it; None before the first
    dirty: tuple[RowMove, ...]  # one a group, by ascending key
    reason: str
    finished: bool  # the data has ended; otherwise a stop was asked for
