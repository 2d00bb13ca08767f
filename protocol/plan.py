"""What the prefetcher decides for one step, and what the trainer executes."""

from dataclasses import dataclass

import numpy as np

from rowcast.protocol.batch import Kind
from rowcast.runtime.arrays import F32, I32, I64

# a row that is looked up more often in a step is long: a device sums its look-ups in pieces of so many, side by side
PIECE_LOOKUPS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMove:
    """Rows that enter or leave the device: row keys[i] and slot slots[i] belong together; slots are distinct."""

    keys: I64  # [n]
    slots: I32  # [n]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """How the look-ups of K long rows, those with more than PIECE_LOOKUPS, are cut in P pieces; all but a row's last one are whole."""

    long_rows: I32  # [K] the rows, as positions in unique_slots
    piece_offsets: I32  # [K + 1] where each long row's pieces start
    piece_rows: I32  # [P] the long row that each piece belongs to, as a position in long_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """One group's part of a step. N look-ups of U distinct rows in G bags, feature-major.

    A feature has B bags, one a sample; one of the S features whose look-ups stay apart (pooling = "none") has a bag for each look-up, and
    `sequence_offsets` tell them from sample to sample. Without such features G is F * B.
    """

    slots: I32  # [N] slot of each look-up, feature-major
    unique_slots: I32  # [U] slot of each distinct row, by ascending key
    segment_offsets: I32  # [U + 1] where each distinct row's look-ups start in bag_order
    bag_order: I32  # [N] the bag of each look-up, grouped by row, in look-up order within a row
    pieces: Pieces
    # [N] the look-up behind each entry of bag_order; only where weights are given
    lookup_order: I32 | None
    offsets: I32 | None  # [G + 1] bag boundaries in slots, or None: every bag holds one look-up
    weights: F32 | None  # [N] per look-up, or None
    # [S, B + 1] where each sample's look-ups start among its feature's; None: S is 0
    sequence_offsets: I32 | None = None
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


def cut_long_rows(segment_offsets: I32) -> Pieces:
    """The pieces of a group whose rows' look-ups lie between these offsets, [U + 1]."""
    lengths = np.diff(segment_offsets)
    rows = np.flatnonzero(lengths > PIECE_LOOKUPS)
    num_pieces = -(-lengths[rows] // PIECE_LOOKUPS)
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(num_pieces, out=offsets[1:])
    piece_rows = np.repeat(np.arange(len(rows), dtype=np.int32), num_pieces)
    return Pieces(long_rows=rows.astype(np.int32), piece_offsets=offsets, piece_rows=piece_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class BarrierPlan:
    """An entry of the plan stream after a step: every dirty row comes home and stays resident, clean."""

    barrier: int  # 0, 1, ... over the run
    after_step: int | None  # the last step before it; None before the first
    dirty: tuple[RowMove, ...]  # one a group, by ascending key
    reason: str
    finished: bool  # the data has ended; otherwise a stop was asked for
