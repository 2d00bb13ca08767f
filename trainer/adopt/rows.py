"""Rows of an adopted table between their home and a step of the script.

A table's home is its first values, and rows that have changed since. From the second step on these are the engine's;
before it is known what the optimizer keeps of a row, they are here.
"""

import math
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowcast.protocol.script_setup import Columns
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.trainer.adopt.row_gradient import as_plain, shares_memory
from rowcast.trainer.adopt.whole_table import WEIGHTS, WholeField, say_of_arrays

BLOCK_ROWS = 2**16
MOST_NUMBERED, FEW = 2**22, 512  # rows of a table whose ids are found by 4 bytes for each; ids that are searched for
NO_ROWS = torch.empty(0, dtype=torch.int64, device="cpu")
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
        """Returns rows of what `change` makes of each tensor."""
        return Records(
            change(self.weights), {name: change(own) for name, own in self.states.items()}, change(self.lasts)
        )

    def take(self, index: Tensor | slice) -> "Records":
        """`index`: i64 [m]. Returns copies, or views if it is a slice."""
        return self.each(lambda own: own[index])

    def put(self, index: Tensor | slice, rows: "Records") -> None:
        self.weights[index] = rows.weights
        self.lasts[index] = rows.lasts
        for name, own in self.states.items():
            own[index] = rows.states[name]

    def has_bits_of(self, others: "Records") -> bool:
        """Whether weights and states are the same; any NaN is like any other."""
        pairs = [(self.weights, others.weights), *((own, others.states[name]) for name, own in self.states.items())]
        return all(torch.equal(bits_of(own), bits_of(other)) for own, other in pairs)

    def joined(self, others: "Records", order: Tensor) -> "Records":
        """Both one after the other, in `order`, i64 [n]."""
        return Records(
            torch.cat([self.weights, others.weights])[order],
            {name: torch.cat([own, others.states[name]])[order] for name, own in self.states.items()},
            torch.cat([self.lasts, others.lasts])[order],
        )


def bits_of(own: Tensor) -> Tensor:
    return torch.where(own.isnan(), torch.nan, own).view(torch.int32)


class Engine(Protocol):
    """Rows of a table in the engine. `ids`: i64 [n], distinct, ascending."""

    def planned(self, device: torch.device) -> tuple[Tensor, Records]:
        """The rows that were announced for the step that has begun, and copies of them, on the table's device. Once;
        later there are none."""

    def read(self, ids: Tensor) -> Records:
        """Returns copies. `ids` and these are on the table's device."""

    def write(self, ids: Tensor, rows: Records) -> None: ...


class ChangedRows:
    """Implements `Engine` in this process's memory: a table's first values, and the rows that were written since."""

    def __init__(self, first: Records) -> None:
        """`first`: all rows, on the host; never changed."""
        self.first = first
        self.forget()

    def planned(self, device: torch.device) -> tuple[Tensor, Records]:
        ids = NO_ROWS.to(device)
        return ids, self.read(ids)

    def forget(self) -> None:
        """What was written since is elsewhere now."""
        self.ids = NO_ROWS
        self.rows = self.first.take(NO_ROWS)

    def read(self, ids: Tensor) -> Records:
        own = ids.cpu()
        rows = self.first.take(own)
        at, is_changed = positions(self.ids, own)
        rows.put(is_changed, self.rows.take(at[is_changed]))
        return rows.each(lambda own: own.to(ids.device))

    def write(self, ids: Tensor, rows: Records) -> None:
        own, new = ids.cpu(), rows.each(Tensor.cpu)
        _, is_replaced = positions(own, self.ids)
        self.ids, order = torch.sort(torch.cat([self.ids[~is_replaced], own]))
        self.rows = self.rows.take(~is_replaced).joined(new, order)


_lock = threading.RLock()
_numbers = [np.zeros(0, np.int32)]  # places of the ids that `positions` has had last; others are left from before


def alone(method: Callable[P, T]) -> Callable[P, T]:
    """Runs one such method at a time, on whatever thread the script looks up. Rows that are kept must not be tensors of
    inference mode, in which a script may look up too."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _lock, torch.inference_mode(mode=False):
            return method(*args, **kwargs)

    return run


class UnsavedRows:
    """Rows of a table that may have another value than the last save of the script has."""

    def __init__(self, num_rows: int) -> None:
        self.steps = 0  # of the optimizer, that the last save has
        self._is_first = True  # there was no save, which needs all rows
        self._marks = np.zeros(num_rows, np.bool_)  # since the last one; pages of zeros take no memory

    def note(self, rows: Any) -> None:
        """`rows`: any index."""
        if not self._is_first:
            self._marks[rows] = True

    def ids(self) -> NDArray[np.int64]:
        return np.arange(len(self._marks)) if self._is_first else np.flatnonzero(self._marks)

    def clear(self, steps: int) -> None:
        self.steps, self._is_first = steps, False
        self._marks[:] = False


MOST_MOVED = 2**24  # rows of a table that a save catches up if its steps move all of them


def refuse_large(name: str, num_rows: int) -> None:
    if num_rows > MOST_MOVED:
        raise ConfigError(
            f"save: the optimizer moves each of the {num_rows:,} rows of {name} at each step, and a save would write "
            'all; give the table a group without decay, {"params": [...], "weight_decay": 0}, or a sparse optimizer'
        )


class MissedSteps(Protocol):
    """Gives rows the steps of their optimizer that they have missed."""

    @property
    def steps(self) -> int:
        """The steps that each row shall have."""

    def __call__(self, rows: Records) -> int:
        """Changes `rows` in place; returns the steps that they had missed."""


class NoSteps:
    """Implements `MissedSteps` before there is an optimizer."""

    steps = 0

    def __call__(self, rows: Records) -> int:
        return 0


class Home:
    """Implements `whole_table.Keeper`. All rows of a table. The script's thread calls it."""

    @alone
    def __init__(self, name: str, weights: Tensor, folder: Path, leave_engine: Callable[[], None]) -> None:
        """`weights`: f32 [V, D] on the host, the script's first values. `folder`: for files of whole tables.
        `leave_engine`: makes all tables leave the engine."""
        self.name, self.folder = name, folder
        self.is_trained = self.is_sealed = False
        self.device = weights.device  # where the script has the table
        self.steps_replayed = 0  # that rows have missed and had later
        self.missed_steps: MissedSteps = NoSteps()
        self._leave_engine = leave_engine
        self._num_files = 0
        self.num_changes = 0  # by the script, beside its optimizer
        self._is_moving = np.zeros(len(weights), np.bool_)  # rows that a step moves without a gradient
        self._at_rest: tuple[Records, Records] | None = None  # a row that was never trained, now and at first
        self.unsaved = UnsavedRows(len(weights))
        self.is_restored = False  # its states are those of a save, and no optimizer has begun with them
        self._fields: dict[str, WholeField] = {}
        place = place_of(weights)
        if place is None:
            place, copy = self.new_file(WEIGHTS, weights.shape, weights.dtype)
            weights = copy.copy_(weights)
        self.places = {WEIGHTS: place}  # of the first values that are in files
        # the rows, unless they are in the engine
        self.here = ChangedRows(Records(weights, {}, alike(0, (len(weights),), torch.int64)))
        self.rows: Engine = self.here

    @alone
    def planned(self) -> tuple[Tensor, Records]:
        """The rows that were announced for the step that has begun, and copies of them. Once; later there are none."""
        self.take_back()
        ids, rows = self.rows.planned(self.device)
        return ids, self._caught_up(rows)

    @alone
    def read(self, ids: Tensor) -> Records:
        """Returns copies, with all steps. `ids`: i64 [n], distinct, ascending."""
        self.take_back()
        return self._caught_up(self.rows.read(ids))

    def _caught_up(self, rows: Records) -> Records:
        self.steps_replayed += self.missed_steps(rows)
        return rows

    @alone
    def write(self, ids: Tensor, rows: Records) -> None:
        self.take_back()
        self.rows.write(ids, rows)
        written = ids.cpu().numpy()
        self._is_moving[written] = True
        self.unsaved.note(written)
        for field in self._fields.values():
            field.is_stale[written] = True
            if field.is_in_numpy():
                say_of_arrays(self.name)
                self.refresh(field)

    @alone
    def change_rows(self, field: WholeField, ids: Tensor, change: Callable[[Tensor], Any]) -> None:
        rows = self.read(ids)
        change(rows.field(field.name))
        self.write(ids, rows)
        self.num_changes += 1

    # whole tables

    def whole(self, name: str) -> WholeField:
        """Returns all rows of a field."""
        if name not in self._fields:
            self._fields[name] = WholeField(self, name, len(self.here.first.weights))
        return self._fields[name]

    @alone
    def refresh(self, field: WholeField) -> None:
        """Brings the field's array up to date: rows that may have another value are read, those that have are written.
        Raises RowcastError if the array was changed unseen."""
        self.take_back()
        if self.is_sealed and field.is_changed_unseen():
            raise RowcastError(
                f"a NumPy array has changed {self.name} after it was looked up, and rowcast has trained without that "
                "change; write `with torch.no_grad(): weight[...] = ...` instead"
            )
        first = self.here.first.field(field.name)
        if field.array is None:
            _, field.array = self.new_file(f"{field.name}.whole", first.shape, first.dtype)
            field.is_stale[:] = True
        for ids in torch.split(self._changed(field), BLOCK_ROWS):
            rows = self._caught_up(self.rows.read(ids.to(self.device))).field(field.name).cpu()
            is_other = (rows.view(torch.int32) != field.array[ids].view(torch.int32)).any(1)
            field.array[ids[is_other]] = rows[is_other]
        field.steps = self.missed_steps.steps
        field.note_left()

    def _changed(self, field: WholeField) -> Tensor:
        """Rows that may have another value than in the array, i64 [n] ascending."""
        if field.steps != self.missed_steps.steps:
            field.is_stale |= self._is_moving if self._is_at_rest() else True
        stale = np.flatnonzero(field.is_stale)
        field.is_stale[stale] = False
        return torch.from_numpy(stale)

    def _is_at_rest(self) -> bool:
        """Whether steps have not moved a row that was never trained."""
        if self._at_rest is None:
            return False
        now, first = self._at_rest
        self.missed_steps(now)
        return now.has_bits_of(first)

    @alone
    def repoint(self, tensor: Tensor) -> WholeField:
        """The table has the rows of a tensor of the script, f32 [V, D], and its memory is that of the whole table from
        now on. Returns the field."""
        given: WholeField | None = getattr(tensor, "field", None)
        if (
            given is not None
            and given.keeper is self
            and given.array is not None
            and shares_memory(tensor, given.array)
        ):
            return self.whole(WEIGHTS)
        if given is not None and given.keeper is not None:
            raise ConfigError(
                f"{self.name}.data would be the memory of another adopted table, {given.keeper.name}; give it a copy, "
                "or one parameter to both modules"
            )
        earlier = self._fields.pop(WEIGHTS, None)
        if earlier is not None:
            self.refresh(earlier)
            earlier.keeper = None
        field = given if given is not None and given.array is not None else WholeField(self, WEIGHTS, len(tensor))
        with as_plain():
            field.array = tensor.as_subclass(Tensor)
        field.keeper = self
        field.is_stale[:] = False
        self._fields[WEIGHTS] = field
        self.is_sealed = False
        self._take_over([field])
        field.checksum = field.sum()
        return field

    def unsaved_rows(self) -> Tensor:
        """Rows that may have another value than the last save has, i64 [n] ascending."""
        if self.unsaved.steps != self.missed_steps.steps and not self._is_at_rest():
            refuse_large(self.name, len(self.here.first.lasts))
            self.unsaved.note(slice(None))
        elif self.unsaved.steps != self.missed_steps.steps and self.here.first.states:
            self.unsaved.note(self._is_moving)
        return torch.from_numpy(self.unsaved.ids())

    def note_saved(self) -> None:
        self.unsaved.clear(self.missed_steps.steps)

    @alone
    def restore(self, first: Records, places: dict[str, Columns]) -> None:
        """The table has the rows of a save, at no step of an optimizer that has yet to begin."""
        self.take_back()
        self._leave_engine()
        self.begin(first, places)
        self.is_trained, self.is_restored, self.missed_steps = bool(first.states) or self.is_trained, True, NoSteps()
        self.num_changes += 1
        for field in self._fields.values():
            field.is_stale[:] = True
        self.note_saved()

    @alone
    def go_on(self, first: Mapping[str, float], missed_steps: MissedSteps) -> None:
        """An optimizer begins with the states of a save. `first`: their values in a row that was never trained."""
        self.is_trained, self.is_restored, self.missed_steps = True, False, missed_steps
        self._at_rest = untouched(first), untouched(first)
        for at in range(0, len(self._is_moving) if first else 0, BLOCK_ROWS):
            states = self.here.first.take(slice(at, at + BLOCK_ROWS)).states
            moves = torch.stack([(own != first[name]).any(1) for name, own in states.items()]).any(0)
            self._is_moving[at : at + BLOCK_ROWS] |= moves.numpy()

    @alone
    def begin_states(self, first: Mapping[str, float | Tensor], missed_steps: MissedSteps) -> None:
        """Gives each row new states, and no step. `first`: a value for all rows, or one for each, f32 [V, D].
        `missed_steps`: of the optimizer that begins."""
        self.take_back()
        self._leave_engine()
        self.is_restored = False
        self.unsaved.note(slice(None))
        first = {name: value.plain() if hasattr(value, "plain") else value for name, value in first.items()}
        for field in [*self._fields.values()]:
            if field.array is not None or field.door() is not None:
                self.refresh(field)
            field.steps = 0
            if field.name != WEIGHTS:
                field.keeper = None
                del self._fields[field.name]
        if self.is_trained:
            self.begin(*self._copied(self._caught_up))
        before, weights = self.here, self.here.first.weights
        self.places = {WEIGHTS: self.places[WEIGHTS]}
        states = {name: self._state(name, value, weights) for name, value in first.items()}
        self.here = self.rows = ChangedRows(Records(weights, states, alike(0, (len(weights),), torch.int64)))
        new = self.here.first.take(before.ids)
        new.weights = before.rows.weights
        self.here.write(before.ids, new)
        self.is_trained, self.missed_steps = True, missed_steps
        has_other = any(isinstance(value, Tensor) for value in first.values())
        self._is_moving[:] = has_other
        self._at_rest = None if has_other else (untouched(first), untouched(first))

    def begin(self, first: Records, places: dict[str, Columns]) -> None:
        """The table has these rows, and none has changed since."""
        for path in (Path(place.path) for place in self.places.values()):
            if path.parent == self.folder:  # while it is mapped, only its name goes; the script's files stay
                path.unlink(missing_ok=True)
        self.here = self.rows = ChangedRows(first)
        self.places = places

    @alone
    def leave(self) -> None:
        """Leaves the engine, with the rows as they are."""
        if self.rows is not self.here:
            self.begin(*self._copied(lambda rows: rows))

    def seal(self) -> None:
        """A look-up comes: until then, what others do to an array counts."""
        self.take_back()
        self.is_sealed = True

    @alone
    def take_back(self) -> None:
        """Takes over what the script has changed in arrays of whole tables."""
        changed = [
            field
            for field in self._fields.values()
            if field.is_changed() or (not self.is_sealed and field.is_changed_unseen())
        ]
        if changed:
            self._take_over(changed)

    def _take_over(self, changed: Sequence[WholeField]) -> None:
        for field in changed:
            field.note_left()
        self._leave_engine()
        rows, places = self._copied(self._caught_up)
        for field in changed:
            assert field.array is not None, "it was changed"
            rows.field(field.name).copy_(field.array)
        self.begin(rows, places)  # the script may change its array again
        self.unsaved.note(slice(None))
        self.num_changes += 1
        if any(field.name != WEIGHTS for field in changed):
            self._is_moving[:] = True

    def _copied(self, made: Callable[[Records], Records]) -> tuple[Records, dict[str, Columns]]:
        """Copies what is made of all rows to new files. Returns the rows, and where they are."""
        first, places = self.here.first, dict[str, Columns]()

        def room(name: str, like: Tensor) -> Tensor:
            places[name], tensor = self.new_file(name, like.shape, like.dtype)
            return tensor

        states = {name: room(name, state) for name, state in first.states.items()}
        rows = Records(room(WEIGHTS, first.weights), states, room("lasts", first.lasts))
        for at in range(0, len(rows.lasts), BLOCK_ROWS):
            ids = torch.arange(at, min(at + BLOCK_ROWS, len(rows.lasts)), device=self.device)
            rows.put(slice(at, at + BLOCK_ROWS), made(self.rows.read(ids)))
        return rows, places

    def _state(self, name: str, value: float | Tensor, weights: Tensor) -> Tensor:
        if not isinstance(value, Tensor):
            return alike(value, weights.shape, weights.dtype)
        self.places[name], tensor = self.new_file(name, weights.shape, weights.dtype)
        return tensor.copy_(value)

    def columns(self) -> tuple[Columns, ...]:
        """How an engine finds the first values of this table's records."""
        first = self.here.first
        fields = {WEIGHTS: first.weights, **first.states}
        steps = Columns(width=1)
        if "lasts" in self.places:
            steps, tensor = self.new_file("steps", (len(first.lasts), 1), torch.float32)
            tensor[:, 0] = first.lasts.to(torch.int32).view(torch.float32)
        return *(self._columns(name, values) for name, values in fields.items()), steps

    def _columns(self, field: str, values: Tensor) -> Columns:
        return self.places.get(field) or Columns(width=values.shape[1], value=float(values[0, 0]))

    def new_file(self, field: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[Columns, Tensor]:
        """Returns the place of a file of zeros, and the tensor that it is mapped to."""
        self._num_files += 1
        path = self.folder / f"{self.name}.{field}.{self._num_files}"
        return Columns(width=shape[-1], path=str(path)), mapped(path, shape, dtype)


def place_of(weights: Tensor) -> Columns | None:
    """Where a mapped file has these values, f32 [V, D]. None: in no file, or in another order than by rows."""
    path = weights.untyped_storage().filename
    if not path or weights.stride(1) != 1 or weights.stride(0) < weights.shape[1] or not len(weights):
        return None
    place = Columns(
        width=weights.shape[1], path=path, offset=4 * int(weights.storage_offset()), row_bytes=4 * weights.stride(0)
    )
    if path in made_here:
        return place
    size = Path(path).stat().st_size
    if size < place.offset + place.row_bytes * (len(weights) - 1) + 4 * place.width:
        return None
    memory = np.memmap(path, np.uint8, "r")
    values = np.ndarray(weights.shape, np.float32, memory, place.offset, (place.row_bytes, 4)).view(np.int32)
    mine = weights.view(torch.int32).numpy()  # a private mapping may have other values than its file
    blocks = range(0, len(mine), BLOCK_ROWS)
    is_same = all(np.array_equal(values[at : at + BLOCK_ROWS], mine[at : at + BLOCK_ROWS]) for at in blocks)
    return place if is_same else None


made_here: set[str] = set()  # files of `rowcast.tables`, mapped shared


def untouched(states: Mapping[str, float | Tensor]) -> Records:
    """A row that no step has trained, with weights of all sizes: if a step moves any such row, it moves this one.

    Powers of two are the first to shrink by a factor just below 1, and the values below them the first to grow."""
    sizes = torch.tensor([2.0**power for power in range(-149, 128, 4)], device="cpu")
    weights = torch.cat([sizes, torch.nextafter(2 * sizes, sizes), torch.zeros(1, device="cpu")])
    weights = torch.cat([weights, -weights])[None]
    values = {name: torch.full_like(weights, float(value)) for name, value in states.items()}
    return Records(weights, values, torch.zeros(1, dtype=torch.int64, device="cpu"))


def mapped(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns the zeros of a new file, which takes space as they are written. Raises ConfigError if there is too
    little: a page that finds none ends the process."""
    size = math.prod(shape)
    num_bytes, free = size * dtype.itemsize, shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise ConfigError(
            f"{path} would take {num_bytes:,} bytes, but its disk has {free:,} free; free space there, or name a "
            "folder on another disk"
        )
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype, device="cpu").view(*shape)


def alike(value: float, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """All elements are `value`; takes no memory."""
    return torch.full([1] * len(shape), value, dtype=dtype, device="cpu").expand(*shape)


def positions(ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the position of each of `wanted`, i64 [n], in `ids`, i64 [U] ascending, and whether it is there."""
    if not len(ids):
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    size = int(ids[-1]) + 1
    if ids.is_cpu and len(wanted) > max(FEW, len(ids) // 4) and size <= MOST_NUMBERED:
        with _lock:  # takes a fifth of the time of a search for 2,048 ids, and a tenth for 65,536
            if len(_numbers[0]) < size:
                _numbers[0] = np.zeros(2 * size, np.int32)
            _numbers[0][ids.numpy()] = np.arange(len(ids), dtype=np.int32)
            at = torch.from_numpy(_numbers[0][wanted.clamp(0, size - 1).numpy()]).long()
    else:
        at = torch.searchsorted(ids, wanted.contiguous())
    at = at.clamp_(max=len(ids) - 1)
    return at, ids[at] == wanted
