"""Rows of an adopted table between their home and a step of the script.

A table's home is its first values, and rows that have changed since. From the second step on the engine holds both.
Before that they are here, because the optimizer's state of a row is not known yet.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.runtime.first_values import FirstValues
from rowcast.runtime.telemetry.logs import print_line
from rowcast.trainer.adopt.catch_up import catch_up
from rowcast.trainer.adopt.missed_steps import StepLog
from rowcast.trainer.adopt.records import (
    BLOCK_ROWS,
    WEIGHTS,
    ChangedRows,
    Engine,
    Records,
    UnsavedRows,
    alike,
    alone,
    first_records,
    is_large,
    made_here,
    mapped,
    place_of,
    untouched,
)
from rowcast.trainer.adopt.row_gradient import as_plain, shares_memory
from rowcast.trainer.adopt.whole_table import WholeField, say_of_arrays


class Home:
    """All rows of a table. The script's thread calls it."""

    @alone
    def __init__(self, name: str, weights: Tensor, folder: Path, leave_engine: Callable[[], None]) -> None:
        """`weights`: f32 [V, D] on the host, the script's first values, or with `first`, which names them. `folder`:
        for files of whole tables. `leave_engine`: makes all tables leave the engine."""
        self.name, self.folder = name, folder
        self.is_trained = self.is_sealed = False  # sealed: a look-up has come since NumPy got an array
        self.device = weights.device  # where the script has the table
        self.steps_replayed = 0  # that rows have missed and had later
        self.log = StepLog(Optimizer)  # steps that rows may have missed; none before there is an optimizer
        self._leave_engine = leave_engine
        self._num_files = 0
        self.num_changes = 0  # by the script, beside its optimizer
        place: FirstValues | None = getattr(weights, "first", None) or place_of(weights)
        num_marks = 0 if is_large(len(weights)) or (place is not None and place.is_on_demand) else len(weights)
        self._is_moving = np.zeros(num_marks, np.bool_)  # rows that a step moves without a gradient
        self._at_rest: tuple[Records, Records] | None = None  # a row that was never trained, now and at first
        self.unsaved = UnsavedRows(num_marks)
        self.is_restored = False  # its states are those of a save, and no optimizer has begun with them
        self._fields: dict[str, WholeField] = {}
        if place is None:
            place, copy = self.new_file(WEIGHTS, weights.shape, weights.dtype)
            weights = copy.copy_(weights)
        self.places = {WEIGHTS: place}  # of the first values that are in files, or come on demand
        first = (
            first_records(self.places, len(weights))
            if place.is_on_demand
            else Records(weights, {}, alike(0, (len(weights),), torch.int64))
        )
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
        """Returns copies after all steps. `ids`: i64 [n], distinct, ascending."""
        self.take_back()
        return self._caught_up(self.rows.read(ids))

    def _caught_up(self, rows: Records) -> Records:
        self.steps_replayed += catch_up(rows, self.log)
        return rows

    @alone
    def write(self, ids: Tensor, rows: Records) -> None:
        self.take_back()
        self.rows.write(ids, rows)
        written, steps = ids.cpu().numpy(), self.log.steps
        # at steps 1, 2, 4, ...: rates may begin at 0
        if self.is_on_demand and steps and steps & (steps - 1) == 0 and not self._is_at_rest():
            say_of_moves(self.name, len(self.here.first.lasts))
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
        """`ids`: i64 [n] ascending; `change` gets their rows of the field, [n, D]."""
        rows = self.read(ids)
        change(rows.field(field.name))
        self.write(ids, rows)
        self.num_changes += 1

    @property
    def is_large(self) -> bool:
        """Whether memory and disk do not grow with its rows, unless the script reads it whole."""
        return is_large(len(self.here.first.lasts)) or self.is_on_demand

    @property
    def is_on_demand(self) -> bool:
        """Whether first values come from a rule or released files, so that the table is nowhere stored whole."""
        return self.places[WEIGHTS].is_on_demand

    @property
    def origin(self) -> str:
        """What decides first values that come on demand; "" for other tables."""
        place = self.places[WEIGHTS]
        if place.released is None:
            return str(place.rule or "")
        digest = xxhash.xxh3_64_hexdigest(repr(place.sampled().named_files).encode())
        return f"from released files of checksum {digest}"

    # whole tables

    def whole(self, name: str) -> WholeField:
        """Returns all rows of a field."""
        if name not in self._fields:
            self._fields[name] = WholeField(self, name)
        return self._fields[name]

    @alone
    def refresh(self, field: WholeField) -> None:
        """Brings the field's array up to date: reads rows that may differ, and writes those that do.
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
        field.steps = self.log.steps
        field.note_left()

    def refuse_whole(self) -> None:
        """Raises ConfigError for a table that is nowhere stored whole."""
        if self.is_on_demand:
            comes = "that a rule makes" if self.places[WEIGHTS].rule else "of released files, which are read"
            raise ConfigError(
                f"the adopted table {self.name} has {len(self.here.first.lasts):,} rows {comes} when they are "
                "needed, and what uses it whole would write all of them; read the rows that "
                "you look up, weight[ids], and save it by rowcast.save"
            )

    def _follow_moves(self) -> None:
        """Begins to note which rows a step moves without a gradient."""
        if not len(self._is_moving):
            self._is_moving = np.zeros(len(self.here.first.lasts), np.bool_)
            self._is_moving[self.rows.trained().numpy()] = True

    def _changed(self, field: WholeField) -> Tensor:
        """Returns the rows whose values may differ from the array, i64 [n] ascending."""
        if field.steps != self.log.steps:
            field.is_stale |= self._is_moving if self._is_at_rest() else True
        stale = np.flatnonzero(field.is_stale)
        field.is_stale[stale] = False
        return torch.from_numpy(stale)

    def _is_at_rest(self) -> bool:
        """Whether steps have left untrained rows unmoved."""
        if self._at_rest is None:
            return False
        now, first = self._at_rest
        catch_up(now, self.log)
        return now.has_bits_of(first)

    @alone
    def repoint(self, tensor: Tensor) -> WholeField:
        """Gives the table the rows of a tensor of the script, f32 [V, D], whose memory is that of the whole table from
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

    # saves

    def first_values(self) -> tuple[FirstValues, ...]:
        """How a save names the first values of the table's records; () if it has to hold every row."""
        place = self.places[WEIGHTS]
        if self._is_here() or self._has_states() or self._all_have_moved(0):
            return ()
        if not all(file.checksum for file in place.files):
            self.places[WEIGHTS] = place.sampled()
        return self.columns()

    def _is_here(self) -> bool:
        """Whether the first weights are in a file that does not outlive the script."""
        path = self.places[WEIGHTS].path
        return Path(path).is_relative_to(self.folder) or (path in made_here and not self.is_large)

    def refuse_every_row(self) -> None:
        """Raises ConfigError for a large table of which a save would hold every row."""
        if not self.is_large or self.first_values():
            return
        rows = f"the adopted table {self.name} has {len(self.here.first.lasts):,} rows"
        if self._is_here() or self._has_states():
            raise ConfigError(
                f"save: {rows}, and no rule and no file of the script has their first values, or those of their "
                "states, so a save would hold them all; make the table within rowcast.tables(folder), the optimizer "
                "after rowcast.adopt, and change only rows that are looked up"
            )
        raise ConfigError(
            f"save: {rows}, and the optimizer moves all of them at every step, so each save would hold them all; give "
            'the table a group of its own without decay, {"params": [weight], "weight_decay": 0}'
        )

    def _has_states(self) -> bool:
        return any(place.path for name, place in self.places.items() if name != WEIGHTS)

    def _all_have_moved(self, since: int) -> bool:
        return self.log.steps != since and not self._is_at_rest()

    def changed_rows(self) -> Tensor:
        """Returns the rows whose values may differ from those that `first_values` name, i64 [n] ascending."""
        if not self.first_values():
            return torch.arange(len(self.here.first.lasts), device="cpu")
        rule = self.places[WEIGHTS].rule
        padding = [] if rule is None or rule.zero_row < 0 else [rule.zero_row]  # others know no padding
        return torch.from_numpy(np.union1d(self.rows.trained().numpy(), np.array(padding, np.int64)))

    def unsaved_rows(self) -> Tensor:
        """Returns the rows whose values may differ from the last save, i64 [n] ascending."""
        if self.unsaved.are_all or self._all_have_moved(self.unsaved.steps):
            return torch.arange(len(self.here.first.lasts), device="cpu")
        rows = self.unsaved.ids()
        if self.unsaved.steps != self.log.steps and self.here.first.states:
            moving = self.rows.trained().numpy() if self.is_large else np.flatnonzero(self._is_moving)
            rows = np.union1d(rows, moving)
        return torch.from_numpy(rows)

    def note_saved(self) -> None:
        self.unsaved.clear(self.log.steps)

    @alone
    def restore(self, places: dict[str, FirstValues], ids: Tensor, rows: Records) -> None:
        """Gives the table the rows of a save, before an optimizer begins. `places`: of the first values of weights and
        states. `rows`: those with other values, of `ids`, i64 [n] ascending."""
        self.take_back()
        self._leave_engine()
        first = first_records(places, len(self.here.first.lasts))
        self.begin(first, places)
        self.here.ids, self.here.rows = ids, rows
        self.is_trained, self.is_restored, self.log = bool(first.states) or self.is_trained, True, StepLog(Optimizer)
        self.num_changes += 1
        for field in self._fields.values():
            field.is_stale[:] = True
        self.note_saved()

    @alone
    def go_on(self, first: Mapping[str, float], log: StepLog) -> None:
        """Lets an optimizer begin with the states of a save. `first`: their values in a row that was never trained."""
        self.is_trained, self.is_restored, self.log = True, False, log
        self._at_rest = untouched(first), untouched(first)
        if len(self._is_moving):
            self._is_moving[self.here.ids.numpy()] = True
        for at in range(0, len(self._is_moving) if first else 0, BLOCK_ROWS):
            states = self.here.first.take(slice(at, at + BLOCK_ROWS)).states
            moves = torch.stack([(state != first[name]).any(1) for name, state in states.items()]).any(0)
            self._is_moving[at : at + BLOCK_ROWS] |= moves.numpy()

    @alone
    def begin_states(self, first: Mapping[str, float | Tensor], log: StepLog) -> None:
        """Gives each row new states, and no step. `first`: a value for all rows, or one for each, f32 [V, D].
        `log`: of the optimizer that begins."""
        self.take_back()
        self._leave_engine()
        self.is_restored = False
        self.unsaved.are_all = True
        first = {name: value.plain() if hasattr(value, "plain") else value for name, value in first.items()}
        for field in [*self._fields.values()]:
            if field.array is not None or (field.door() is not None and not self.is_on_demand):
                self.refresh(field)
            field.steps = 0
            if field.name != WEIGHTS and not self.is_on_demand:
                field.keeper = None
                del self._fields[field.name]
        if self.is_trained and self.is_large and self._is_at_rest():
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
        self.is_trained, self.log = True, log
        has_other = any(isinstance(value, Tensor) for value in first.values())
        self._is_moving = np.full(len(weights) if has_other else len(self._is_moving), has_other)
        self._at_rest = None if has_other else (untouched(first), untouched(first))

    def begin(self, first: Records, places: dict[str, FirstValues]) -> None:
        """Begins with these rows, of which none has changed since."""
        for path in (Path(place.path) for place in self.places.values()):
            if path.parent == self.folder:  # while it is mapped, only its name goes; the script's files stay
                path.unlink(missing_ok=True)
        self.here = self.rows = ChangedRows(first)
        self.places = places

    def _refuse_moved(self) -> None:
        if self.is_on_demand:
            raise ConfigError(
                f"another optimizer or state begins for the adopted table {self.name}, and the one before has moved "
                f"all of its {len(self.here.first.lasts):,} rows, which would be written; give it a group with "
                "weight_decay=0"
            )

    @alone
    def leave(self) -> None:
        """Leaves the engine with the current rows; of a large table with the trained ones."""
        if self.rows is not self.here and self.is_large:
            ids = self.rows.trained()
            self.here.ids, self.here.rows = ids, self._copied_rows(ids)
            self.rows = self.here
        elif self.rows is not self.here:
            self.begin(*self._copied(lambda rows: rows))

    def seal(self) -> None:
        """Called when a look-up comes: until then, what others write to an array counts."""
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
        self.unsaved.are_all = True
        self.num_changes += 1
        if any(field.name != WEIGHTS for field in changed):
            self._is_moving[:] = True

    def _copied(self, made: Callable[[Records], Records]) -> tuple[Records, dict[str, FirstValues]]:
        """Copies all rows, as they are computed, to new files. Returns the rows and their places."""
        rows, places = self._room(len(self.here.first.lasts))
        for at in range(0, len(rows.lasts), BLOCK_ROWS):
            ids = torch.arange(at, min(at + BLOCK_ROWS, len(rows.lasts)), device=self.device)
            rows.put(slice(at, at + BLOCK_ROWS), made(self.rows.read(ids)))
        return rows, places

    def _copied_rows(self, ids: Tensor) -> Records:
        """Copies some rows to new files without names. `ids`: i64 [n] ascending."""
        if not len(ids):
            return self.here.first.take(ids)
        rows, places = self._room(len(ids))
        for at, part in enumerate(torch.split(ids, BLOCK_ROWS)):
            block = self.rows.read(part.to(self.device)).each(Tensor.cpu)
            rows.put(slice(at * BLOCK_ROWS, at * BLOCK_ROWS + len(part)), block)
        for place in places.values():
            Path(place.path).unlink()
        return rows

    def _room(self, num_rows: int) -> tuple[Records, dict[str, FirstValues]]:
        """Returns new files for records, and their places."""
        first, places = self.here.first, dict[str, FirstValues]()

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

    def columns(self) -> tuple[FirstValues, ...]:
        """Returns where an engine finds the first values of this table's records."""
        first = self.here.first
        fields = {WEIGHTS: first.weights, **first.states}
        steps = FirstValues(width=1)
        if "lasts" in self.places:
            steps, tensor = self.new_file("steps", (len(first.lasts), 1), torch.float32)
            tensor[:, 0] = first.lasts.to(torch.int32).view(torch.float32)
        return *(self._columns(name, values) for name, values in fields.items()), steps

    def _columns(self, field: str, values: Tensor) -> FirstValues:
        return self.places.get(field) or FirstValues(width=values.shape[1], value=float(values[0, 0]))

    def new_file(self, field: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[FirstValues, Tensor]:
        """Returns the place of a new file of zeros, and the tensor that maps it."""
        self._num_files += 1
        path = self.folder / f"{self.name}.{field}.{self._num_files}"
        return FirstValues(width=shape[-1], path=str(path)), mapped(path, shape, dtype)


@cache
def say_of_moves(table: str, num_rows: int) -> None:
    print_line(
        f"the optimizer moves all {num_rows:,} rows of {table} at every step, so rowcast.save will refuse it; give it "
        'a group of its own without decay, {"params": [weight], "weight_decay": 0}'
    )
