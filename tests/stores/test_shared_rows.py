"""Threads that share the rows of a piece: all of them at once, whatever other pieces are under way."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rowcast.prefetcher.pipeline.metrics import new_counters
from rowcast.prefetcher.pipeline.writeback import Writeback
from rowcast.prefetcher.stores import memory_store, records
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.row_loops import gather_for
from rowcast.prefetcher.stores.store import Keys, finish
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.messages import RowsBack
from rowcast.protocol.plan import plan_stamp
from rowcast.protocol.plan_layout import RowSpan
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.protocol.transport.ring_file import in_memory_buffer
from rowcast.runtime.stages import ThreadPool
from tests.stores.every_store import GROUP, SEED, all_keys, read
from tests.support.tiers import tier_plan, tiered

NUM_THREADS, NUM_ROWS = 3, 12
GIVEN_UP_S = 20.0


class Meeting:
    """Parts of one operation, each of which waits until all have begun."""

    def __init__(self) -> None:
        self._begun = threading.Barrier(NUM_THREADS)
        self.count = 0

    def before(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def meet(*arguments: Any) -> Any:
            self._begun.wait(GIVEN_UP_S)
            self.count += 1
            return work(*arguments)

        return meet


class Held:
    """Parts of one operation, which end when a test says so."""

    def __init__(self) -> None:
        self.begun, self._let_go = threading.Semaphore(0), threading.Event()

    def before(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def hold(*arguments: Any) -> Any:
            self.begun.release()
            assert self._let_go.wait(2 * GIVEN_UP_S)
            return work(*arguments)

        return hold

    def let_go(self) -> None:
        self._let_go.set()


def store_in_threads(store: MemoryStore | TieredStore) -> TrackedStore:
    store.numbers.pool = ThreadPool(NUM_THREADS, least=NUM_ROWS // NUM_THREADS)
    return TrackedStore(store, GROUP, SEED)


@pytest.fixture
def another() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_a_write_begins_all_its_parts_while_a_read_holds_its_own(
    monkeypatch: pytest.MonkeyPatch, another: ThreadPoolExecutor
) -> None:
    store, held, meeting = MemoryStore(GROUP), Held(), Meeting()
    tracked = store_in_threads(store)
    keys, rows = all_keys()[:NUM_ROWS], np.ones((NUM_ROWS, GROUP.record_bytes), np.uint8)
    finish(tracked.write(keys, rows))
    monkeypatch.setattr(memory_store, "gather_for", lambda out: held.before(gather_for(out)))
    reading = another.submit(read, tracked, keys)
    try:
        for _ in range(NUM_THREADS):
            assert held.begun.acquire(timeout=GIVEN_UP_S)
        monkeypatch.setattr(store.rows, "_scatter", meeting.before(store.rows._scatter))
        finish(tracked.write(all_keys()[NUM_ROWS : 2 * NUM_ROWS], rows))
    finally:
        held.let_go()
    assert meeting.count == NUM_THREADS
    assert (reading.result() == 1).all()


def test_the_rows_of_a_memory_tier_are_copied_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    store, copies = tiered(GROUP, NUM_ROWS), Meeting()
    tracked = store_in_threads(store)
    keys, rows = all_keys()[:NUM_ROWS], np.ones((NUM_ROWS, GROUP.record_bytes), np.uint8)
    store.stage(0, tier_plan(load=keys))
    while store.advance(None):
        pass
    monkeypatch.setattr(store.rows, "_scatter", copies.before(store.rows._scatter))
    monkeypatch.setattr(memory_store, "gather_for", lambda out: copies.before(gather_for(out)))
    finish(tracked.write(keys, rows))
    assert (read(tracked, keys) == 1).all()
    assert copies.count == 2 * NUM_THREADS


def came_back(store: TrackedStore, keys: Keys) -> Writeback:
    """With rows of 0 in the ring, as those of step 0."""
    ring = in_memory_buffer(2**16)
    writer, counters = RingWriter(ring), new_counters((GROUP,), 0)
    writeback = Writeback((GROUP,), (store,), RingReader(ring), counters, lambda released: None, 0)
    writeback.expect(0, None, 0, (keys,))
    space = writer.try_allocate(len(keys) * GROUP.record_bytes)
    assert space is not None
    space.payload[:] = 0
    ref = writer.commit(space, plan_stamp(0, 0), checksum=False)
    rows = (RowSpan(group=0, start=0, count=len(keys), offset=0),)
    writeback.accept(RowsBack(plan=0, barrier=None, piece=0, last=True, payload=ref, rows=rows))
    return writeback


@pytest.mark.parametrize("make", [lambda: MemoryStore(GROUP), lambda: tiered(GROUP, 5)], ids=["memory", "tiered"])
def test_rows_that_come_back_are_checked_by_all_threads(
    make: Callable[[], MemoryStore | TieredStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, looks = store_in_threads(make()), Meeting()
    writeback = came_back(store, all_keys()[:NUM_ROWS])
    monkeypatch.setattr(records, "first_that_carries", looks.before(records.first_that_carries))
    while not writeback.note_home():
        writeback.write_arrived()
        writeback.release_written()
    assert looks.count == NUM_THREADS
    copies = writeback.all_stores.row_copies(writeback.all_stores)
    assert copies.bytes_written == NUM_ROWS * GROUP.record_bytes
    assert copies.write_s > 0
    assert (read(store, all_keys()[:NUM_ROWS]) == 0).all()
