"""Rows of an adopted table: weights, and what the script's optimizer keeps of each row.

Records      rows as tensors, and how they lie in the engine
Engine       where they are between steps: `ChangedRows` in this process, or the prefetcher
positions    of rows among others; distinct rows of ids
first values in a file, on demand, or all alike
"""

import math
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowcast.protocol.first_values import RowsOnDemand, rows_on_demand
from rowcast.runtime.arrays import F32, I32, I64, U64, Bools, Bytes
from rowcast.runtime.compiled import compiled_loop
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.first_values import FirstValues

WEIGHTS = "weights"  # the name of their field
MOST_NUMBERED, FEW = 2**22, 512  # rows of a table whose ids are found by 4 bytes for each; ids that are searched for
EMPTY = -1
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio
MARKED = 64  # rows of a table for each id, up to which marking its rows is faster than sorting the ids
NO_ROWS = torch.empty(0, dtype=torch.int64, device="cpu")
BLOCK_ROWS = 2**16
MOST_WHOLE = 2**24  # rows: above, nothing takes memory or disk by the rows of a table unless the script reads it whole
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Records:
    """Rows with what the script's optimizer keeps of each. All tensors are on one device."""

    weights: Tensor  # f32 [n, D]
    states: dict[str, Tensor]  # by torch.optim's name, f32 [n, D]
    lasts: Tensor  # i64 [n], the optimizer's dense steps that each row has had

    def field(self, name: str) -> Tensor:
        return self.weights if name == WEIGHTS else self.states[name]

    @property
    def width(self) -> int:
        """The columns of a record: weights, states, and the steps that the row has had."""
        return self.weights.shape[1] * (1 + len(self.states)) + 1

    def each(self, change: Callable[[Tensor], Tensor]) -> "Records":
        """Returns rows with each tensor as `change` makes it."""
        return Records(
            change(self.weights), {name: change(state) for name, state in self.states.items()}, change(self.lasts)
        )

    def take(self, index: Tensor | slice) -> "Records":
        """`index`: i64 [m]. Returns copies, or views if it is a slice."""
        return self.each(lambda field: field[index])

    def put(self, index: Tensor | slice, rows: "Records") -> None:
        self.weights[index] = rows.weights
        self.lasts[index] = rows.lasts
        for name, state in self.states.items():
            state[index] = rows.states[name]

    def has_bits_of(self, others: "Records") -> bool:
        """Whether weights and states have the same bits; any NaN equals any other."""
        pairs = [(self.weights, others.weights), *((state, others.states[name]) for name, state in self.states.items())]
        return all(torch.equal(bits_of(values), bits_of(other)) for values, other in pairs)

    def joined(self, others: "Records", order: Tensor) -> "Records":
        """Returns both, concatenated, in `order`, i64 [n]."""
        return Records(
            torch.cat([self.weights, others.weights])[order],
            {name: torch.cat([state, others.states[name]])[order] for name, state in self.states.items()},
            torch.cat([self.lasts, others.lasts])[order],
        )


@dataclass(slots=True)
class RecordsOnDemand(Records):
    """First values of all rows whose weights are made or read when they are taken; `weights` has only their shape."""

    weights_of: RowsOnDemand

    def take(self, index: Tensor | slice) -> Records:
        assert isinstance(index, Tensor), "rows are taken by number"
        rows = self.each(lambda field: field[index])
        rows.weights = torch.from_numpy(self.weights_of(index.numpy()))
        return rows


@dataclass(frozen=True)
class Place:
    """A table in the engine, and how its records lie there: weights, states, and the steps that a row has had."""

    name: str
    index: int  # of the table in the job
    group: int
    base: int  # the number of its first row among those of the group
    num_rows: int
    dim: int
    states: tuple[str, ...]  # of a record, after its weights

    def packed(self, rows: Records, floats: int) -> Tensor:
        """Returns records, f32 [n, floats]."""
        records = rows.weights.new_zeros((len(rows.weights), floats))
        for at, part in enumerate((rows.weights, *(rows.states[name] for name in self.states))):
            records[:, at * self.dim : (at + 1) * self.dim] = part
        records[:, self.last] = rows.lasts.to(torch.int32).view(torch.float32)
        return records

    def fields(self, records: Tensor) -> Records:
        """Returns views of records, with `lasts` as i32 [n]."""
        weights, *states = (records[:, at : at + self.dim] for at in range(0, self.last, self.dim))
        return Records(weights, dict(zip(self.states, states, strict=True)), records.view(torch.int32)[:, self.last])

    def unpacked(self, records: Tensor) -> Records:
        return taken(self.fields(records), torch.arange(len(records), device=records.device))

    @property
    def last(self) -> int:
        """The column with the steps that a row has had, an i32."""
        return self.dim * (1 + len(self.states))


def taken(fields: Records, slots: Tensor) -> Records:
    """`slots`: i32 or i64 [n]. Returns copies."""
    copies = fields.each(lambda field: torch.index_select(field, 0, slots))
    return replace(copies, lasts=copies.lasts.long())


def bits_of(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)


def untouched(states: Mapping[str, float | Tensor]) -> Records:
    """Returns an untrained row with weights of all magnitudes: a step that moves any untrained row moves this one.

    Powers of two are the first to shrink by a factor just below 1, and the values below them the first to grow."""
    sizes = torch.tensor([2.0**power for power in range(-149, 128, 4)], device="cpu")
    weights = torch.cat([sizes, torch.nextafter(2 * sizes, sizes), torch.zeros(1, device="cpu")])
    weights = torch.cat([weights, -weights])[None]
    values = {name: torch.full_like(weights, float(value)) for name, value in states.items()}
    return Records(weights, values, torch.zeros(1, dtype=torch.int64, device="cpu"))


_lock = threading.RLock()
_numbers = [np.zeros(0, np.int32)]  # places of the ids that `positions` has had last; others are left from before


def alone(method: Callable[P, T]) -> Callable[P, T]:
    """Runs one such method at a time, on any thread, and outside inference mode: rows that are kept must not be
    inference tensors, although a script may look up in that mode."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _lock:
            if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():  # as below, and costs less
                return method(*args, **kwargs)
            with torch.inference_mode(mode=False):
                return method(*args, **kwargs)

    return run


def positions(ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the position of each of `wanted`, i64 [n], in `ids`, i64 [U] ascending, and whether it is there."""
    if not len(ids):
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    size = int(ids[-1]) + 1
    if ids.is_cpu and len(wanted) > max(FEW, len(ids) // 4) and size <= MOST_NUMBERED:
        places, known = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.bool_)
        with _lock:  # takes a fifth of the time of a search for 2,048 ids, and a tenth for 65,536
            if len(_numbers[0]) < size:
                _numbers[0] = np.zeros(2 * size, np.int32)
            look_for(_numbers[0], ids.numpy(), wanted.contiguous().numpy(), places, known)
        return torch.from_numpy(places), torch.from_numpy(known)
    at = torch.searchsorted(ids, wanted.contiguous()).clamp_(max=len(ids) - 1)
    return at, ids[at] == wanted


@compiled_loop
def look_for(numbers: I32, ids: I64, wanted: I64, at: I64, known: Bools) -> None:
    """`numbers`: room for a number of each row up to the last of `ids`, with whatever values."""
    for i in range(len(ids)):
        numbers[ids[i]] = i
    for i in range(len(wanted)):
        row = min(max(wanted[i], 0), ids[-1])
        at[i] = min(max(numbers[row], 0), len(ids) - 1)
        known[i] = ids[at[i]] == wanted[i]


class Engine(Protocol):
    """Rows of a table in the engine. `ids`: i64 [n], distinct, ascending."""

    def planned(self, device: torch.device) -> tuple[Tensor, Records]:
        """The rows that were announced for the step that has begun, and copies of them, on the table's device. Once;
        later there are none."""

    def read(self, ids: Tensor) -> Records:
        """Returns copies. `ids` and these are on the table's device."""

    def write(self, ids: Tensor, rows: Records) -> None: ...

    def trained(self) -> Tensor:
        """Rows that may have another value than at first, i64 [n] ascending, on the host."""


class ChangedRows:
    """Implements `Engine` in this process's memory: a table's first values, and rows written since."""

    def __init__(self, first: Records) -> None:
        """`first`: all rows, on the host; never changed."""
        self.first = first
        self.forget()

    def planned(self, device: torch.device) -> tuple[Tensor, Records]:
        ids = NO_ROWS.to(device)
        return ids, self.read(ids)

    def trained(self) -> Tensor:
        return self.ids

    def forget(self) -> None:
        """Drops the written rows: they are elsewhere now."""
        self.ids = NO_ROWS
        self.rows = self.first.take(NO_ROWS)

    def read(self, ids: Tensor) -> Records:
        on_host = ids.cpu()
        rows = self.first.take(on_host)
        at, is_changed = positions(self.ids, on_host)
        rows.put(is_changed, self.rows.take(at[is_changed]))
        return rows.each(lambda field: field.to(ids.device))

    def write(self, ids: Tensor, rows: Records) -> None:
        on_host, new = ids.cpu(), rows.each(Tensor.cpu)
        _, is_replaced = positions(on_host, self.ids)
        self.ids, order = torch.sort(torch.cat([self.ids[~is_replaced], on_host]))
        self.rows = self.rows.take(~is_replaced).joined(new, order)


class RowSet:
    """A set of rows of a table of any size, which takes memory only for its members."""

    def __init__(self) -> None:
        self._cells: I64 = np.full(2, EMPTY, np.int64)
        self._num_rows = 0

    def add(self, rows: I64) -> None:
        if 2 * (self._num_rows + len(rows)) > len(self._cells):
            before = self.rows()
            self._cells = np.full(2 ** (4 * (len(before) + len(rows))).bit_length(), EMPTY, np.int64)
            self._num_rows = add_rows(self._cells, before)
        self._num_rows += add_rows(self._cells, rows)

    def rows(self) -> I64:
        """Returns them ascending."""
        return np.sort(self._cells[self._cells != EMPTY])


@compiled_loop
def add_rows(cells: I64, rows: I64) -> int:
    """Returns how many were not there."""
    num_new, bits = 0, 0
    while 1 << bits < len(cells):
        bits += 1
    for row in rows:
        cell = np.int64((np.uint64(row) * MULTIPLIER) >> np.uint64(64 - bits))
        while cells[cell] != EMPTY and cells[cell] != row:
            cell = (cell + 1) & (len(cells) - 1)
        num_new += cells[cell] == EMPTY
        cells[cell] = row
    return num_new


class UnsavedRows:
    """Rows of a table that may have another value than the last save of the script has."""

    def __init__(self, num_marks: int) -> None:
        """`num_marks`: the rows of a table; 0 for a large one, which has a set instead."""
        self.steps = 0  # of the optimizer, that the last save has
        self.are_all = True  # also before the first save
        self._marks = np.zeros(num_marks, np.bool_)
        self._rows = RowSet()

    def note(self, rows: I64) -> None:
        if self.are_all:
            return
        if len(self._marks):
            self._marks[rows] = True
        else:
            self._rows.add(rows)

    def ids(self) -> I64:
        """Returns them ascending, unless they are all."""
        return np.flatnonzero(self._marks) if len(self._marks) else self._rows.rows()

    def clear(self, steps: int) -> None:
        self.steps, self.are_all, self._rows = steps, False, RowSet()
        self._marks[:] = False


def distinct_rows(size: int, ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """Returns distinct ids, ascending, without those outside a table of `size` rows, which the look-up refuses. `ids`:
    [n]."""
    if size > MARKED * len(ids):
        rows = ids[(ids >= 0) & (ids < size)]
        ordered = np.sort(rows.astype(np.int32 if size <= 1 << 31 else np.int64))  # i32 sorts in half the time
        is_next = ordered[1:] != ordered[:-1]
        return np.append(ordered[:1], ordered[1:][is_next]).astype(np.int64)
    marks, distinct = np.zeros(-(-size // 64), np.uint64), np.empty(min(size, len(ids)), np.int64)
    return distinct[: list_distinct(ids.astype(np.int64, copy=False), size, marks, marks.view(np.uint8), distinct)]


@compiled_loop
def list_distinct(ids: I64, size: int, words: U64, marks: Bytes, distinct: I64) -> int:
    """Writes the ids to `distinct`, and returns how many there are. `marks`: a bit for each row, 0; the bytes of
    `words`."""
    for row in ids:
        if 0 <= row < size:
            marks[row >> 3] |= np.uint8(1 << (row & 7))
    count = 0
    for word in range(len(words)):
        for byte in range(8 * word, 8 * word + 8 if words[word] else 0):
            for bit in range(8 if marks[byte] else 0):
                if marks[byte] >> bit & 1:
                    distinct[count] = 8 * byte + bit
                    count += 1
    return count


# first values


def is_large(num_rows: int) -> bool:
    return num_rows > MOST_WHOLE


made_here: set[str] = set()  # files of `rowcast.tables`, mapped shared


def place_of(weights: Tensor) -> FirstValues | None:
    """Returns where a mapped file has these values, f32 [V, D], or None if no file has them in the order of rows."""
    path = weights.untyped_storage().filename
    if not path or weights.stride(1) != 1 or weights.stride(0) < weights.shape[1] or not len(weights):
        return None
    place = FirstValues(
        width=weights.shape[1],
        path=os.path.abspath(path),
        offset=4 * int(weights.storage_offset()),
        row_bytes=4 * weights.stride(0),
    )
    if path in made_here:
        return place
    size = Path(path).stat().st_size
    if size < place.offset + place.row_bytes * (len(weights) - 1) + 4 * place.width:
        return None
    values = rows_in(place, len(weights)).view(np.int32)
    mine = weights.view(torch.int32).numpy()  # a private mapping may have other values than its file
    blocks = range(0, len(mine), BLOCK_ROWS)
    is_same = all(np.array_equal(values[at : at + BLOCK_ROWS], mine[at : at + BLOCK_ROWS]) for at in blocks)
    return place if is_same else None


def rows_in(place: FirstValues, num_rows: int) -> F32:
    """Returns the rows of a file, f32 [num_rows, width], mapped: what is written there stays in memory."""
    memory, row_bytes = np.memmap(place.path, np.uint8, "c"), place.row_bytes or 4 * place.width
    return np.ndarray((num_rows, place.width), np.float32, memory, place.offset, (row_bytes, 4))


def values_at(place: FirstValues, num_rows: int) -> Tensor:
    """Returns f32 [num_rows, width], which takes no memory. Values on demand are NaN here, because they come row by
    row."""
    if place.path:
        return torch.from_numpy(rows_in(place, num_rows))
    return alike(math.nan if place.is_on_demand else place.value, (num_rows, place.width), torch.float32)


def first_records(places: Mapping[str, FirstValues], num_rows: int) -> Records:
    """Returns first values of all rows, before any step. `places`: of weights and states."""
    fields = {name: values_at(place, num_rows) for name, place in places.items()}
    weights, lasts = fields.pop(WEIGHTS), alike(0, (num_rows,), torch.int64)
    if places[WEIGHTS].is_on_demand:
        return RecordsOnDemand(weights, fields, lasts, rows_on_demand(places[WEIGHTS]))
    return Records(weights, fields, lasts)


def mapped(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns the zeros of a new file, which takes space as it is written. Raises ConfigError if there is too little
    space: a page that does not fit would end the process."""
    size = math.prod(shape)
    num_bytes, free = size * dtype.itemsize, shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise ConfigError(
            f"{path} would take {num_bytes:,} bytes, but its disk has {free:,} free; free space there, or name a "
            "folder on another disk"
        )
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype, device="cpu").view(*shape)


def alike(value: float, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor with `value` everywhere, which takes no memory."""
    return torch.full([1] * len(shape), value, dtype=dtype, device="cpu").expand(*shape)
