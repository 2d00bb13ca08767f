"""Rows of an adopted table between their home and a step of the script.

A table's home is its first values, and rows that have changed since. From the second step on these are the engine's;
before it is known what the optimizer keeps of a row, they are here.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowcast.protocol.first_values import RowRule
from rowcast.protocol.script_setup import Columns
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.trainer.adopt.first_rows import BLOCK_ROWS, alike, is_large, mapped, place_of
from rowcast.trainer.adopt.row_gradient import as_plain, shares_memory
from rowcast.trainer.adopt.whole_table import WEIGHTS, WholeField, say_of_arrays

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


@dataclass(slots=True)
class RecordsByRule(Records):
    """First values of all rows whose weights a rule makes when they are taken; `weights` has only their shape."""

    rule: RowRule

    def take(self, index: Tensor | slice) -> Records:
        assert isinstance(index, Tensor), "rows are taken by number"
        rows = self.each(lambda own: own[index])
        rows.weights = torch.from_numpy(self.rule.rows(index.numpy()))
        return rows


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

    def trained(self) -> Tensor:
        """Rows that may have another value than at first, i64 [n] ascending, on the host."""


class ChangedRows:
    """Implements `Engine` in this process's memory: a table's first values, and the rows that were written since."""

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
        """`weights`: f32 [V, D] on the host, the script's first values, or with a `rule` for them. `folder`: for files
        of whole tables. `leave_engine`: makes all tables leave the engine."""
        self.name, self.folder = name, folder
        self.is_trained = self.is_sealed = False
        self.device = weights.device  # where the script has the table
        self.steps_replayed = 0  # that rows have missed and had later
        self.missed_steps: MissedSteps = NoSteps()
        self._leave_engine = leave_engine
        self._num_files = 0
        self.num_changes = 0  # by the script, beside its optimizer
        # rows that a step moves without a gradient; of a large table only once it is read whole
        self._is_moving = np.zeros(0 if is_large(len(weights)) else len(weights), np.bool_)
        self._at_rest: tuple[Records, Records] | None = None  # a row that was never trained, now and at first
        self.unsaved = UnsavedRows(0 if hasattr(weights, "rule") else len(weights))
        self.is_restored = False  # its states are those of a save, and no optimizer has begun with them
        self._fields: dict[str, WholeField] = {}
        self.rule: RowRule | None = getattr(weights, "rule", None)  # makes the first values
        place, lasts = None if self.rule else place_of(weights), alike(0, (len(weights),), torch.int64)
        if self.rule:
            place = Columns(width=self.rule.width, rule=self.rule)
            weights = alike(math.nan, weights.shape, weights.dtype)
        elif place is None:
            place, copy = self.new_file(WEIGHTS, weights.shape, weights.dtype)
            weights = copy.copy_(weights)
        self.places = {WEIGHTS: place}  # of the first values that are in files, or made by a rule
        first = RecordsByRule(weights, {}, lasts, self.rule) if self.rule else Records(weights, {}, lasts)
        self.here = ChangedRows(first)  # the rows, unless they are in the engine
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
        if len(self._is_moving):
            self._is_moving[written] = True
        self.unsaved.note(written)
        for field in self._fields.values():
            if field.array is not None:
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
            self._fields[name] = WholeField(self, name)
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
            self.refuse_whole()
            self._follow_moves()
            _, field.array = self.new_file(f"{field.name}.whole", first.shape, first.dtype)
            field.is_stale = np.ones(len(first), np.bool_)
        for ids in torch.split(self._changed(field), BLOCK_ROWS):
            rows = self._caught_up(self.rows.read(ids.to(self.device))).field(field.name).cpu()
            is_other = (rows.view(torch.int32) != field.array[ids].view(torch.int32)).any(1)
            field.array[ids[is_other]] = rows[is_other]
        field.steps = self.missed_steps.steps
        field.note_left()

    def refuse_whole(self) -> None:
        """Raises ConfigError for a table whose rows are nowhere as a whole."""
        if self.rule is not None:
            raise ConfigError(
                f"the adopted table {self.name} has {self.rule.num_rows:,} rows that a rule makes when they are "
                "needed, and state_dict(), rowcast.save and all else that uses it whole would write all of them; read "
                f"the rows that you look up, weight[ids], and save what is not of {self.name}"
            )

    def _follow_moves(self) -> None:
        """From now on it is noted which rows a step moves without a gradient."""
        if not len(self._is_moving):
            self._is_moving = np.zeros(len(self.here.first.lasts), np.bool_)
            self._is_moving[self.rows.trained().numpy()] = True

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
        self.refuse_whole()
        earlier = self._fields.pop(WEIGHTS, None)
        if earlier is not None:
            self.refresh(earlier)
            earlier.keeper = None
        field = given if given is not None and given.array is not None else WholeField(self, WEIGHTS)
        with as_plain():
            field.array = tensor.as_subclass(Tensor)
        field.keeper = self
        field.is_stale = np.zeros(len(tensor), np.bool_)
        self._fields[WEIGHTS] = field
        self.is_sealed = False
        self._take_over([field])
        field.checksum = field.sum()
        return field

    def unsaved_rows(self) -> Tensor:
        """Rows that may have another value than the last save has, i64 [n] ascending."""
        if self.unsaved.steps != self.missed_steps.steps and not self._is_at_rest():
            self.unsaved.note(slice(None))
        elif self.unsaved.steps != self.missed_steps.steps and self.here.first.states:
            self._follow_moves()
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
        self._follow_moves()
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
            if field.array is not None or (field.door() is not None and self.rule is None):
                self.refresh(field)
            field.steps = 0
            if field.name != WEIGHTS and self.rule is None:
                field.keeper = None
                del self._fields[field.name]
        if self.is_trained and is_large(len(self.here.first.lasts)) and self._is_at_rest():
            self._caught_up(self.here.rows)
        elif self.is_trained:
            self._refuse_moved()
            self.begin(*self._copied(self._caught_up))
        before, weights = self.here, self.here.first.weights
        self.places = {WEIGHTS: self.places[WEIGHTS]}
        states = {name: self._state(name, value, weights) for name, value in first.items()}
        lasts = alike(0, (len(weights),), torch.int64)
        self.here = self.rows = ChangedRows(replace(before.first, states=states, lasts=lasts))
        new = self.here.first.take(before.ids)
        new.weights = before.rows.weights
        self.here.write(before.ids, new)
        self.is_trained, self.missed_steps = True, missed_steps
        has_other = any(isinstance(value, Tensor) for value in first.values())
        self._is_moving = np.full(len(weights) if has_other else len(self._is_moving), has_other)
        self._at_rest = None if has_other else (untouched(first), untouched(first))

    def begin(self, first: Records, places: dict[str, Columns]) -> None:
        """The table has these rows, and none has changed since."""
        for path in (Path(place.path) for place in self.places.values()):
            if path.parent == self.folder:  # while it is mapped, only its name goes; the script's files stay
                path.unlink(missing_ok=True)
        self.here = self.rows = ChangedRows(first)
        self.places, self.rule = places, None

    def _refuse_moved(self) -> None:
        if self.rule is not None:
            raise ConfigError(
                f"another optimizer or state begins for the adopted table {self.name}, and the one before has moved "
                f"all of its {self.rule.num_rows:,} rows, which would be written; give it a group with weight_decay=0"
            )

    @alone
    def leave(self) -> None:
        """Leaves the engine, with the rows as they are; of a large table those that were trained."""
        if self.rows is not self.here and is_large(len(self.here.first.lasts)):
            ids = self.rows.trained()
            self.here.ids, self.here.rows = ids, self._copied_rows(ids)
            self.rows = self.here
        elif self.rows is not self.here:
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
        self._follow_moves()
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
        rows, places = self._room(len(self.here.first.lasts))
        for at in range(0, len(rows.lasts), BLOCK_ROWS):
            ids = torch.arange(at, min(at + BLOCK_ROWS, len(rows.lasts)), device=self.device)
            rows.put(slice(at, at + BLOCK_ROWS), made(self.rows.read(ids)))
        return rows, places

    def _copied_rows(self, ids: Tensor) -> Records:
        """Copies some rows to new files without a name. `ids`: i64 [n] ascending."""
        if not len(ids):
            return self.here.first.take(ids)
        rows, places = self._room(len(ids))
        for at, part in enumerate(torch.split(ids, BLOCK_ROWS)):
            own = self.rows.read(part.to(self.device)).each(Tensor.cpu)
            rows.put(slice(at * BLOCK_ROWS, at * BLOCK_ROWS + len(part)), own)
        for place in places.values():
            Path(place.path).unlink()
        return rows

    def _room(self, num_rows: int) -> tuple[Records, dict[str, Columns]]:
        """Returns new files for records, and where they are."""
        first, places = self.here.first, dict[str, Columns]()

        def room(name: str, like: Tensor) -> Tensor:
            places[name], tensor = self.new_file(name, (num_rows, *like.shape[1:]), like.dtype)
            return tensor

        states = {name: room(name, state) for name, state in first.states.items()}
        return Records(room(WEIGHTS, first.weights), states, room("lasts", first.lasts)), places

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


def untouched(states: Mapping[str, float | Tensor]) -> Records:
    """A row that no step has trained, with weights of all sizes: if a step moves any such row, it moves this one.

    Powers of two are the first to shrink by a factor just below 1, and the values below them the first to grow."""
    sizes = torch.tensor([2.0**power for power in range(-149, 128, 4)], device="cpu")
    weights = torch.cat([sizes, torch.nextafter(2 * sizes, sizes), torch.zeros(1, device="cpu")])
    weights = torch.cat([weights, -weights])[None]
    values = {name: torch.full_like(weights, float(value)) for name, value in states.items()}
    return Records(weights, values, torch.zeros(1, dtype=torch.int64, device="cpu"))


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
