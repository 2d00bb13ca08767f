"""The adopted tables of a process, and the engine that holds their rows between steps.

first step     rows are in this process: what the optimizer keeps of a row is not known yet
look-ups       from the second step on they use the engine, which holds the tables that have been trained
a new era      a new optimizer or state, or a whole table that the script has changed: all rows return to this
               process, in files, and the next look-up starts an engine with them
"""

import atexit
import operator
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from rowcast.job.file import parse_job
from rowcast.job.models import NO_MODEL
from rowcast.job.tables import aligned, group_specs
from rowcast.job.units import parse_bytes, parse_rows
from rowcast.protocol.messages import SETUP, ScriptSetup, ScriptTable
from rowcast.runtime.arrays import I64
from rowcast.runtime.disk import try_lock
from rowcast.runtime.errors import ConfigError, listed
from rowcast.runtime.telemetry.format_numbers import plural
from rowcast.trainer.adopt.ranks import JOINED
from rowcast.trainer.adopt.read_ahead import Announced
from rowcast.trainer.adopt.records import BLOCK_ROWS, NO_ROWS, Place, Records, alone, distinct_rows
from rowcast.trainer.adopt.rows import Home
from rowcast.trainer.adopt.script_engine import ScriptEngine
from rowcast.trainer.adopt.script_process import ScriptProcess

JOB_FILE = "job.json"  # in the run directory: the job of both processes
STATES = 2  # of a row, as Adam keeps them: an optimizer may be made later
DEPTH, HORIZON = 4, 8  # steps; together below those that are read ahead
MEASURED_STEPS = 32
MOST_STOPPED = "720h"  # of a script that Ctrl-Z has stopped, or a busy host: the end of either process is seen at once
LOCK = "adopted.lock"
ALL = "all"  # of the memory that trained rows need
IDS_BYTES = 2**24  # of the steps that are read ahead, in `memory`


def rows_or_bytes(argument: str, text: str | int) -> tuple[int | None, int]:
    """Returns the rows that an argument of `adopt` names, or None and its bytes. Raises ConfigError."""
    try:
        rows = parse_rows(text)
        return rows, 0 if rows is not None else parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"adopt({argument}={text!r}): {error}") from None


@dataclass(frozen=True)
class Capacity:
    """How much the tables of a model may take on the device."""

    text: str  # as the script wrote it
    most: int  # rows, or bytes
    counts_rows: bool

    @classmethod
    def of(cls, text: str | int) -> "Capacity":
        rows, num_bytes = rows_or_bytes("capacity", text)
        return cls(str(text), num_bytes if rows is None else rows, counts_rows=rows is not None)

    def cost(self, table: nn.Parameter) -> int:
        return len(table) if self.counts_rows else 4 * table.numel() * (1 + STATES)

    def left_by(self, tables: Iterable[nn.Parameter]) -> "Capacity":
        return replace(self, most=self.most - sum(map(self.cost, tables)))


class EngineRows:
    """Implements `rows.Engine` for one table."""

    def __init__(self, engine: ScriptEngine, place: Place) -> None:
        self.engine, self.place = engine, place

    def planned(self, device: torch.device) -> tuple[Tensor, Records]:
        return self.engine.planned(self.place)

    def read(self, ids: Tensor) -> Records:
        return self.engine.read(self.place, ids)

    def write(self, ids: Tensor, rows: Records) -> None:
        self.engine.write(self.place, ids, rows)

    def trained(self) -> Tensor:
        return self.engine.trained(self.place)


class Adoption:
    """Implements `read_ahead.Sink`. The script's thread calls it."""

    def __init__(self, capacity: Capacity, store: Mapping[str, Any]) -> None:
        """`store`: that of trained rows, as in a job file."""
        self.capacity, self._store = capacity, store
        self.folder, self._lock = own_folder()
        self.num_starts = self.steps_replayed = self.num_demanded = 0
        self._pid = os.getpid()
        self._homes: list[Home] = []
        self._process: ScriptProcess | None = None
        self._rows: dict[str, EngineRows] = {}  # of the tables in the engine, by name
        self._device = torch.device("cpu")
        self._holds_all = False  # the engine gets tables that were never trained too, for a save
        self._coming: dict[int, Announced] = {}  # announced and not begun, by number
        self._steps: dict[int, int] = {}  # their steps in the engine
        self._newest_told = -1  # to other ranks, by number
        atexit.register(self.close)

    def home(self, name: str, weights: Tensor) -> Home:
        """`weights`: as `Home` takes them."""
        self._homes.append(Home(name, weights, self.folder, self.leave))
        return self._homes[-1]

    def forget(self, home: Home) -> None:
        self._homes.remove(home)
        self.steps_replayed += home.steps_replayed
        if not self._homes:
            self.close()

    # coming steps

    def announce(self, batch: Announced) -> None:
        self._coming[batch.number] = batch
        for ahead, coming in self._in_turn():
            if JOINED and coming.number > self._newest_told:
                self._newest_told = coming.number
                for ranks in JOINED if coming.trains else ():
                    ranks.tell(ahead, {table.name: rows for table, rows in coming.rows.items()})
        if not JOINED:
            self._announce_until(batch.number)

    def begin(self, number: int) -> None:
        """If it is interrupted, the step may still begin or be abandoned."""
        last = number + DEPTH + HORIZON if JOINED else max(self._coming)
        batch = self._coming[number]
        if self._process is not None and number not in self._steps and batch.trains and batch.rows:
            known = sum(coming.trains for coming in self._coming.values() if coming.number <= last)
            for ranks in JOINED:  # a loop over a loader begins
                ranks.await_lists(known - 1)
        self._announce_until(last)
        if self._process is not None:
            self._process.engine.begin(self._steps[number])
        # whether a batch without rows trains is not known yet
        for ranks in JOINED if batch.trains and (batch.rows or torch.is_grad_enabled()) else ():
            ranks.num_begun += 1
        self._forget(number)

    def abandon(self, number: int) -> None:
        if self._process is not None and number in self._steps:  # otherwise its announcement has failed
            self._process.engine.pass_over(self._steps[number])
        self._forget(number)

    def _forget(self, number: int) -> None:
        del self._coming[number]
        self._steps.pop(number, None)

    def _in_turn(self) -> Iterator[tuple[int, Announced]]:
        """The coming batches, each with how many that train begin before it."""
        batches = [*self._coming.values()]
        return zip(accumulate((coming.trains for coming in batches), initial=0), batches, strict=False)

    def _announce_until(self, last: int) -> None:
        """Tells the engine of the batches up to number `last`. On ranks the newest wait until the other ranks have
        sent theirs."""
        if self._process is None:
            return
        engine = self._process.engine
        engine.looks_up = looks_up()
        for ahead, batch in self._in_turn():
            if batch.number <= last and batch.number not in self._steps:
                named = self._rows_of(ahead, batch).items()
                rows = {self._rows[name].place: ids for name, ids in named if name in self._rows}
                self._steps[batch.number] = engine.announce(rows, trains=batch.trains)

    def _rows_of(self, ahead: int, batch: Announced) -> dict[str, I64]:
        """Returns the rows of a step by the table's name, with those that other ranks have sent."""
        rows = {table.name: ids for table, ids in batch.rows.items()}
        told: dict[str, list[I64]] = {}
        for name, theirs in (each for ranks in JOINED if batch.trains for each in ranks.told(ahead)):
            told.setdefault(name, []).append(theirs)
        for home in (each for each in self._homes if each.name in told):
            together = np.concatenate([rows.get(home.name, NO_ROWS.numpy()), *told[home.name]])
            rows[home.name] = distinct_rows(len(home.here.first.lasts), together)
        return rows

    # the engine

    @alone
    def look_up(self, device: torch.device) -> None:
        """Call it before each look-up. `device`: the table's."""
        if device != self._device:
            self.leave()
            self._device = device
        if self._process is None and (homes := [home for home in self._homes if home.is_trained or self._holds_all]):
            self._start(homes)

    def with_all(self) -> ScriptEngine:
        """Returns the engine, which holds all tables from now on."""
        self._holds_all = True
        if len(self._rows) < len(self._homes):
            self.leave()
        self.look_up(self._homes[0].device)
        assert self._process is not None, "it was started"
        return self._process.engine

    @property
    def homes(self) -> list[Home]:
        return [*self._homes]

    def _start(self, homes: list[Home]) -> None:
        self.num_starts += 1
        steps = [self._rows_of(*coming) for coming in islice(self._in_turn(), MEASURED_STEPS)]
        tables = tuple(table_of(home, steps) for home in homes)
        content = job_of(homes, room_bytes(homes, self.capacity, tables), self._store, self._device, self.folder)
        job, job_file = parse_job(content, JOB_FILE), self.folder / JOB_FILE
        job_file.write_bytes(msgspec.json.encode(content))
        setup = ScriptSetup(num_steps=len(steps), tables=tables)
        (self.folder / SETUP).write_bytes(msgspec.json.encode(setup))
        self._process = process = ScriptProcess(job, job_file, self._device)
        engine = process.engine
        for group in group_specs(job):
            base = 0
            for table in group.tables:
                home = homes[table.index]
                first = home.here.first
                num_rows, dim = first.weights.shape
                place = Place(home.name, table.index, group.index, base, num_rows, dim, tuple(first.states))
                self._rows[home.name] = EngineRows(engine, place)
                base += table.num_embeddings
        for home in homes:
            changed, home.rows = home.here, self._rows[home.name]
            for at in range(0, len(changed.ids), BLOCK_ROWS):
                part = slice(at, at + BLOCK_ROWS)
                home.rows.write(changed.ids[part], changed.rows.take(part))
            home.here.forget()

    def leave(self) -> None:
        """Moves all rows back to this process."""
        if self._process is not None:
            for home in self._homes:
                home.leave()
            self._end()

    def sentence(self) -> str:
        replayed = self.steps_replayed + sum(home.steps_replayed for home in self._homes)
        demanded = self.num_demanded + (0 if self._process is None else self._process.engine.num_demanded)
        return (
            f"{demanded:,} rows fetched on demand, {replayed:,} missed steps of rows replayed, "
            f"{plural(self.num_starts, 'start')} of the engine"
        )

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that adopted the tables."""
        return os.getpid() != self._pid

    def close(self) -> None:
        atexit.unregister(self.close)
        if not self.is_forked:
            self._end()
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()

    def _end(self) -> None:
        process, self._process = self._process, None
        self._rows.clear()
        self._steps.clear()
        if process is not None:
            self.num_demanded += process.engine.num_demanded
            process.close()


def table_of(home: Home, steps: Iterable[Mapping[str, I64]]) -> ScriptTable:
    """`steps`: the known ones' rows, by the table's name."""
    known = [rows[home.name] for rows in steps if home.name in rows]
    return ScriptTable(
        columns=home.columns(),
        largest_rows=max(map(len, known), default=1),
        distinct_rows=len(np.unique(np.concatenate(known))) if known else 1,
    )


def looks_up() -> str:
    ranks = "".join(f" of {each.rank.count} ranks together" for each in JOINED if each.tables)
    return f"a coming step{ranks} looks up"


def room_bytes(homes: list[Home], capacity: Capacity, tables: Sequence[ScriptTable]) -> int:
    """The bytes of a capacity. Raises ConfigError if a coming step has more rows."""
    record_bytes = [aligned(4 * home.here.first.width) for home in homes]
    room = capacity.most
    if capacity.counts_rows:
        sizes = [len(home.here.first.lasts) for home in homes]
        room = room * sum(map(operator.mul, sizes, record_bytes)) // sum(sizes)
    largest = [table.largest_rows for table in tables]
    needed = sum(map(operator.mul, largest, record_bytes))
    if needed > room:
        raise ConfigError(
            f"{looks_up()} {sum(largest):,} rows of {listed([home.name for home in homes])}, {needed:,} "
            f"bytes with what the optimizer keeps of them, and the capacity leaves {room:,} bytes; raise "
            "adopt(capacity=...), or make the batches smaller"
        )
    return room


def store_of(memory: str | int) -> dict[str, Any]:
    """Where trained rows are, as in a job file. `memory`: as in `adopt`. Raises ConfigError."""
    if memory == ALL:
        return {"kind": "memory"}
    rows_or_bytes("memory", memory)
    return {"kind": "tiered", "memory": memory}


def job_of(
    homes: list[Home], capacity: int, store: Mapping[str, Any], device: torch.device, folder: Path
) -> dict[str, Any]:
    """The job file of an engine: each table's records are rows of one width, and a row optimizer never runs."""
    tables = [
        {
            "name": f"table{index}",
            "features": [f"rows{index}"],
            "num_embeddings": len(home.here.first.lasts),
            "embedding_dim": home.here.first.width,
        }
        for index, home in enumerate(homes)
    ]
    return {
        "job": {"run_dir": str(folder)},
        "data": {"format": "synthetic"},  # never read: the script announces its rows
        "tables": tables,
        "model": {"kind": NO_MODEL},
        "optimizer": {"sparse": {"kind": "sgd", "lr": 0.0}, "dense": {"kind": "sgd", "lr": 0.0}},
        "cache": {"capacity": capacity},
        "store": store,
        "checkpoint": {"every": 0, "memory": 1},  # there are none
        "lookahead": {"depth": DEPTH, "horizon": HORIZON, "bundle": 1, "id_bytes": IDS_BYTES},
        "trainer": {"device": str(device)},
        "transport": dict.fromkeys(("connect_timeout", "silence_timeout", "stall_timeout"), MOST_STOPPED),
    }


def default_run_dir() -> Path:
    """runs/<the script's name>, in a notebook or an interactive session runs/notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    script = Path("notebook" if file is None else file).resolve()
    return Path("runs") / (script.parent.name if script.stem == "__main__" else script.stem)


def own_folder() -> tuple[Path, IO[str]]:
    """Returns a new folder for this process, and its lock: the kernel frees that of a process that was killed, whose
    folder the next one removes. Raises ConfigError."""
    run_dir = default_run_dir().resolve()  # the script may change its directory
    for left in run_dir.parent.glob(f"{run_dir.name}.*/{LOCK}"):
        with suppress(OSError), left.open() as other:
            if try_lock(other.fileno(), left):
                shutil.rmtree(left.parent, ignore_errors=True)
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f"new.{run_dir.name}.", dir=run_dir.parent))
    except OSError as error:
        raise ConfigError(
            f"{run_dir.parent} cannot be written ({error.strerror}), and the rows of adopted tables are kept there; "
            "start the script in another directory"
        ) from None
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, new, ignore_errors=True)
        lock = stack.enter_context((new / LOCK).open("w"))
        try_lock(lock.fileno(), new / LOCK)
        folder = new.rename(new.with_name(new.name.removeprefix("new.")))  # other ranks may look from here on
        stack.pop_all()
    return folder, lock
