"""Rows that a script returns, and those that it asks for, keep their turn among the plan's victims.

A store never writes a row while another call for it is open."""

from typing import Any

import msgspec
import numpy as np
import pytest

from rowcast.job.tables import group_specs, make_keys
from rowcast.prefetcher.pipeline.fetcher import Fetcher, Limits
from rowcast.prefetcher.pipeline.metrics import new_counters
from rowcast.prefetcher.pipeline.writeback import Writeback
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.messages import Answer, Ask, Returned, RowsBack, RowSpan
from rowcast.protocol.plan import plan_stamp
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.protocol.transport.ring_file import in_memory_buffer
from rowcast.runtime.errors import RemoteProtocolError
from tests.support.jobs import job, table
from tests.support.sample_messages import numbers_of

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
