"""Rows of an adopted table between their home and a step of the script.

A table's home is its first values, and rows that have changed since. From the second step on these are the engine's;
before it is known what the optimizer keeps of a row, they are here.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rowcast.protocol.script_setup import Columns
from rowcast.runtime.errors import ConfigError

BLOCK_ROWS = 2**16
NO_ROWS = torch.empty(0, dtype=torch.int64, device="cpu")
CatchUp = Callable[["Records"], None]  # gives rows the steps that they have missed


@dataclass(slots=True)
class Records:
    """Rows with what the script's optimizer keeps of each. All tensors are on one device."""

    weights: Tensor  # f32 [n, D]
    states: dict[str, Tensor]  # by torch.optim's name, f32 [n, D]
    lasts: Tensor  # i64 [n], the optimizer's dense steps that each row has had

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

    def joined(self, others: "Records", order: Tensor) -> "Records":
        """Both one after the other, in `order`, i64 [n]."""
        return Records(
            torch.cat([self.weights, others.weights])[order],
            {name: torch.cat([own, others.states[name]])[order] for name, own in self.states.items()},
            torch.cat([self.lasts, others.lasts])[order],
        )


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


# rows that are kept must not be tensors of inference mode, in which a script may look up
normal_mode = torch.inference_mode(mode=False)


class Home:
    """All rows of a table. The script's thread calls it."""

    @normal_mode
    def __init__(self, name: str, weights: Tensor, path: str, folder: Path, leave_engine: Callable[[], None]) -> None:
        """`weights`: f32 [V, D] on the host, the script's first values; `path`: the file that they are mapped from, or
        "". `folder`: for files of whole tables. `leave_engine`: makes all tables leave the engine."""
        self.name, self.folder = name, folder
        self.is_trained = False
        self.device = weights.device  # where the script has the table
        self.steps_replayed = 0  # that rows have missed and had later
        self._leave_engine = leave_engine
        self._num_writes = self._num_files = 0
        self.num_changes = 0  # of the whole table, by the script
        if not path:
            path, own = self.new_file("weights", weights.shape, weights.dtype)
            weights = own.copy_(weights)
        self.paths = {"weights": path}  # of the first values that are in files
        # the rows, unless they are in the engine
        self.here = ChangedRows(Records(weights, {}, alike(0, (len(weights),), torch.int64)))
        self.rows: Engine = self.here
        # to the script: all rows and their files, the version of the weights, and the writes before
        self._handed: tuple[Records, dict[str, str], int, int] | None = None

    @normal_mode
    def planned(self) -> tuple[Tensor, Records]:
        """The rows that were announced for the step that has begun, and copies of them. Once; later there are none."""
        self.take_back()
        return self.rows.planned(self.device)

    @normal_mode
    def read(self, ids: Tensor) -> Records:
        """Returns copies. `ids`: i64 [n], distinct, ascending."""
        self.take_back()
        return self.rows.read(ids)

    @normal_mode
    def write(self, ids: Tensor, rows: Records) -> None:
        self.take_back()
        self.rows.write(ids, rows)
        self._num_writes += 1

    @normal_mode
    def whole(self, catch_up: CatchUp) -> Records:
        """Returns all rows with all steps, in files. What the script changes in the weights changes in the table."""
        self.take_back()
        if self._handed is not None:
            rows, paths, _, num_writes = self._handed
            if num_writes == self._num_writes:
                return rows
            self._remove(paths)
        rows, paths = self._copied(catch_up)
        self._handed = rows, paths, rows.weights._version, self._num_writes
        return rows

    @normal_mode
    def begin_states(self, first: Mapping[str, float | Tensor], catch_up: CatchUp) -> None:
        """Gives each row new states, and no step. `first`: a value for all rows, or one for each, f32 [V, D].
        `catch_up`: of the optimizer until now."""
        self.take_back()
        self._leave_engine()
        if self.is_trained:
            self.begin(*self._copied(catch_up))
        before, weights = self.here, self.here.first.weights
        self.paths = {name: path for name, path in self.paths.items() if name == "weights"}
        states = {name: self._state(name, value, weights) for name, value in first.items()}
        self.here = self.rows = ChangedRows(Records(weights, states, alike(0, (len(weights),), torch.int64)))
        new = self.here.first.take(before.ids)
        new.weights = before.rows.weights
        self.here.write(before.ids, new)
        self.is_trained = True

    def begin(self, first: Records, paths: dict[str, str]) -> None:
        """The table has these rows, and none has changed since."""
        self._remove(self.paths)
        self.here = self.rows = ChangedRows(first)
        self.paths = paths

    @normal_mode
    def leave(self) -> None:
        """Leaves the engine, with the rows as they are."""
        if self.rows is not self.here:
            self.begin(*self._copied(lambda rows: None))

    @normal_mode
    def take_back(self) -> None:
        """Takes over what the script has changed in rows that it was handed. Raises ConfigError."""
        if self._handed is None:
            return
        rows, paths, version, num_writes = self._handed
        if rows.weights._version == version:
            return
        if num_writes != self._num_writes:
            raise ConfigError(
                f"the script has changed all of {self.name} through a tensor that is {self._num_writes - num_writes} "
                "optimizer steps old; take its .data anew before the change"
            )
        self._leave_engine()
        self.num_changes += 1
        self._handed = rows, paths, rows.weights._version, num_writes
        self.rows = ChangedRows(rows)
        self.begin(*self._copied(lambda rows: None))  # the script may change its own again

    def _copied(self, catch_up: CatchUp) -> tuple[Records, dict[str, str]]:
        """Copies all rows to new files, with the steps that they have missed: these have the bits of the table's
        device. Returns the rows and the files."""
        first, paths = self.here.first, dict[str, str]()

        def room(name: str, like: Tensor) -> Tensor:
            paths[name], own = self.new_file(name, like.shape, like.dtype)
            return own

        states = {name: room(name, own) for name, own in first.states.items()}
        rows = Records(room("weights", first.weights), states, room("lasts", first.lasts))
        for at in range(0, len(rows.lasts), BLOCK_ROWS):
            block = self.rows.read(torch.arange(at, min(at + BLOCK_ROWS, len(rows.lasts)), device=self.device))
            catch_up(block)
            rows.put(slice(at, at + BLOCK_ROWS), block)
        return rows, paths

    def _state(self, name: str, value: float | Tensor, weights: Tensor) -> Tensor:
        if not isinstance(value, Tensor):
            return alike(value, weights.shape, weights.dtype)
        self.paths[name], own = self.new_file(name, weights.shape, weights.dtype)
        return own.copy_(value)

    def _remove(self, paths: Mapping[str, str]) -> None:
        """Of files that are still mapped, only the names go. The script's own stay."""
        for path in map(Path, paths.values()):
            if path.parent == self.folder:
                path.unlink(missing_ok=True)

    def columns(self) -> tuple[Columns, ...]:
        """How an engine finds the first values of this table's records."""
        first = self.here.first
        fields = {"weights": first.weights, **first.states}
        steps = Columns(width=1)
        if "lasts" in self.paths:
            path, own = self.new_file("steps", (len(first.lasts), 1), torch.float32)
            own[:, 0] = first.lasts.to(torch.int32).view(torch.float32)
            steps = Columns(width=1, path=path)
        return *(self._columns(name, own) for name, own in fields.items()), steps

    def _columns(self, field: str, values: Tensor) -> Columns:
        if field in self.paths:
            return Columns(width=values.shape[1], path=self.paths[field])
        return Columns(width=values.shape[1], value=float(values[0, 0]))

    def new_file(self, field: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[str, Tensor]:
        """Returns a file of zeros and the tensor that it is mapped to."""
        self._num_files += 1
        path = self.folder / f"{self.name}.{field}.{self._num_files}"
        return str(path), mapped(path, shape, dtype)


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
    at = torch.searchsorted(ids, wanted.contiguous()).clamp_(max=len(ids) - 1)
    return at, ids[at] == wanted
