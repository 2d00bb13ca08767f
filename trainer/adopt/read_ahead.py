"""Reads a script's batches ahead, as its own loader makes them, and announces the rows of their look-ups to the engine.

script                         AheadSource                               engine (Sink)
------                         ------                                    -------------
for batch in loader:  <------- batch k      reads k + 1 ... k + depth    announce(k + depth: rows of each table)
    model(batch)      -------> note(table, ids): compared with the hint  begin(k), at its first look-up
(leaves its loop)     -------> closed                                    abandon(k + 1), ...

With `ids=` the script's own function gives all rows of a batch, in place of a program (`GIVEN`).

The script sees the random state that it would have un-adopted: what reading ahead draws from a generator of this
process is put back until the batch is handed over. If the step draws from the same generator, batches read ahead are
wrong, and the run is refused before one of them is used.

A script may hold batches back, so its loop may be some batches ahead of its steps. A look-up belongs to the batch whose
hint has its ids, or from which they were computed; failing that to the batch of the previous look-up, or to the oldest
one without look-ups. A batch's first look-up ends the earlier batches of the same loop.
"""

import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import print_line
from rowcast.trainer.adopt.id_program import Leaves, Program, Recorder, TableKey, Unknown, leaves_of
from rowcast.trainer.adopt.random_states import LoopedLoader, States, generators_of, owned_by
from rowcast.trainer.adopt.records import distinct_rows

MOST_FORMS = 64  # of batches; a script with more gives nearly each batch a new form
MISTAKES = 3  # batches in succession of which a look-up was not foreseen: the program is recorded anew
RECORDINGS = 2  # of a form, until it stays on demand
MOST_TURNS = 16  # a batch is looked up before the script has asked for this many more, or never

Verdict = Literal["foreseen", "mistaken", "unknown"]
GiveIds = Callable[[Any], Mapping[TableKey, npt.NDArray[np.int64]]]  # of a batch its rows: distinct, ascending
LAZY = (zip, map, filter, enumerate, reversed, GeneratorType)  # batches that can be read once

NO_LEAVES = Leaves((), ())


@dataclass(frozen=True, kw_only=True)
class Announced:
    number: int  # counts the announced batches
    source: int  # each loop over a loader is one; batches have an order only within it
    rows: Mapping[TableKey, npt.NDArray[np.int64]]  # distinct, ascending, within the table
    trains: bool  # some look-up takes gradients; otherwise an evaluation


class Sink(Protocol):
    """Called from the thread that asks for batches, `begin` from the one that looks up."""

    def announce(self, batch: Announced) -> None: ...

    def begin(self, number: int) -> None:
        """The first look-up of an announced batch has come."""

    def abandon(self, number: int) -> None:
        """The announced batch has not been looked up and will not be."""


@dataclass
class Form:
    """What is known of the batches of one form."""

    program: Program | None = None
    recordings: int = 0
    mistakes: int = 0  # batches in succession

    @property
    def waits(self) -> bool:
        """Whether its next batch will show how to find the ids of others."""
        return self.program is None and self.recordings < RECORDINGS


GIVEN = Form(recordings=RECORDINGS)  # of batches whose rows the script gives


def no_ids(batch: Any) -> Mapping[TableKey, npt.NDArray[np.int64]]:
    """Gives no ids: the script has no function for them."""
    return {}


@dataclass(eq=False)
class BatchRead:
    """A batch between its reading and the end of its step."""

    batch: Any
    is_iterator: bool = False  # the script gets an iterator over `batch`
    error: Exception | None = None
    source: int = 0
    drew: States = field(default_factory=dict)  # generators that reading changed, after it
    leaves: Leaves = NO_LEAVES
    form: Form = field(default_factory=Form)
    number: int | None = None  # set while it is announced
    program: Program | None = None  # that gave the hints
    hints: dict[TableKey, list[Tensor | Unknown]] = field(default_factory=dict)  # those that no look-up has matched
    recorder: Recorder | None = None
    given: Mapping[TableKey, npt.NDArray[np.int64]] = field(default_factory=dict)
    is_left: bool = False  # the script has dropped its source
    turns: int = 0  # batches that the script has asked for since
    look_ups: int = 0
    wrong: str = ""  # the name of a table whose look-up the program has not given


@dataclass
class ReadAheadCounts:
    look_ups: Counter[Verdict] = field(default_factory=Counter)
    read_s: float = 0.0  # of the script's own loader
    programs: int = 0  # runs
    program_s: float = 0.0  # forms of batches and programs
    distinct_s: float = 0.0  # distinct rows of their ids

    def sentence(self) -> str:
        verdicts = ", ".join(f"{self.look_ups[verdict]:,} {verdict}" for verdict in ("foreseen", "mistaken", "unknown"))
        share = 100 * self.program_s / max(self.read_s, 1e-9)
        program, distinct = (1e3 * own_s / max(self.programs, 1) for own_s in (self.program_s, self.distinct_s))
        return (
            f"look-ups: {verdicts}; the id program takes {program:.2f} ms a batch, {share:.1f} % of the time of its "
            f"loader, and its distinct rows {distinct:.2f} ms"
        )


class ReadAhead:
    """Reads the loaders of one adoption ahead: between `open` and `close` every DataLoader, without being asked."""

    def __init__(self, depth: int, sink: Sink) -> None:
        """depth: batches that are read ahead of the script's."""
        self.depth, self.sink, self.counts = depth, sink, ReadAheadCounts()
        self.is_closed = False
        self.is_apart = False  # the script reads in a thread of its own, while steps may draw at any time
        self.readers: set[int] = set()  # threads that take a batch
        self.arrived: deque[tuple[AheadSource, BatchRead, int]] = deque()  # of another thread, and which
        self.thread = threading.get_ident()  # of the steps
        self.current: BatchRead | None = None  # of the last look-up, until the next batch is handed over
        self.departed: list[tuple[Iterable[BatchRead], Iterable[BatchRead]]] = []  # of sources that the script dropped
        self._open: list[BatchRead] = []  # batches that the script has, the newest last
        self._forms: dict[object, Form] = {}
        self._said: set[str] = set()
        self._sources: weakref.WeakSet[AheadSource] = weakref.WeakSet()
        self._recorders: list[Recorder] = []  # those that are entered
        self._num_pauses = self._num_announced = self._num_sources = 0
        self._plain_iter: Callable[[Any], Any] = DataLoader.__iter__
        self._plain_tolist: Callable[[Any], Any] = Tensor.tolist
        self._process = os.getpid()

    def open(self) -> None:
        plain = self._plain_iter = DataLoader.__iter__

        def read_ahead(loader: DataLoader[Any]) -> Iterator[Any]:
            with self.paused():  # workers that are forked here do not record
                batches: Iterator[Any] = self.source(plain(loader), no_ids, owned_by(loader))
                return batches

        DataLoader.__iter__ = read_ahead  # type: ignore[method-assign, assignment]

        def tolist(tensor: Tensor) -> Any:  # is no operation, so no recorder sees it
            numbers: Any = self._plain_tolist(tensor)
            if self._recorders and tensor.dim() == 1 and threading.get_ident() == self.thread:
                for recorder in self._recorders:
                    recorder.note_list(tensor, numbers)
            return numbers

        Tensor.tolist = tolist  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """Stops reading ahead. Batches that were read ahead still come, but are no longer announced to the engine."""
        self.shut()
        with self.paused():
            for source in self._sources:
                source.leave()
            self.settle_departed()
            for read in [*self._open]:
                self.settle(read)

    def shut(self) -> None:
        """Called when the engine is gone, from any thread at any time."""
        DataLoader.__iter__ = self._plain_iter  # type: ignore[method-assign]
        Tensor.tolist = self._plain_tolist  # type: ignore[method-assign, assignment]
        self.is_closed = True

    def ahead(self, batches: Iterable[Any], give_ids: GiveIds = no_ids) -> Iterable[Any]:
        """The same batches, read ahead. Of an iterator: an iterator; else each loop over it is read ahead."""

        def begin(loader: Any) -> Any:
            with self.paused():
                return self.source(iter(loader), give_ids, owned_by(loader))

        is_iterator = isinstance(batches, Iterator)
        read: Iterable[Any] = self.source(batches, give_ids) if is_iterator else LoopedLoader(batches, begin)
        return read

    def ahead_calls(self, function: Callable[[], Any], give_ids: GiveIds = no_ids) -> Callable[[], Any]:
        """Returns the same function, called ahead, for a script that calls it for each batch. An exception ends
        nothing."""
        source: Callable[[], Any] = getattr(self.source(function, give_ids), "__next__", function)
        return source

    def source(self, batches: Any, give_ids: GiveIds, generators: Sequence[torch.Generator] = ()) -> Any:
        """`batches`: an iterator, or a function that makes a batch; `generators`: that it owns and draws from."""
        is_within = threading.get_ident() in self.readers
        if isinstance(batches, AheadSource) and give_ids is not no_ids:
            batches.give_ids = give_ids  # of a DataLoader
        if isinstance(batches, AheadSource) or is_within or self.is_closed or os.getpid() != self._process:
            return batches  # a worker's loader, or one within a loader
        self._num_sources += 1
        kind = SizedAheadSource if hasattr(type(batches), "__len__") else AheadSource
        source = kind(self, self._num_sources, batches, give_ids, generators)
        self._sources.add(source)
        return source

    def note(self, table: TableKey, ids: Tensor) -> Verdict:
        """Call at each look-up of an adopted table, with its ids as the step has them, before its rows are needed."""
        verdict: Verdict = "unknown"
        if not self._recorders:
            self.thread = threading.get_ident()
        with self.paused():
            self.settle_departed()
            if self._open:
                read, verdict = self._compare(table, ids)
                self._meet(read, table, ids)
        self.counts.look_ups[verdict] += 1
        return verdict

    def _meet(self, read: BatchRead, table: TableKey, ids: Tensor) -> None:
        if not read.look_ups:
            earlier = self._open[: self._open.index(read)]
            for ended in [batch for batch in earlier if batch.source == read.source]:
                self.settle(ended)
            if read.number is not None:
                self.sink.begin(read.number)
        self.current = read
        if read.recorder is not None:
            read.recorder.note(table, ids)
        read.look_ups += 1

    def _compare(self, table: TableKey, ids: Tensor) -> tuple[BatchRead, Verdict]:
        """Returns the batch that the look-up belongs to."""
        newest, host = self._open[-1].source, ids.detach().cpu()
        likely = sorted(
            self._open, key=lambda batch: (batch is not self.current, batch.look_ups > 0, batch.source != newest)
        )
        made = [batch for batch in likely if batch.recorder is not None and batch.recorder.has_made(ids)]
        may_be = [batch for batch in likely if batch.program is None or batch.hints.get(table)]
        read = [*made, *may_be, *likely][0]
        for batch in likely:
            if table in batch.given and np.isin(host.numpy(), batch.given[table]).all():
                return batch, "foreseen"
            if batch.source == read.source and read.program is None:
                continue  # ids that many batches share would match the wrong batch's hints
            for at, hint in enumerate(batch.hints.get(table, ())):
                if isinstance(hint, Tensor) and hint.dtype == host.dtype and torch.equal(hint, host):
                    del batch.hints[table][at]
                    return batch, "foreseen"
        left = read.hints.get(table)
        expected = left.pop(0) if left else None
        if read.form is GIVEN:
            why = f"{table.name}: rowcast.ahead(..., ids=...) does not give all ids that a step looks up"
            self._say(f"{why}; rows of others are fetched when the step asks for them")
        elif not isinstance(expected, Unknown):
            read.wrong = table.name
        return read, "mistaken" if isinstance(expected, Tensor) or table in read.given else "unknown"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does not record operations within: they are not the step's. Nor are those of another thread."""
        if threading.get_ident() != self.thread:
            yield
            return
        self._num_pauses += 1
        while self._recorders:
            self._recorders.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self._num_pauses -= 1
            if not self._num_pauses:
                self._recorders = [batch.recorder for batch in self._open if batch.recorder is not None]
                for recorder in self._recorders:
                    recorder.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Does not read loaders within ahead."""
        self.readers.add(threading.get_ident())
        yield
        self.readers.discard(threading.get_ident())

    def read(self, take: Callable[[], Any], give_ids: GiveIds) -> BatchRead:
        """Reads a batch. An exception, also of `give_ids`, waits for the batch at which the script would get it."""
        begin_s = time.perf_counter()
        self.readers.add(threading.get_ident())
        try:
            batch = take()
            is_iterator = isinstance(batch, LAZY)
            read = BatchRead(tuple(batch) if is_iterator else batch, is_iterator)
            if give_ids is not no_ids:
                read.form, read.given = GIVEN, give_ids(iter(read.batch) if is_iterator else batch)
        except StopIteration as error:
            return BatchRead(None, error=error.with_traceback(None))  # its frames hold the script's model
        except Exception as error:  # noqa: BLE001 - it is the script's
            return BatchRead(None, error=error)
        finally:
            self.readers.discard(threading.get_ident())
            read_s = time.perf_counter()
            self.counts.read_s += read_s - begin_s
        if read.form is not GIVEN:
            read.leaves = leaves_of(read.batch)
            read.form = self._form_of(read.leaves)
        self.counts.program_s += time.perf_counter() - read_s
        return read

    def _form_of(self, leaves: Leaves) -> Form:
        if leaves.form in self._forms or len(self._forms) < MOST_FORMS:
            return self._forms.setdefault(leaves.form, Form())
        self._say(
            f"batches have more than {MOST_FORMS} forms: the rows of others are fetched when a step asks for them"
        )
        return Form(recordings=RECORDINGS)

    def announce(self, read: BatchRead) -> None:
        begin_s = time.perf_counter()
        program = read.program = read.form.program
        ids_of: dict[TableKey, list[Tensor]] = {}
        for table, ids in program.run(read.leaves) if program is not None else ():
            read.hints.setdefault(table, []).append(ids)
            if isinstance(ids, Tensor):
                ids_of.setdefault(table, []).append(ids.reshape(-1))
        if program is not None:
            self.counts.programs += 1
            read.wrong = next(iter(read.hints)).name if any(program.is_known) and not ids_of else ""
        known_s = time.perf_counter()
        rows = {table: distinct_rows(table.num_embeddings, torch.cat(ids).numpy()) for table, ids in ids_of.items()}
        self.counts.program_s += known_s - begin_s
        self.counts.distinct_s += time.perf_counter() - known_s
        read.number, self._num_announced = self._num_announced, self._num_announced + 1
        trains = program is None or program.trains
        self.sink.announce(Announced(number=read.number, source=read.source, rows=rows or read.given, trains=trains))

    def hand_over(self, read: BatchRead, *, records: bool) -> None:
        """Hands the batch to the script."""
        for left in [batch for batch in self._open if batch.is_left]:
            self.settle(left)
        if read.form.waits and records:
            read.recorder = Recorder(read.leaves)
        read.leaves = NO_LEAVES
        self._open.append(read)

    def settle(self, read: BatchRead) -> None:
        """Called when the step of a batch is over, or a later batch has its step."""
        if read not in self._open:
            return
        self._open.remove(read)
        form, program = read.form, read.form.program
        if read.recorder is not None and form.waits:
            if read.look_ups or read.turns == MOST_TURNS:  # otherwise the script had a look at one batch, and left
                form.recordings += min(read.look_ups, 1)
                is_alone = not any(batch.look_ups or batch.source != read.source for batch in self._open)
                form.program = Program(read.recorder, is_alone=is_alone)
                self._say_program(form.program)
        elif program is not None and read.look_ups and not program.look_ups:
            form.program = None
        elif program is not None and read.look_ups and read.program is program:
            # an unmatched hint is wrong too, such as one of an evaluation within the first step
            left = (key.name for key, hints in read.hints.items() if any(isinstance(ids, Tensor) for ids in hints))
            wrong = read.wrong or next(left, "")
            form.mistakes = form.mistakes + 1 if wrong else 0
            if form.mistakes == MISTAKES:
                form.program, form.mistakes = None, 0
                if not form.waits:
                    self._say(
                        f"{wrong}: steps look up other ids than the id program gives, which was recorded twice; rows "
                        "of such batches are fetched when a step asks for them. If Python or NumPy computes the ids, "
                        "give them by rowcast.ahead(batches, ids=...)"
                    )
        self.drop(read)

    def drop(self, read: BatchRead) -> None:
        if read.number is not None and not read.look_ups:
            self.sink.abandon(read.number)
        read.number = None

    def settle_departed(self) -> None:
        """Ends the batches of sources that the script dropped. Not while they are collected: that is at any time."""
        while self.arrived:
            source, read, thread = self.arrived.popleft()
            self.is_apart |= thread != threading.get_ident()
            source.accept(read)
        while self.departed:
            queue, given = self.departed.pop(0)
            for read in given:
                read.is_left = True  # the script may hold it back
                if read.look_ups:
                    self.settle(read)
            for read in queue:
                self.drop(read)

    def _say_program(self, program: Program) -> None:
        if program.look_ups:
            self._say(
                f"id program of {program.num_operations} operations and {program.num_constants} constants for "
                f"{sum(program.is_known)} of {len(program.look_ups)} look-ups of a step"
            )
        for look_up in program.look_ups:
            if isinstance(look_up.ids, Unknown):
                reason = f"{look_up.table.name}: its ids depend on {look_up.ids.because}"
                self._say(f"{reason}; its rows are fetched when the step asks for them")

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            print_line(sentence)


class AheadSource(Iterator[Any]):
    """The script's iterator over the batches of a loader."""

    def __init__(
        self, reading: ReadAhead, number: int, batches: Any, give_ids: GiveIds, generators: Sequence[torch.Generator]
    ) -> None:
        self._reading, self._number, self._batches, self.give_ids = reading, number, batches, give_ids
        self._take = batches.__next__ if isinstance(batches, Iterator) else batches
        self._generators = dict(generators_of(generators))
        self._queue: deque[BatchRead] = deque()
        self._given: list[BatchRead] = []
        self._left: States = {}  # at the end of the last call
        weakref.finalize(self, reading.departed.append, (self._queue, self._given)).atexit = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __next__(self) -> Any:
        reading = self._reading
        here = threading.get_ident()
        if here in reading.readers and not self._queue:
            return self._take()  # within a source that is read ahead itself
        if (here != reading.thread or reading.is_apart) and not self._queue:
            read = reading.read(self._take, self.give_ids)  # what this draws stays: the steps may draw now
            if read.error is not None:
                raise read.error
            reading.arrived.append((self, read, here))
            return iter(read.batch) if read.is_iterator else read.batch
        with reading.paused():
            reading.settle_departed()
            self._end_turn(is_over=True)
            states = self._states()
            self._refuse_shared(states)
            self._read(states)
            read = self._queue.popleft()
            self._set_states(read.drew)
            self._left = states | read.drew
            error, read.error = read.error, None  # otherwise its frames would refer to it, and keep the source
            if error is not None:
                try:
                    raise error
                finally:
                    del error
            if not reading.is_closed:
                reading.hand_over(read, records=True)
                reading.current = None
                self._given.append(read)
            batch, read.batch = read.batch, None  # it may be open for long
            return iter(batch) if read.is_iterator else batch

    def close(self) -> None:
        """Ends the batches, as of a generator."""
        self.leave()
        self._queue.clear()
        self._reading.settle_departed()
        if hasattr(self._batches, "close"):
            self._batches.close()

    def leave(self) -> None:
        """Ends these batches for the engine: the script will not look them up any more."""
        self._reading.departed.append(([*self._queue], [*self._given]))
        self._given.clear()

    def accept(self, read: BatchRead) -> None:
        """A batch that another thread has read. It is recorded if another one has its step first."""
        self._end_turn(is_over=False)
        if not self._reading.is_closed:
            read.source = self._number
            self._reading.announce(read)
            self._reading.hand_over(read, records=any(not batch.look_ups for batch in self._given))
            self._given.append(read)

    def _end_turn(self, *, is_over: bool) -> None:
        for read in [*self._given]:
            read.turns += 1
            if (read.look_ups and is_over) or read.turns == MOST_TURNS:
                self._given.remove(read)
                self._reading.settle(read)

    def _give_ids(self, batch: Any) -> Mapping[TableKey, npt.NDArray[np.int64]]:
        """What the script's function draws is put back."""
        states = self._states()
        try:
            return self.give_ids(batch)
        finally:
            self._set_states(states)

    def _states(self) -> States:
        return {name: state() for name, (state, _) in self._generators.items()}

    def _set_states(self, states: States) -> None:
        for name, state in states.items():
            self._generators[name][1](state)

    def _refuse_shared(self, states: States) -> None:
        for name in {name for read in self._queue for name in read.drew} & self._left.keys():
            if not is_same(states[name], self._left[name]):
                raise ConfigError(
                    f"the loader and the training step both draw from {name} in this process, so batches read ahead "
                    "would have other numbers than un-adopted; give the loader num_workers=1 or a generator of its own"
                )

    def _read(self, states: States) -> None:
        """Reads batches as if the queued ones had been handed over, and puts the random state back."""
        ahead = {name: state for read in self._queue for name, state in read.drew.items()}
        self._set_states(ahead)
        try:
            while len(self._queue) < self._wanted():
                read = self._reading.read(self._take, self._give_ids if self.give_ids is not no_ids else no_ids)
                read.source = self._number
                before = states | ahead
                read.drew = {name: state for name, state in self._states().items() if not is_same(state, before[name])}
                ahead |= read.drew
                self._queue.append(read)
                self._announce()  # so that it travels to other ranks while this one reads the next
        except BaseException:
            ahead = states  # an interrupt: how much was drawn is unknown
            raise
        finally:
            self._set_states({name: states[name] for name in ahead})
        self._announce()

    def _wanted(self) -> int:
        """Returns how many batches the queue should hold, including the one that the script gets now."""
        if not self._queue:
            return 1
        form = self._queue[0].form
        if self._queue[-1].error is not None:
            return 0
        looks_up_nothing = form.program is not None and not form.program.look_ups
        return 1 if form.waits or looks_up_nothing or self._reading.is_closed else 1 + self._reading.depth

    def _announce(self) -> None:
        """Tells the engine of the queued batches in their order, up to one whose program is still to be recorded."""
        for read in () if self._reading.is_closed else self._queue:
            if read.error is not None or (read.form.waits and read is not self._queue[0]):
                return
            if read.number is None and (read.form.program is None or read.form.program.look_ups):
                self._reading.announce(read)


class SizedAheadSource(AheadSource):
    def __len__(self) -> int:
        return len(self._batches)


def is_same(state: Any, other: Any) -> bool:
    if isinstance(state, dict):
        return isinstance(other, dict) and all(is_same(value, other.get(name)) for name, value in state.items())
    if isinstance(state, np.ndarray | Tensor):
        return isinstance(other, type(state)) and bool(np.array_equal(state, other))
    return bool(state == other)
