"""What every store promises: one suite for all of them."""

import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.prefetcher.stores.late_store import LateStore
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import Store
from rowcast.runtime.errors import ConfigError
from tests.stores.every_store import (
    GROUP,
    SEED,
    STORES,
    all_keys,
    finish,
    first_floats,
    groups,
    keys_of,
    opened,
    random_records,
    read,
    scanned,
)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with opened(request.param) as store:
        yield store


def test_a_row_that_was_never_written_has_its_first_value(store: Store) -> None:
    keys = all_keys()
    assert read(store, keys).view(np.float32).tobytes() == first_floats(keys).tobytes()
    assert read(store, keys[5:6]).view(np.float32).tobytes() == first_floats(keys[5:6]).tobytes()


def test_a_row_has_the_bytes_that_were_written_last_and_its_neighbours_keep_theirs(store: Store) -> None:
    keys = keys_of((0, [0, 3, 39]), (2, [0, 299]), (3, [6]))
    expected = first_floats(all_keys()).view(np.uint8)
    for seed in (1, 2):
        rows = random_records(len(keys), seed)
        finish(store.write(keys, rows, seed))
        expected[np.searchsorted(all_keys(), keys)] = rows
        assert read(store, all_keys()).tobytes() == expected.tobytes()
        assert read(store, keys).tobytes() == rows.tobytes()


def test_rows_belong_to_the_store_only_until_the_ticket_is_done(store: Store) -> None:
    keys, rows = keys_of((0, [1, 2])), random_records(2)
    kept = rows.copy()
    finish(store.write(keys, rows, 0))
    rows[:] = 0
    assert read(store, keys).tobytes() == kept.tobytes()


def test_nothing_read_or_written_is_no_error(store: Store) -> None:
    nothing = np.empty(0, np.int64)
    finish(store.write(nothing, random_records(0), 0))
    assert read(store, nothing).shape == (0, GROUP.record_bytes)
    assert scanned(store) == {}


def test_reading_and_hinting_leave_no_trace(store: Store) -> None:
    before = store.host_bytes
    store.hint(all_keys(), 3)
    read(store, all_keys())
    assert scanned(store) == {}
    assert store.host_bytes == before


def test_host_bytes_count_the_rows_present(store: Store) -> None:
    before = store.host_bytes
    finish(store.write(all_keys()[:10], random_records(10), 0))
    assert store.host_bytes == before + 10 * GROUP.record_bytes


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_a_scan_gives_every_row_written_by_ascending_key_in_blocks(store: Store, block: int) -> None:
    chosen = [0, 2, 3, 5, 17, 299]
    keys = keys_of((0, [1]), (2, chosen))
    rows = random_records(len(keys))
    finish(store.write(keys, rows, 0))
    blocks = list(store.scan(2, block))
    assert [len(found) for found, _ in blocks] == [min(block, 6 - start) for start in range(0, 6, block)]
    assert np.concatenate([found for found, _ in blocks]).tolist() == keys[1:].tolist()
    assert np.concatenate([records for _, records in blocks]).tobytes() == rows[1:].tobytes()
    assert all(records.shape == (len(found), GROUP.record_bytes) for found, records in blocks)
    assert list(store.scan(3, block)) == []


def test_tables_of_a_group_do_not_share_rows(store: Store) -> None:
    keys = keys_of((0, [4]), (2, [4]), (3, [4]))
    rows = random_records(3)
    finish(store.write(keys, rows, 0))
    for index, key in enumerate(keys):
        assert read(store, np.array([key])).tobytes() == rows[index].tobytes()


def test_a_store_can_be_closed_twice(store: Store) -> None:
    store.close()
    store.close()


def test_reads_and_writes_of_different_rows_may_run_at_once_in_two_threads(store: Store) -> None:
    keys = all_keys()
    mine, theirs = keys[::2], keys[1::2]
    rows = random_records(len(theirs))

    def write_often() -> None:
        for step in range(50):
            finish(store.write(theirs, rows, step))

    writer = threading.Thread(target=write_often)
    writer.start()
    seen = {read(store, mine).tobytes() for _ in range(50)}
    writer.join()
    assert seen == {first_floats(mine).tobytes()}
    assert read(store, theirs).tobytes() == rows.tobytes()


row_sets = st.sets(st.integers(0, len(all_keys()) - 1), min_size=1, max_size=60)


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=40, deadline=None)
@given(operations=st.lists(st.tuples(st.booleans(), row_sets), max_size=12))
def test_any_reads_and_writes_agree_with_a_plain_dictionary(kind: str, operations: list[tuple[bool, set[int]]]) -> None:
    everything = all_keys()
    expected: dict[int, bytes] = {}
    with opened(kind) as store:
        for step, (writes, chosen) in enumerate(operations):
            keys = everything[sorted(chosen)]
            if writes:
                rows = random_records(len(keys), step)
                finish(store.write(keys, rows, step))
                expected |= {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}
            else:
                first = first_floats(keys)
                wanted = [expected.get(int(key), row.tobytes()) for key, row in zip(keys, first, strict=True)]
                assert read(store, keys).tobytes() == b"".join(wanted)
        assert scanned(store) == expected


# what only the late store does


@pytest.mark.parametrize("seed", range(10))
def test_a_late_read_touches_nothing_before_its_ticket_is_done(seed: int) -> None:
    store = LateStore(MemoryStore(GROUP, SEED), seed)
    keys = all_keys()[:5]
    tickets = [
        (store.read(keys, out), out) for out in (np.full((5, GROUP.record_bytes), 0xCD, np.uint8) for _ in range(8))
    ]
    late = 0
    for ticket, out in tickets:
        while not ticket.done():
            assert (out == 0xCD).all(), "rows arrived before the ticket was done"
            late += 1
        assert out.tobytes() == first_floats(keys).tobytes()
    assert late > 0


def test_late_tickets_finish_out_of_order() -> None:
    store = LateStore(MemoryStore(GROUP, SEED), seed=3)
    tickets = [store.write(all_keys()[i : i + 1], random_records(1, i), i) for i in range(20)]
    order: list[int] = []
    while len(order) < len(tickets):
        order += [i for i, ticket in enumerate(tickets) if i not in order and ticket.done()]
    assert order != sorted(order)


class Slow:
    """A ticket that is done at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks >= 3


def test_a_late_ticket_is_done_only_after_that_of_the_store_it_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, slow = MemoryStore(GROUP, SEED), Slow()
    monkeypatch.setattr(inner, "read", lambda keys, out: slow)
    monkeypatch.setattr(random.Random, "random", lambda self: 0.0)
    ticket = LateStore(inner, seed=0).read(all_keys()[:1], random_records(1))
    assert [ticket.done() for _ in range(4)] == [False, False, True, True]


# what only the memory store does


def test_tables_larger_than_the_machine_can_address_are_refused_with_their_size() -> None:
    with pytest.raises(
        ConfigError, match=r"group fp32_d6_adagrad need \d+\.\d GiB, .*; use fewer rows or a smaller embedding_dim"
    ):
        MemoryStore(groups(scale=2**38)[0], SEED)
