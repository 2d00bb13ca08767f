"""Copies rows between slots and neighbouring memory: of all groups in one compiled call on a CPU.

gather     rows[slots[i]] -> out[i]           scatter    source[i] -> rows[slots[i]]
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rowcast.runtime.arrays import I64
from rowcast.runtime.compiled import arrays_of, c_memcpy, compiled_loop, prefetch_at

AHEAD = 8  # rows between prefetching and copying
i32_at, i64_at = arrays_of(np.int32), arrays_of(np.int64)


class Move(NamedTuple):
    """Some rows of a group. Views of them cost more than the copy of a few rows, so only a device gets them."""

    rows: Tensor  # [any, D] of any stride
    all_slots: Tensor  # of these, those from `first` on
    first: int
    size: int  # rows
    memory: Tensor  # flat, in the dtype of `rows`; the rows' neighbours begin at `begin`
    begin: int

    @property
    def slots(self) -> Tensor:
        return self.all_slots[self.first : self.first + self.size]

    @property
    def beside(self) -> Tensor:
        width = self.rows.shape[1]
        return self.memory[self.begin : self.begin + self.size * width].view(self.size, width)

    def halves(self) -> tuple["Move", "Move"]:
        half = self.size // 2
        begin = self.begin + half * self.rows.shape[1]
        return self._replace(size=half), self._replace(first=self.first + half, size=self.size - half, begin=begin)


def move(rows: Tensor, slots: Tensor, beside: Tensor) -> Move:
    """Of all these slots [n]; `beside` [n, D] is contiguous."""
    return Move(rows, slots, 0, len(slots), beside.view(-1), 0)


def gather(moves: Sequence[Move]) -> None:
    """beside[i] = rows[slots[i]] of each move; slots i32."""
    if moves and moves[0].rows.device.type == "cpu":
        check(gather_each(places_of(moves)))
        return
    for own in moves:
        torch.index_select(own.rows, 0, own.slots, out=own.beside)


def scatter(moves: Sequence[Move]) -> None:
    """rows[slots[i]] = beside[i] of each move; slots i64 and distinct."""
    if moves and moves[0].rows.device.type == "cpu":
        check(scatter_each(places_of(moves)))
        return
    for own in moves:
        own.rows.index_copy_(0, own.slots, own.beside)


def places_of(moves: Sequence[Move]) -> I64:
    """Returns [*, 7]: addresses of rows, slots and neighbours, how many these are, bytes of a row, bytes from row to
    row, and how many rows there are."""
    places = []
    for rows, slots, first, size, memory, begin in moves:
        item, (num_rows, width) = memory.itemsize, rows.shape
        at = slots.data_ptr() + first * slots.itemsize, memory.data_ptr() + begin * item
        places.append((rows.data_ptr(), *at, size, width * item, rows.stride(0) * item, num_rows))
    return np.array(places, np.int64).reshape(-1, 7)


def check(moved: bool) -> None:
    if not moved:
        raise IndexError("a row is moved to or from a slot that does not exist: a bug of rowcast")


@compiled_loop
def gather_each(places: I64) -> bool:
    """Returns whether every slot exists."""
    for k in range(len(places)):
        rows, beside, count, width, stride = places[k, 0], places[k, 2], places[k, 3], places[k, 4], places[k, 5]
        slots = i32_at(places[k, 1], count)
        for i in range(count):
            if i + AHEAD < count:
                prefetch_at(np.uint64(rows), slots[i + AHEAD] * stride)
            if np.uint64(slots[i]) >= np.uint64(places[k, 6]):
                return False
            c_memcpy(np.uint64(beside + i * width), np.uint64(rows + slots[i] * stride), np.uint64(width))
    return True


@compiled_loop
def scatter_each(places: I64) -> bool:
    """Returns whether every slot exists."""
    for k in range(len(places)):
        rows, beside, count, width, stride = places[k, 0], places[k, 2], places[k, 3], places[k, 4], places[k, 5]
        slots = i64_at(places[k, 1], count)
        for i in range(count):
            if i + AHEAD < count:
                prefetch_at(np.uint64(rows), slots[i + AHEAD] * stride)
            if np.uint64(slots[i]) >= np.uint64(places[k, 6]):
                return False
            c_memcpy(np.uint64(rows + slots[i] * stride), np.uint64(beside + i * width), np.uint64(width))
    return True
