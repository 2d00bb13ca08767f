"""Every read gives the last write: the engine of an adopted script against a plain dictionary of rows.

Rows that a script returns, and those that it asks for, keep their turn among the plan's victims. A store never writes a
row while another call for it is open.
"""

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rowcast.job.tables import group_specs, make_keys
from rowcast.prefetcher.pipeline import fetcher
from rowcast.prefetcher.pipeline.fetcher import Fetcher, Limits
from rowcast.prefetcher.pipeline.metrics import new_counters
from rowcast.prefetcher.pipeline.writeback import Writeback
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.messages import Answer, Ask, Returned, RowsBack
from rowcast.protocol.plan import plan_stamp
from rowcast.protocol.plan_layout import RowSpan
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.protocol.transport.ring_file import in_memory_buffer
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.trainer.adopt import script_engine
from rowcast.trainer.adopt.records import Place, Records
from rowcast.trainer.adopt.script_engine import Residency
from tests.adopt.script_pair import PlainRows, ScriptPair
from tests.support.jobs import job, table
from tests.support.repeats import count
from tests.support.sample_messages import numbers_of

TABLES = [(24, 2, 1), (40, 3, 0), (10, 2, 1), (17, 2, 2)]  # rows, columns, states; the first three share a group
NUM_TURNS = 30
MOST_COMING = 12


class Script:
    """Does what scripts do, and worse, in an order that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        tables = chance.sample(TABLES, chance.randint(1, len(TABLES)))
        slots = [chance.randint(4, 12), chance.randint(4, 12), 60]
        self.pair = ScriptPair(seed, tables, slots, chance.choice((2**10, 2**12)), late=chance.random() < 0.5)
        self.plain, self.engine = PlainRows(self.pair.places), self.pair.engine
        self.coming: list[int] = []  # announced
        self.written = [set[int]() for _ in tables]  # rows of each table
        self.announced = [set[int]() for _ in tables]  # those of training steps
        self.evaluates = chance.choice((0.0, 0.2))  # how often a step trains no rows

    def run(self) -> None:
        turns = [self.announce, self.begin, self.read, self.write, self.train, self.pass_over, self.list_trained]
        often = [self.chance.choice((0.1, 1.0, 3.0)) for _ in turns]
        for turn in self.chance.choices(turns, often, k=NUM_TURNS):
            turn()
            self.pair.stir(self.chance.choice((0, 0, 5, 50)))
        self.engine.finish()
        for place in self.pair.places:
            self.check(place, np.arange(place.num_rows))
        self.list_trained()

    # coming steps

    def announce(self) -> None:
        for _ in range(self.chance.randint(1, MOST_COMING - len(self.coming)) if len(self.coming) < MOST_COMING else 0):
            room = list(self.pair.slots)
            rows: dict[Place, I64] = {}
            for place in self.chance.sample(self.pair.places, self.chance.randint(0, len(self.pair.places))):
                rows[place] = self.some(place, room[place.group])
                room[place.group] -= len(rows[place])
            trains = self.chance.random() >= self.evaluates
            for place in rows if trains else ():
                self.announced[place.index] |= set(rows[place].tolist())
            self.coming.append(self.engine.announce(rows, trains=trains))

    def begin(self) -> None:
        """In order, mostly."""
        if self.coming:
            at = 0 if self.chance.random() < 0.9 else self.chance.randrange(len(self.coming))
            self.engine.begin(self.coming.pop(at))
            self.train()

    def pass_over(self) -> None:
        if self.coming and self.chance.random() < 0.3:
            self.engine.pass_over(self.coming.pop(self.chance.randrange(len(self.coming))))

    # rows

    def train(self) -> None:
        """The rows of the step that has begun, if one has, and perhaps others; not all are written."""
        for place in self.pair.places:
            ids, rows = self.engine.planned(place)
            self.plain.check(place, ids, rows)
            if self.chance.random() < 0.8:
                self.put(place, ids, some_records(self.chance, place, len(ids)))

    def read(self) -> None:
        place = self.chance.choice(self.pair.places)
        self.check(place, self.some(place, place.num_rows))

    def write(self) -> None:
        place = self.chance.choice(self.pair.places)
        ids = torch.from_numpy(self.some(place, place.num_rows))
        self.put(place, ids, some_records(self.chance, place, len(ids)))

    def put(self, place: Place, ids: Tensor, rows: Records) -> None:
        self.engine.write(place, ids, rows)
        self.plain.write(place, ids, rows)
        self.written[place.index] |= set(ids.tolist())

    def list_trained(self) -> None:
        for place, written, announced in zip(self.pair.places, self.written, self.announced, strict=True):
            found = self.engine.trained(place).tolist()
            assert found == sorted(set(found))
            assert written <= set(found) <= written | announced

    def check(self, place: Place, ids: I64) -> None:
        wanted = torch.from_numpy(ids)
        self.plain.check(place, wanted, self.engine.read(place, wanted))

    def some(self, place: Place, most: int) -> I64:
        """Some rows are hot."""
        known = place.num_rows // self.chance.choice((1, 1, 4))
        rows = self.chance.sample(range(known), self.chance.randint(0, min(most, known)))
        return np.sort(np.array(rows, np.int64))


def some_records(chance: random.Random, place: Place, num_rows: int) -> Records:
    generator = torch.Generator().manual_seed(chance.randrange(2**32))

    def values() -> Tensor:
        return torch.rand(num_rows, place.dim, generator=generator)

    return Records(
        values(), {name: values() for name in place.states}, torch.randint(2**20, (num_rows,), generator=generator)
    )


@pytest.mark.parametrize("part", range(4))
def test_every_read_gives_the_last_write(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_engine, "PARCEL_BYTES", 48)  # of two rows, or one
    monkeypatch.setattr(script_engine, "MOST_LEAVING", 20)
    monkeypatch.setattr(fetcher, "LISTED_AT_ONCE", 3)
    num_seeds = count(40, 3000, quick=15)
    for seed in range(part * num_seeds, (part + 1) * num_seeds):
        try:
            Script(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_a_row_that_was_trained_since_keeps_what_it_got_then() -> None:
    """It is written before its first step, trained by that, leaves, and comes back for a second one."""
    pair = ScriptPair(1, [(6, 2, 1)], [2], 2**12, late=False)
    plain, engine, (place,) = PlainRows(pair.places), pair.engine, pair.places
    chance = random.Random(1)
    first, *_, last = [engine.announce({place: np.array(rows)}, trains=True) for rows in ((0, 1), (2, 3), (0, 1))]
    ids = torch.tensor([0, 1])
    for number in range(first, last + 1):
        rows = some_records(chance, place, 2)
        if number == first:
            engine.write(place, ids, some_records(chance, place, 2))
        engine.begin(number)
        ids, found = engine.planned(place)
        if number == last:
            plain.check(place, ids, found)
        engine.write(place, ids, rows)
        plain.write(place, ids, rows)


def test_what_is_not_known_to_be_home_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_engine, "MOST_LEAVING", 3)
    pair = ScriptPair(1, [(6, 2, 1)], [2], 2**12, late=True)
    (place,) = pair.places
    for _ in range(20):
        pair.engine.write(place, torch.tensor([1]), some_records(random.Random(1), place, 1))
        assert len(pair.engine._leaving) <= 3


def test_a_write_of_many_rows_waits_for_those_that_it_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_engine, "PARCEL_BYTES", 48)
    monkeypatch.setattr(script_engine, "MOST_LEAVING", 3)
    pair = ScriptPair(1, [(40, 2, 1)], [2], 2**12, late=True)
    (place,) = pair.places
    plain, engine, leaving = PlainRows(pair.places), pair.engine, list[int]()
    send = engine._engine.sender.send_parcel

    def counted(message: Any) -> None:
        leaving.append(len(engine._leaving))
        send(message)

    monkeypatch.setattr(engine._engine.sender, "send_parcel", counted)
    ids, rows = torch.arange(40), some_records(random.Random(1), place, 40)
    engine.write(place, ids, rows)
    plain.write(place, ids, rows)
    assert 3 < max(leaving) <= 6
    plain.check(place, ids, engine.read(place, ids))


def test_rows_in_slots_are_those_that_came_last() -> None:
    residency = Residency(num_slots=2)
    residency.coming[:] = [3, 1]
    assert residency.fill(np.array([0, 1])).tolist() == [3, 1]
    assert residency.slots(np.arange(5)).tolist() == [-1, 1, -1, 0, -1]
    residency.coming[0] = 4
    assert residency.slots(np.array([3, 4])).tolist() == [0, -1]  # it has not come yet
    assert residency.fill(np.array([0])).tolist() == [4]
    assert residency.slots(np.arange(5)).tolist() == [-1, 1, -1, -1, 0]


def test_rows_that_come_and_go_for_long_are_found_in_memory_that_follows_the_slots() -> None:
    chance, num_slots = np.random.default_rng(1), 37
    residency, plain = Residency(num_slots), dict[int, int]()
    rows = chance.integers(2**48, size=200)
    for _ in range(300):
        slots = chance.permutation(num_slots)[: chance.integers(1, num_slots)]
        plain = {row: slot for row, slot in plain.items() if slot not in slots}
        residency.coming[slots] = chance.permutation(np.setdiff1d(rows, [*plain]))[: len(slots)]
        plain.update(zip(residency.fill(slots).tolist(), slots.tolist(), strict=True))
        assert residency.slots(rows).tolist() == [plain.get(row, -1) for row in rows.tolist()]


GROUP = group_specs(job(tables=[table("a", 10, 3, "rows0")]))[0]
ROW = 4
KEYS = make_keys(0, np.array([ROW]))


class SlowWrite:
    is_done = False

    def __init__(self, keys: Any, numbers: Any, rows: Any) -> None:
        self.arguments = keys, numbers, rows.copy()

    def done(self) -> bool:
        return self.is_done


class SlowStore(MemoryStore):
    """Writes nothing until a test says so, and then the newest first."""

    def __init__(self) -> None:
        super().__init__(GROUP)
        self.open: list[SlowWrite] = []

    def write_numbered(self, keys: Any, numbers: Any, rows: Any) -> Any:
        self.open.append(SlowWrite(keys, numbers, rows))
        return self.open[-1]

    def work(self) -> int:
        """Returns how many writes were open."""
        num_open = len(self.open)
        while self.open:
            own = self.open.pop()
            super().write_numbered(*own.arguments)
            own.is_done = True
        return num_open


class Home:
    """Expects one row from step 0."""

    def __init__(self) -> None:
        rings = [in_memory_buffer(2**12) for _ in range(2)]
        self.ring, self.slow = RingWriter(rings[0]), SlowStore()
        self.store = TrackedStore(self.slow, GROUP, 0)
        counters = new_counters((GROUP,), 0)
        self.writeback = Writeback((GROUP,), (self.store,), RingReader(rings[0]), counters, lambda released: None, 0)
        self.writeback.expect(0, None, 0, (KEYS,))
        self.sent: list[Any] = []
        self.fetcher = Fetcher(
            plans=[],  # type: ignore[arg-type]
            groups=(GROUP,),
            stores=(self.store,),
            ring=RingWriter(rings[1]),
            writeback=self.writeback,
            counters=counters,
            limits=Limits(depth=1, first_plan=0, staging_bytes=2**10),
            send=self.sent.append,
        )

    def come_back(self, value: float) -> None:
        space = self.ring.try_allocate(GROUP.record_bytes)
        assert space is not None, "the ring is empty"
        space.payload[:] = np.frombuffer(record(value), np.uint8)
        ref = self.ring.commit(space, plan_stamp(0, 0), checksum=False)
        rows = (RowSpan(group=0, start=0, count=1, offset=0),)
        self.writeback.accept(RowsBack(plan=0, barrier=None, piece=0, last=True, payload=ref, rows=rows))

    def turn(self) -> int:
        """Returns how many writes were open at once."""
        for _ in range(5):
            self.writeback.write_arrived()
            self.fetcher.answer_asked()
        num_open = self.slow.work()
        self.writeback.release_written()
        self.writeback.note_home()
        return num_open

    def row(self) -> float:
        records = np.empty((1, GROUP.record_bytes), np.uint8)
        finish(self.store.read(KEYS, records))
        return float(records.view(np.float32)[0, 0])


def record(value: float) -> bytes:
    return np.full(GROUP.record_bytes // 4, value, np.float32).tobytes()


def returned(number: int, value: float) -> Returned:
    return Returned(number=number, table=0, rows=numbers_of(ROW), records=record(value))


def test_a_row_that_is_returned_and_then_leaves_has_its_newest_value() -> None:
    home = Home()
    home.writeback.accept(returned(1, 1.0))
    home.come_back(2.0)
    assert [home.turn(), home.row(), home.writeback.returned, home.writeback.applied_through] == [1, 1.0, 1, None]
    assert [home.turn(), home.row(), home.writeback.returned, home.writeback.applied_through] == [1, 2.0, 1, 0]


def test_a_row_that_left_and_is_then_returned_has_its_newest_value() -> None:
    home = Home()
    home.come_back(2.0)
    home.writeback.accept(returned(1, 3.0))
    home.writeback.accept(returned(2, 4.0))
    assert [home.turn(), home.row(), home.writeback.returned] == [1, 2.0, 0]
    assert [home.turn(), home.row(), home.writeback.returned] == [1, 3.0, 1]
    assert [home.turn(), home.row(), home.writeback.returned] == [1, 4.0, 2]


def test_rows_are_asked_for_once_all_before_are_home() -> None:
    home = Home()
    home.come_back(2.0)
    home.writeback.accept(Ask(number=0, table=0, rows=numbers_of(ROW)))
    home.writeback.accept(returned(1, 3.0))
    home.turn()
    assert home.sent == []
    home.turn()
    home.turn()
    assert home.sent == [Answer(number=0, records=record(2.0))]
    assert home.row() == 3.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"table": 1}, "1 rows of table 1 travel, which do not ascend in a table of the job"),
        ({"rows": numbers_of(10)}, "1 rows of table 0 travel, which do not ascend"),
        ({"rows": numbers_of(5, 5)}, "2 rows of table 0 travel, which do not ascend"),
        ({"records": record(1.0) * 2}, f"1 rows of table 0 came in {2 * GROUP.record_bytes} bytes"),
    ],
)
def test_returned_rows_that_are_in_no_table_are_refused(changes: dict[str, Any], sentence: str) -> None:
    home = Home()
    home.writeback.accept(msgspec.structs.replace(returned(1, 1.0), **changes))
    with pytest.raises(RemoteProtocolError, match=sentence):
        home.turn()


def test_rows_of_no_table_cannot_be_asked_for() -> None:
    home = Home()
    home.writeback.accept(Ask(number=0, table=0, rows=numbers_of(3, 10)))
    with pytest.raises(RemoteProtocolError, match="2 rows of table 0 travel"):
        home.turn()
