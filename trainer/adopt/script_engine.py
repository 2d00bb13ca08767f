"""The engine of an adopted script: a prefetcher that holds the rows, and slots on the device.

    announce   the rows of a coming step: they will be in slots when it begins
    begin      the next announced step: waits for its rows
    read       rows wherever they are: in slots, or asked from the prefetcher
    write      trained rows: those of the step that has begun to their slots, where the planner expects them; others to
               the prefetcher too

The planner knows of announced steps only. Rows written outside them travel between the victims that leave before
and after (`Sender.send_parcel`), so a later read finds such a row at home. A row that the prefetcher read earlier
may still be on its way to a slot: it gets the written values once it is there (`Late`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec
from rowcast.protocol.messages import Answer, Ask, Ids, PlanReady, Returned, Save
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled_loop
from rowcast.runtime.errors import ConfigError, RowcastError, listed
from rowcast.trainer.adopt.records import EMPTY, MULTIPLIER, Place, Records, RowSet, taken
from rowcast.trainer.device.streams import Move
from rowcast.trainer.step.cache import ArrivedPlan, Step
from rowcast.trainer.step.engine import TrainerEngine

PARCEL_BYTES = 2**20  # of rows in a message
MOST_LEAVING = 16  # messages with rows that may not be home; a write waits beyond this many


@dataclass(frozen=True)
class Late:
    """Rows that were written while steps that fetch them may be on their way."""

    number: int  # of the message that takes them home
    group: int
    rows: I64  # numbers in the group, ascending
    records: Tensor  # f32 [n, record_floats]


@dataclass(frozen=True, eq=False)
class Planned:
    """A table's rows in the step that has begun."""

    ids: Tensor  # i64 [n] ascending
    rows: Records  # copies
    slots: Tensor  # i64 [n]


@dataclass
class ComingStep:
    number: int
    places: list[Place]  # of the tables that have rows
    rows: list[I64]  # of each group, by number, ascending
    trains: bool
    is_wanted: bool = True  # False if it is passed over
    slots: list[I64] = field(default_factory=list)  # of each group, once they are known
    late: list[Late] = field(default_factory=list)

    def note(self, late: Late) -> None:
        if places_in(self.rows[late.group], late.rows)[1].any():
            self.late.append(late)


class ScriptEngine:
    """The script's thread calls it."""

    def __init__(
        self,
        engine: TrainerEngine,
        device: torch.device,
        horizon: int,
        drive: Callable[[Callable[[], bool]], None],
        wake_sender: Callable[[], None],
    ) -> None:
        """`horizon`: the steps that the planner knows beyond the one that it plans. `drive`: advances the engine until
        its argument returns True. Raises RowcastError."""
        self.groups = engine.slots.groups
        self._engine, self._device, self._horizon = engine, device, horizon
        self._drive, self._wake_sender = drive, wake_sender
        self._residency = [Residency(len(records)) for records in engine.slots.records]
        self._steps: deque[ComingStep] = deque()  # announced and not done; the first may have begun
        self._ready: deque[Step] = deque()  # their rows are in slots
        self._current: Step | None = None
        self._planned: dict[int, Planned] = {}  # of the current step, by table, once one of them was asked for
        self._asked = set[int]()  # tables whose planned rows the script has
        self._written: list[Move] = []  # of planned rows, to their slots
        self._fields: dict[int, Records] = {}  # of each table: views of the slots
        self._num_announced = self._num_asked = self._num_returned = 0
        self.num_demanded = 0  # rows that were asked for
        self.looks_up = "a coming step looks up"
        self._leaving: list[Late] = []  # not known to be home
        self._answers: dict[int, bytes] = {}  # by number of their Ask; the mail's thread adds them
        engine.cache.on_filled = self._filled
        engine.conversation.listen({Answer: self._accept})

    def advance(self) -> bool:
        """Does what can be done now; returns whether it did anything."""
        moved = self._engine.loop.advance()
        while (step := self._engine.loop.take()) is not None:
            self._ready.append(step)
        return moved

    # announced steps

    def announce(self, rows: Mapping[Place, I64], *, trains: bool) -> int:
        """Returns the step's number. `rows`: of each table, distinct, ascending. Raises ConfigError if there are more
        than slots."""
        self._drive(lambda: True)  # raises what has ended the engine
        by_index = {place.index: (place, ids) for place, ids in rows.items()}
        of_groups: list[I64] = []
        for group, residency in zip(self.groups, self._residency, strict=True):
            placed = [by_index[table.index] for table in group.tables if table.index in by_index]
            of_groups.append(np.concatenate([NO_ROWS, *(place.base + numbers for place, numbers in placed)]))
            if len(of_groups[-1]) > len(residency.row_in):
                names = listed([place.name for place, _ in placed])
                raise ConfigError(
                    f"{self.looks_up} {len(of_groups[-1]):,} rows of {names}, and the capacity has room for "
                    f"{len(residency.row_in):,} of them; raise adopt(capacity=...), or make the batches smaller"
                )
        self._steps.append(step := ComingStep(self._num_announced, [*rows], of_groups, trains))
        for late in self._leaving:  # the prefetcher may read the step's rows before these are home
            step.note(late)
        tables = range(sum(len(group.tables) for group in self.groups))
        counts = tuple(len(by_index[index][1]) if index in by_index else 0 for index in tables)
        content = b"".join(by_index[index][1].tobytes() for index in tables if index in by_index)
        for at in range(0, max(1, len(content)), PARCEL_BYTES):
            message = Ids(step=self._num_announced, trains=trains, counts=counts, rows=content[at : at + PARCEL_BYTES])
            self._engine.conversation.send(message)
        self._num_announced += 1
        return self._num_announced - 1

    def pass_over(self, number: int) -> None:
        """Called for a step that the script will not look up in its turn: its rows are then read as they are needed."""
        for step in self._steps:
            step.is_wanted &= step.number != number

    def begin(self, number: int) -> None:
        """Waits until the step's rows are in their slots. The step is passed over if earlier steps are still wanted."""
        self.finish()
        first_wanted = next((step.number for step in self._steps if step.is_wanted), None)
        if first_wanted != number:
            self.pass_over(number)
            return
        while self._num_announced <= number + self._horizon + 1:  # the planner waits for the whole horizon
            self.pass_over(self.announce({}, trains=False))
        while True:
            self._drive(lambda: bool(self._ready))
            step = self._ready.popleft()
            if step.step == number:
                break
            self._engine.loop.pass_over(step)
            self._steps.popleft()
        self._engine.loop.begin(step)
        self._current = step
        if self._steps[0].trains:
            for slots, residency in zip(self._steps[0].slots or self._slots_of(step), self._residency, strict=True):
                residency.is_trained[slots] = True

    def planned(self, place: Place) -> tuple[Tensor, Records]:
        """The rows of the table in the step that has begun, i64 [n] ascending. Once; later there are none."""
        if self._current is not None and place.index not in self._asked:
            if not self._planned:
                self._gather(self._steps[0].places)
            self._asked.add(place.index)
            if place.index in self._planned:
                planned = self._planned[place.index]
                return planned.ids, planned.rows
        none = self._index(NO_ROWS)
        return none, taken(self._fields_of(place), none)

    def _gather(self, places: Sequence[Place]) -> None:
        """Copies the planned rows of these tables in one call, which costs more than one table's rows."""
        assert self._current is not None, "a step has begun"
        moves = list[Move]()
        slots = [self._current.arrays[f"{group}.unique_slots"] for group in range(len(self.groups))]
        long_slots = [group_slots.long() for group_slots in slots]
        for place in places:
            rows, fields = self._steps[0].rows[place.group], self._fields_of(place)
            first, end = np.searchsorted(rows, (place.base, place.base + place.num_rows)).tolist()
            out = fields.each(lambda field, size=end - first: field.new_empty((size, *field.shape[1:])))  # type: ignore[misc]
            moves += moves_of(fields, slots[place.group], first, out)
            ids, place_slots = self._index(rows[first:end] - place.base), long_slots[place.group][first:end]
            self._planned[place.index] = Planned(ids, out, place_slots)
        with self._between_fills():
            self._engine.slots.streams.compute.gather(moves)
        for place in places:
            copies = self._planned[place.index].rows
            copies.lasts = copies.lasts.long()

    def _put_back(self) -> None:
        """Copies planned rows that were written to their slots."""
        moves, self._written = self._written, []
        if moves:
            with self._between_fills():
                self._engine.slots.streams.compute.scatter(moves)

    def _fields_of(self, place: Place) -> Records:
        if place.index not in self._fields:
            self._fields[place.index] = place.fields(self._engine.slots.records[place.group])
        return self._fields[place.index]

    def finish(self) -> None:
        """Ends the step that has begun, so that its rows may leave."""
        if self._current is not None:
            self._put_back()
            self._engine.loop.finish(self._current, None)
            self._current = None
            self._steps.popleft()
            self._planned.clear()
            self._asked.clear()

    # saves

    def begin_save(self) -> None:
        """From here on written rows belong to the save, until `save`. Call it between steps."""
        self.finish()
        self._engine.sender.send_parcel(Save(number=self._num_asked, request=b""))

    def save(self, request: bytes) -> None:
        """Waits until the checkpoint is durable. `request`: `SaveRequest` as JSON. Raises RowcastError if it cannot be
        written; the engine stays usable."""
        if failure := self._answers_to([Save(number=self._num_asked, request=request)]):
            raise RowcastError(f"save: {failure.decode()}")

    def _filled(self, plan: ArrivedPlan, message: PlanReady) -> None:
        [step] = plan.steps
        self._leaving = [late for late in self._leaving if late.number > message.returned]
        coming_step = next(coming for coming in self._steps if coming.number == step.step)
        if message.rows and not coming_step.slots:
            coming_step.slots = self._slots_of(step)
            for slots, rows, residency in zip(coming_step.slots, coming_step.rows, self._residency, strict=True):
                residency.coming[slots] = rows
        for span in message.rows:
            slots = self._host(step.arrays[f"{span.group}.fill_slots"])[span.start : span.start + span.count]
            rows = self._residency[span.group].fill(slots)
            for late in coming_step.late:
                if late.group == span.group and late.number > message.returned:
                    at, is_late = places_in(late.rows, rows)
                    self._scatter(span.group, slots[is_late], late.records[self._index(at[is_late])])

    # rows

    def read(self, place: Place, wanted: Tensor) -> Records:
        """Returns copies, in the order of `wanted`, which are distinct and ascending."""
        ids: I64 = wanted.cpu().numpy()
        slots = self._residency[place.group].slots(place.base + ids)
        is_here = slots >= 0
        with self._between_fills():
            here = torch.index_select(self._engine.slots.records[place.group], 0, self._index(slots[is_here]))
        if is_here.all():
            return place.unpacked(here)
        asked = torch.frombuffer(self._answer(place, ids[~is_here]), dtype=torch.float32)
        asked = asked.view(-1, here.shape[1]).to(self._device)
        order = np.argsort(np.concatenate([np.flatnonzero(is_here), np.flatnonzero(~is_here)]))
        return place.unpacked(torch.cat([here, asked])[self._index(order)])

    def trained(self, place: Place) -> Tensor:
        """Returns the numbers of the trained rows, i64 [n] ascending: those returned to the prefetcher, and those in
        slots. A few of these were announced and not trained."""
        residency = self._residency[place.group]
        held = residency.row_in[residency.is_trained] - place.base
        parts = [held[(held >= 0) & (held < place.num_rows)]]
        last = NO_ROWS
        while True:
            ask = Ask(number=self._num_asked, table=place.index, rows=last.tobytes(), wants="trained rows")
            listed_rows = np.frombuffer(self._answers_to([ask]), np.int64)
            if not len(listed_rows):
                return torch.from_numpy(np.unique(np.concatenate(parts)))
            parts.append(listed_rows)
            last = listed_rows[-1:]

    def write(self, place: Place, ids: Tensor, rows: Records) -> None:
        """`ids`: distinct, ascending."""
        planned = self._planned.get(place.index)
        if planned is not None and ids is planned.ids and self._steps[0].trains:
            as_kept = replace(rows, lasts=rows.lasts.to(torch.int32))
            self._written += moves_of(self._fields_of(place), planned.slots, 0, as_kept)
        else:
            records = place.packed(rows, self.groups[place.group].record_floats).to(self._device)
            host, size = ids.cpu().numpy(), MOST_LEAVING * self._at_once(self.groups[place.group])
            for at in range(0, len(ids), size):
                self._write(place, host[at : at + size], records[at : at + size])

    def _write(self, place: Place, ids: I64, records: Tensor) -> None:
        numbers = place.base + ids
        slots = self._residency[place.group].slots(numbers)
        is_here, is_planned = slots >= 0, np.zeros(len(ids), np.bool_)
        self._scatter(place.group, slots[is_here], records[torch.from_numpy(is_here)])
        if place.index in self._planned and place.index not in self._asked:
            self._gather([place])
        if self._current is not None and self._steps[0].trains:
            _, is_planned = places_in(self._steps[0].rows[place.group], numbers)
        if not is_planned.all():
            self._return(place, ids[~is_planned], records[torch.from_numpy(~is_planned)])

    def _answer(self, place: Place, ids: I64) -> bytearray:
        """Returns the rows' records. By then all rows returned earlier are home."""
        self.num_demanded += len(ids)
        size = self._at_once(self.groups[place.group])
        parts = np.split(ids, range(size, len(ids), size))
        asks = [
            Ask(number=number, table=place.index, rows=part.tobytes())
            for number, part in enumerate(parts, self._num_asked)
        ]
        return self._answers_to(asks)

    def _answers_to(self, asks: Sequence[Ask | Save]) -> bytearray:
        """`asks`: with the next numbers."""
        for ask in asks:
            self._engine.sender.send_parcel(ask)
        self._num_asked += len(asks)
        self._wake_sender()
        self._drive(lambda: all(ask.number in self._answers for ask in asks))
        self._leaving.clear()
        return bytearray().join(self._answers.pop(ask.number) for ask in asks)

    def _accept(self, message: Answer) -> None:
        self._answers[message.number] = message.records

    def _return(self, place: Place, ids: I64, records: Tensor) -> None:
        size = self._at_once(self.groups[place.group])
        for at in range(0, len(ids), size):
            self._num_returned += 1
            part, rows = records[at : at + size], ids[at : at + size]
            content = part.cpu().numpy().tobytes()
            message = Returned(number=self._num_returned, table=place.index, rows=rows.tobytes(), records=content)
            self._engine.sender.send_parcel(message)
            late = Late(self._num_returned, place.group, place.base + rows, part)
            self._leaving.append(late)
            for step in self._steps:
                if self._current is None or step.number != self._current.step:
                    step.note(late)
        self._wake_sender()
        if len(self._leaving) > MOST_LEAVING:
            self._answer(place, NO_ROWS)

    def _at_once(self, group: GroupSpec) -> int:
        return max(1, PARCEL_BYTES // group.record_bytes)

    def _scatter(self, group: int, slots: I64, records: Tensor) -> None:
        with self._between_fills():
            self._engine.slots.records[group].index_copy_(0, self._index(slots), records)

    def _slots_of(self, step: Step) -> list[I64]:
        """Returns the slots of each group, in the order of the step's rows."""
        return [self._host(step.arrays[f"{group}.unique_slots"]) for group in range(len(self.groups))]

    def _host(self, slots: Tensor) -> I64:
        """`slots`: of a plan. Waits only for the copy of the plan, not for the script's work."""
        copies: list[I64] = []
        self._engine.slots.streams.copy_in.run(lambda: copies.append(slots.cpu().numpy().astype(np.int64)))
        return copies[0]

    def _index(self, host: I64) -> Tensor:
        return torch.from_numpy(host).to(self._device)

    @contextmanager
    def _between_fills(self) -> Iterator[None]:
        """Orders work on slots after the issued fills and before later ones."""
        self._put_back()
        streams = self._engine.slots.streams
        streams.compute.wait(streams.fill.record(), "filled")
        yield
        streams.fill.wait(streams.compute.record(), "used")


def moves_of(fields: Records, slots: Tensor, first: int, rows: Records) -> Iterator[Move]:
    """`slots`: those from `first` on are of `rows`, whose `lasts` are i32."""
    pairs = [(fields.weights, rows.weights), (fields.lasts[:, None], rows.lasts)]
    for record, beside in [*pairs, *((state, rows.states[name]) for name, state in fields.states.items())]:
        yield Move(record, slots, first, len(beside), beside.reshape(-1), 0)


NO_ROWS: I64 = np.empty(0, np.int64)


def places_in(rows: I64, wanted: I64) -> tuple[I64, npt.NDArray[np.bool_]]:
    """Returns the position of each of `wanted` in `rows`, which ascend, and whether it is there."""
    if not len(rows):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.bool_)
    at = np.minimum(np.searchsorted(rows, wanted), len(rows) - 1)
    return at, rows[at] == wanted


# which rows of a group are in which slots


class Residency:
    """A hash whose memory follows the slots, not the rows of the tables.

    A cell holds a slot, and the slot's row is its key. So a row that leaves its slot needs no removal: its cell no
    longer fits it. Once half of the cells are taken, all are emptied and those of today's rows are filled again."""

    def __init__(self, num_slots: int) -> None:
        bits = (4 * num_slots).bit_length()
        self._shift, self._num_taken = np.uint64(64 - bits), 0
        self._cells: I32 = np.full(2**bits, EMPTY, np.int32)
        self.row_in: I64 = np.full(num_slots, -1, np.int64)
        self.is_trained = np.zeros(num_slots, np.bool_)  # the row in each slot, since it came
        self.coming: I64 = np.full(num_slots, -1, np.int64)  # the newest step's row in each slot

    def slots(self, rows: I64) -> I64:
        """Returns -1 for rows in none."""
        slots = np.empty(len(rows), np.int64)
        find_slots(self._cells, self._shift, self.row_in, rows, slots)
        return slots

    def fill(self, slots: I64) -> I64:
        """Notes that arriving rows are in these slots now, and returns the rows."""
        rows = self.coming[slots]
        self.row_in[slots], self.is_trained[slots] = rows, False
        if 2 * (self._num_taken + len(slots)) > len(self._cells):
            self._cells[:], self._num_taken = EMPTY, 0
            slots = np.flatnonzero(self.row_in >= 0)
        self._num_taken += add_slots(self._cells, self._shift, self.row_in, slots)
        return rows


def try_slots() -> None:
    """Compiles all loops."""
    RowSet().add(np.zeros(1, np.int64))
    residency = Residency(num_slots=1)
    residency.coming[0] = 3
    residency.slots(residency.fill(np.zeros(1, np.int64)))


@compiled_loop
def find_slots(cells: I32, shift: np.uint64, row_in: I64, rows: I64, slots: I64) -> None:
    for i in range(len(rows)):
        cell = np.int64((np.uint64(rows[i]) * MULTIPLIER) >> shift)
        while cells[cell] != EMPTY and row_in[cells[cell]] != rows[i]:
            cell = (cell + 1) & (len(cells) - 1)
        slots[i] = cells[cell]


@compiled_loop
def add_slots(cells: I32, shift: np.uint64, row_in: I64, slots: I64) -> int:
    """Returns how many cells were taken."""
    num_taken = 0
    for slot in slots:
        cell = np.int64((np.uint64(row_in[slot]) * MULTIPLIER) >> shift)
        while cells[cell] != EMPTY and row_in[cells[cell]] != row_in[slot]:
            cell = (cell + 1) & (len(cells) - 1)
        num_taken += cells[cell] == EMPTY
        cells[cell] = slot
    return num_taken
