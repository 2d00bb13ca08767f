"""How the arrays of a plan become one block of bytes, and how a plan is cut into pieces that fit half a ring.

    block     | dense | labels | 0.slots | 0.unique_slots | ... |     each array starts at a multiple of 64 bytes
    piece 0   | block ........................ | rows of group 0 | rows of group 1 |
    piece 1   |                                | more rows ...   |                    only where piece 0 was full

Rows follow the order of the plan's fetch, so a span of rows [start, start + count) of a group also names its victims.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowcast.job.tables import aligned
from rowcast.protocol.batch import Batch
from rowcast.protocol.messages import ArraySpan, ArraySpec, GroupHeader, PlanHeader, RowSpan
from rowcast.protocol.plan import StepPlan
from rowcast.protocol.plan_layout import BATCH_ARRAYS, GROUP_ARRAYS
from rowcast.runtime.arrays import Bytes

Array = npt.NDArray[Any]
ARRAY_ALIGNMENT = 64
BARRIER_STAMP = 1 << 62
DENSE_STAMP = 1 << 61
CHECKSUM_EVERY = 64  # pieces in shared memory carry a checksum at one step in so many; their guards are checked always


def plan_stamp(step: int, piece: int) -> int:
    """What stands at both ends of a piece in the ring, so that stale bytes are never taken for it."""
    return step << 20 | piece


def barrier_stamp(barrier: int, piece: int) -> int:
    return BARRIER_STAMP | plan_stamp(barrier, piece)


def saved_stamp(barrier: int, piece: int) -> int:
    """Of the dense side behind a barrier's rows."""
    return DENSE_STAMP | barrier_stamp(barrier, piece)


def dense_stamp(piece: int) -> int:
    """Of the dense side that an incarnation begins with."""
    return DENSE_STAMP | piece


def is_sampled(stamp: int) -> bool:
    """Whether the piece with this stamp carries a checksum: a function of the step, so that runs are alike."""
    return (stamp >> 20) % CHECKSUM_EVERY == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayBlock:
    """Named arrays laid out as one block of `nbytes`."""

    arrays: tuple[Array, ...]
    specs: tuple[ArraySpec, ...]
    nbytes: int

    def write(self, offset: int, out: Bytes) -> None:
        """Copies bytes [offset, offset + len(out)) of the block; gaps between arrays are left as they are."""
        for array, spec in zip(self.arrays, self.specs, strict=True):
            first, last = max(offset, spec.offset), min(offset + len(out), spec.offset + array.nbytes)
            if first < last:
                source = array.reshape(-1).view(np.uint8)
                out[first - offset : last - offset] = source[first - spec.offset : last - spec.offset]


def make_block(arrays: Mapping[str, Array]) -> ArrayBlock:
    specs, end = [], 0
    for name, array in arrays.items():
        specs.append(ArraySpec(name=name, dtype=array.dtype.str[1:], shape=array.shape, offset=end))  # type: ignore[arg-type]
        end = aligned(end + array.nbytes, ARRAY_ALIGNMENT)
    return ArrayBlock(
        arrays=tuple(np.ascontiguousarray(array) for array in arrays.values()), specs=tuple(specs), nbytes=end
    )


def plan_block(batch: Batch, plan: StepPlan, checked: Mapping[str, Array] | None = None) -> ArrayBlock:
    """Everything of a plan but its rows: what the trainer needs to look up, train and evict; and the slots that it is asked to check."""
    arrays: dict[str, Array] = {name: getattr(batch, name) for name in BATCH_ARRAYS}
    for index, group in enumerate(plan.groups):
        own = {name: getattr(group, name) for name in GROUP_ARRAYS}
        arrays |= {f"{index}.{name}": array for name, array in own.items() if array is not None}
    return make_block({**arrays, **(checked or {})})


def plan_header(batch: Batch, plan: StepPlan, block: ArrayBlock, num_checksums: int = 0) -> PlanHeader:
    groups = tuple(
        GroupHeader(
            num_lookups=len(group.slots),
            num_unique=len(group.unique_slots),
            num_fetch=len(group.fetch),
            num_evict=len(group.evict),
            num_dirty=group.num_dirty,
            fill_after=group.fill_after,
            sequence_lookups=() if group.sequence_offsets is None else tuple(group.sequence_offsets[:, -1].tolist()),
        )
        for group in plan.groups
    )
    return PlanHeader(
        kind=plan.kind,
        train_step=plan.train_step,
        epoch=plan.epoch,
        batch_size=batch.size,
        groups=groups,
        arrays=block.specs,
        arrays_bytes=block.nbytes,
        num_checksums=num_checksums,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What one message carries: bytes of the block, then spans of rows."""

    arrays: ArraySpan | None
    rows: tuple[RowSpan, ...]
    nbytes: int


def cut_bytes(nbytes: int, max_payload: int) -> list[ArraySpan]:
    """Cuts `nbytes` into spans of at most `max_payload`."""
    return [
        ArraySpan(offset=offset, nbytes=min(max_payload, nbytes - offset)) for offset in range(0, nbytes, max_payload)
    ]


def cut(
    block_bytes: int,
    num_rows: Sequence[int],
    record_bytes: Sequence[int],
    max_payload: int,
    staging_bytes: int | None = None,
) -> list[Piece]:
    """Cuts a block and each group's rows into pieces of at most `max_payload` bytes; always at least one piece. The rows of each take at
    most `staging_bytes`, where that is given."""
    pieces: list[Piece] = []
    arrays: ArraySpan | None = None
    rows: list[RowSpan] = []
    end = 0

    def finish() -> None:
        nonlocal arrays, rows, end
        pieces.append(Piece(arrays=arrays, rows=tuple(rows), nbytes=end))
        arrays, rows, end = None, [], 0

    for span in cut_bytes(block_bytes, max_payload):
        if arrays is not None:
            finish()
        arrays, end = span, span.nbytes
    for group, (total, width) in enumerate(zip(num_rows, record_bytes, strict=True)):
        start = 0
        while start < total:
            offset = aligned(end, ARRAY_ALIGNMENT)
            limit = max_payload
            if staging_bytes is not None:
                limit = min(limit, (rows[0].offset if rows else offset) + staging_bytes)
            count = min(total - start, (limit - offset) // width)
            if count <= 0:
                finish()
                continue
            rows.append(RowSpan(group=group, start=start, count=count, offset=offset))
            start, end = start + count, offset + count * width
    finish()
    return pieces
