"""What every store promises: one suite for all that `job/stores.py` names."""

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.tables import make_keys
from rowcast.prefetcher.stores import touched_rows
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import ABSENT, RowStore
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.stages import Part, Result, ThreadPool
from tests.stores.every_store import (
    GROUP,
    STORES,
    all_keys,
    finish,
    groups,
    open_numbered_as_touched,
    opened,
    present,
    random_records,
    read,
)
from tests.support.facts import facts
from tests.support.late_store import LateStore


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[RowStore]:
    with opened(request.param) as store:
        yield store


def test_a_store_can_be_closed_twice_and_has_no_rows_then(store: RowStore) -> None:
    store.close()
    store.close()
    with pytest.raises(AssertionError, match="is closed, but 3 rows were requested"):
        read(store, all_keys()[:3])


def test_reads_and_writes_of_different_rows_may_run_at_once_in_two_threads(store: RowStore) -> None:
    keys = all_keys()
    mine, theirs = keys[::2], keys[1::2]
    rows = random_records(len(keys))
    finish(store.write(keys, rows))

    def write_often() -> None:
        for _ in range(50):
            finish(store.write(theirs, rows[1::2]))

    writer = threading.Thread(target=write_often)
    writer.start()
    seen = {read(store, mine).tobytes() for _ in range(50)}
    writer.join()
    assert seen == {rows[::2].tobytes()}
    assert read(store, theirs).tobytes() == rows[1::2].tobytes()


row_sets = st.sets(st.integers(0, len(all_keys()) - 1), max_size=60)


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=40)
@given(operations=st.lists(st.tuples(st.booleans(), row_sets), max_size=12))
def test_any_reads_and_writes_agree_with_a_plain_dictionary(kind: str, operations: list[tuple[bool, set[int]]]) -> None:
    everything = all_keys()
    expected: dict[int, bytes] = {}
    with opened(kind) as store:
        for step, (writes, chosen) in enumerate(operations):
            keys = everything[sorted(chosen)]
            if writes:
                rows = random_records(len(keys), step)
                finish(store.write(keys, rows))
                expected |= {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}
                rows[:] = 0  # they belong to the store only until the ticket is done
            else:
                found = zip(keys.tolist(), read(store, keys), strict=True)
                assert {key: row.tobytes() for key, row in found if key in expected} == {
                    key: expected[key] for key in keys.tolist() if key in expected
                }
        assert present(store) == expected


# what only the late store does


class CountingPool(ThreadPool):
    def __init__(self) -> None:
        super().__init__(3, least=4)
        self.counts: list[int] = []

    def over(self, parts: Sequence[Part], work: Callable[[Part], Result]) -> list[Result]:
        self.counts.append(len(parts))
        return super().over(parts, work)


def test_threads_share_long_look_ups_reads_and_writes_and_no_short_ones() -> None:
    store, pool = open_numbered_as_touched(), CountingPool()
    store.numbers.pool = pool
    for num_rows, num_shares in ((12, 3), (11, 2), (7, 1)):
        keys, rows = all_keys()[:num_rows], random_records(num_rows)
        store.write(keys, rows)
        assert (read(store, keys) == rows).all()
        assert pool.counts == [num_shares] * 4  # found and written, found and read
        pool.counts.clear()


@pytest.mark.parametrize("seed", range(10))
def test_a_late_read_touches_nothing_before_its_ticket_is_done(seed: int) -> None:
    inner, keys, rows = MemoryStore(GROUP), all_keys()[:5], random_records(5)
    finish(inner.write(keys, rows))
    store = LateStore(inner, seed)
    tickets = [
        (store.read(keys, out), out) for out in (np.full((5, GROUP.record_bytes), 0xCD, np.uint8) for _ in range(8))
    ]
    late = 0
    for ticket, out in tickets:
        while not ticket.done():
            assert (out == 0xCD).all(), "rows arrived before the ticket was done"
            late += 1
        assert out.tobytes() == rows.tobytes()
    assert late > 0


# what only the memory store does


def test_rows_lie_one_after_the_other_as_they_are_first_written() -> None:
    """Rows in table order would take a page each if they lie far apart."""
    store = MemoryStore(GROUP)
    for keys in (all_keys()[[5, 300]], all_keys()[[2, 5, 340]]):
        finish(store.write(keys, random_records(len(keys))))
    assert store.numbers.of(all_keys()[[2, 5, 7, 300, 340]]).tolist() == [2, 0, ABSENT, 1, 3]


def test_tables_beyond_memory_take_what_is_touched_and_nothing_else() -> None:
    [group, *_] = groups(scale=2**38)
    store = MemoryStore(group)
    keys = make_keys(2, np.array([0, 5, 300 * 2**38 - 1]))
    rows = random_records(len(keys))
    finish(store.write(keys, rows))
    assert read(store, keys).tobytes() == rows.tobytes()
    assert isinstance(store.numbers, TouchedRows)
    assert store.numbers.count == 3


def test_more_addresses_than_a_process_may_reserve_are_refused_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touched_rows, "MOST_INDEXED", 2**80)
    with pytest.raises(ConfigError, match=facts("group fp32_d6_adagrad", "GiB of addresses")):
        MemoryStore(groups(scale=2**38)[0])
