"""Numbers of touched rows: the directory behind tables that are larger than memory."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.tables import GroupSpec, group_specs, make_keys
from rowcast.prefetcher.stores import touched_rows
from rowcast.prefetcher.stores.number_loops import (
    BUCKET,
    FRONTIER,
    REACH,
    SIZE,
    bucket_in,
    hash_in,
    hash_of,
    layout_for,
    position_of,
)
from rowcast.prefetcher.stores.row_loops import BITS, set_bits
from rowcast.prefetcher.stores.store import ABSENT
from rowcast.prefetcher.stores.touched_rows import (
    IndexedRows,
    NumberedRows,
    SharedLock,
    TouchedRows,
    most_indexed,
    numbered,
    reserved,
)
from rowcast.runtime.arrays import I64, U64
from rowcast.runtime.errors import RowcastError
from tests.support import jobs
from tests.support.facts import facts

MOST = 10**6
TABLES = (0, 3, 25)  # of the group's tables, those with rows


def group_of(rows_a_table: int) -> GroupSpec:
    tables = [jobs.table(f"t{i}", rows_a_table, 6 if i in TABLES else 8) for i in range(26)]
    group = group_specs(jobs.job(tables=tables))[0]
    assert tuple(table.index for table in group.tables) == TABLES
    return group


def some_keys(random: np.random.Generator, rows_a_table: int, count: int) -> I64:
    """At most that many rows of each table, among them the first and the last."""
    edges = [0, rows_a_table - 1]
    return np.concatenate(
        [make_keys(table, np.unique([*random.integers(0, rows_a_table, count), *edges])) for table in TABLES]
    )


def bits_of(numbers: I64) -> U64:
    bits: U64 = np.zeros(-(-MOST // BITS), np.uint64)
    set_bits(bits, numbers)
    return bits


def keys_found(rows: NumberedRows, bits: U64, block: int = 1000) -> I64:
    blocks = list(rows.found(bits, TABLES, block))
    parts = [found for table in TABLES for found in rows.found(bits, [table], block)]
    assert sum(len(keys) for keys, _ in parts) == sum(len(keys) for keys, _ in blocks)
    for keys, numbers in blocks:
        assert len(keys) <= block
        assert (rows.of(keys) == numbers).all()
    return np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in blocks)])


@pytest.mark.parametrize("rows_a_table", [50, 10**6, 10**12, 2**48])
def test_rows_keep_the_numbers_in_which_they_were_first_added(rows_a_table: int) -> None:
    random, rows, expected = np.random.default_rng(1), TouchedRows(group_of(rows_a_table), MOST), dict[int, int]()
    for _ in range(60):
        asked = some_keys(random, rows_a_table, 700)
        assert rows.of(asked).tolist() == [expected.get(key, ABSENT) for key in asked.tolist()]
        added = some_keys(random, rows_a_table, 700)
        for key in added.tolist():
            expected.setdefault(key, len(expected))
        assert rows.added(added).tolist() == [expected[key] for key in added.tolist()]
        assert rows.count == len(expected)
    assert rows.of(added).tolist() == [expected[key] for key in added.tolist()]


def as_index(group: GroupSpec) -> NumberedRows:
    rows = numbered(group, group.num_rows)
    assert isinstance(rows, IndexedRows)
    return rows


@pytest.mark.parametrize(
    ("make", "most_rows"), [(lambda group: TouchedRows(group, MOST), 2**48), (as_index, 500)], ids=["touched", "index"]
)
@settings(max_examples=30)
@given(data=st.data())
def test_any_rows_keep_their_numbers_and_are_found_by_ascending_key(
    make: Callable[[GroupSpec], NumberedRows], most_rows: int, data: st.DataObject
) -> None:
    rows_a_table, expected = data.draw(st.integers(1, most_rows)), dict[int, int]()
    rows = make(group_of(rows_a_table))
    ids = st.tuples(st.sampled_from(TABLES), st.integers(0, rows_a_table - 1))
    for batch in data.draw(st.lists(st.sets(ids, max_size=40), max_size=12)):
        keys = np.array(sorted((table << 48) + row for table, row in batch), np.int64)
        assert rows.of(keys).tolist() == [expected.get(key, ABSENT) for key in keys.tolist()]
        for key in keys.tolist():
            expected.setdefault(key, len(expected))
        assert rows.added(keys).tolist() == [expected[key] for key in keys.tolist()]
    everything = np.array(sorted(expected), np.int64)
    assert rows.of(everything).tolist() == [expected[key] for key in everything.tolist()]
    chosen = data.draw(st.sets(st.sampled_from(everything.tolist()))) if expected else set[int]()
    bits = bits_of(np.array([expected[key] for key in chosen], np.int64))
    assert keys_found(rows, bits, block=7).tolist() == sorted(chosen)


def test_arrays_of_huge_pages_begin_at_one() -> None:
    assert [reserved(2**18 + i, huge_pages=True).ctypes.data % 2**21 for i in range(3)] == [0] * 3


@pytest.mark.parametrize("num_rows", [1, 2, 3, 1000, 2**16, 2**40 - 1, 2**53])
def test_each_position_has_a_hash_of_its_own_that_leads_back_to_it(num_rows: int) -> None:
    layout = layout_for(num_rows, min(MOST, num_rows))
    positions = np.unique(np.linspace(0, num_rows - 1, 2**16).astype(np.int64))
    hashes = [np.uint64(hash_of(position, layout)) for position in positions.tolist()]
    assert [position_of(hashed, layout) for hashed in hashes] == positions.tolist()
    assert len(set(hashes)) == len(positions)


@pytest.mark.parametrize("bit", [63, 60, 58])
def test_rows_whose_cells_are_alike_are_told_apart(bit: int) -> None:
    """Their hashes differ in bits that a cell has no room for."""
    group = group_of(2**48)
    rows, random = TouchedRows(group, MOST), np.random.default_rng(4)
    layout = layout_for(group.num_rows, rows.most)
    assert 64 - layout.implied <= bit
    pairs = []
    for position in random.integers(0, group.num_rows, 3000).tolist():
        twin = position_of(np.uint64(hash_of(position, layout) ^ (1 << bit)), layout)
        pairs += [(position, twin)] if twin < group.num_rows else []
    positions = np.array(pairs, np.int64)
    keys = make_keys(0, positions % 2**48) + (np.array(TABLES, np.int64)[positions // 2**48] << 48)
    assert (rows.added(np.sort(keys[:, 0])) == np.arange(len(keys))).all()
    assert (rows.of(keys[:, 1]) == ABSENT).all()
    rows.added(np.sort(keys[:, 1]))
    everything = np.sort(keys.ravel())
    assert sorted(rows.of(everything).tolist()) == list(range(2 * len(keys)))
    assert (keys_found(rows, bits_of(rows.of(everything))) == everything).all()


@pytest.mark.parametrize("distance", [0, 1, REACH - 1])
def test_a_cell_leads_back_to_its_row_wherever_it_lies_within_reach(distance: int) -> None:
    layout, random = layout_for(2**50, MOST), np.random.default_rng(8)
    size = (REACH << int(layout.implied)) + 77
    for position in random.integers(0, 2**50, 300).tolist():
        hashed = np.uint64(hash_of(position, layout))
        cell, bucket = (hashed << layout.implied) | np.uint64(1), bucket_in(hashed, size)
        assert hash_in(cell, bucket + distance, size, layout) == hashed


@pytest.mark.parametrize("distance", [1, 2, 1000, 2**20, 10**12 // 200_000])
def test_rows_at_any_distance_from_each_other_spread_over_the_buckets(distance: int) -> None:
    """Otherwise some would lie further from their own buckets than REACH, which is an error."""
    rows = TouchedRows(group_of(10**12), MOST)
    keys = np.concatenate([make_keys(table, np.arange(65_000) * distance) for table in TABLES])
    assert (rows.added(keys) == np.arange(len(keys))).all()
    buckets = rows._cells.reshape(-1, BUCKET)[: rows._sizes[SIZE]]
    full = np.flatnonzero(buckets[:, -1])
    longest = max(map(len, np.split(full, np.flatnonzero(np.diff(full) > 1) + 1)))
    assert longest < REACH // 4


def test_rows_that_are_added_beside_the_frontier_of_a_growth_are_found_again() -> None:
    group, expected = group_of(2**42 // 3), list[int]()
    rows, random = TouchedRows(group, MOST), np.random.default_rng(7)
    layout = layout_for(group.num_rows, rows.most)
    while len(expected) < 20_000:
        keys = some_keys(random, 2**42 // 3, 1)
        new = keys[rows.of(keys) == ABSENT]
        rows.added(keys)
        before, _, frontier = rows._sizes.tolist()
        if frontier:  # as many rows as fill the last bucket before it, and one more
            middle = (2 * frontier - 1) * 2**41 // before
            hashes = [np.uint64((middle + i) << 22) for i in random.integers(0, 2**16, BUCKET + 1).tolist()]
            positions = np.array([position_of(hashed, layout) for hashed in hashes], np.int64)
            keys = make_keys(0, positions % (2**42 // 3)) + (np.array(TABLES)[positions // (2**42 // 3)] << 48)
            keys = np.unique(keys)
            new = np.concatenate([new, keys[rows.of(keys) == ABSENT]])
            rows.added(keys)
        expected += new.tolist()
    assert (rows.of(np.sort(expected)) == np.argsort(expected)).all()


def test_rows_keep_their_numbers_at_every_frontier_of_a_growth() -> None:
    random, rows, added = np.random.default_rng(1), TouchedRows(group_of(10**9), MOST), np.empty(0, np.int64)
    frontiers, expected = set[int](), np.empty(0, np.int64)
    while len(added) < 6000:
        keys = some_keys(random, 10**9, 4)
        keys = keys[~np.isin(keys, added)]
        expected = np.concatenate([expected, rows.added(keys)])
        added = np.concatenate([added, keys])
        order = np.argsort(added)
        assert (rows.of(added[order]) == expected[order]).all()
        frontiers.add(int(rows._sizes[FRONTIER]))
    assert (expected == np.arange(len(added))).all()
    assert len(frontiers) > 20


@pytest.mark.parametrize("rows_a_table", [10**12, 2**48])
def test_keys_are_found_in_any_state_of_growth(rows_a_table: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touched_rows, "SORTED_AT_ONCE", 500)
    monkeypatch.setattr(touched_rows, "BUCKETS_AT_ONCE", 20)
    random, rows, states = np.random.default_rng(5), TouchedRows(group_of(rows_a_table), MOST), set[bool]()
    added = np.empty(0, np.int64)
    for _ in range(12):
        added = np.union1d(added, keys := some_keys(random, rows_a_table, 1500))
        rows.added(keys)
        chosen = added[random.random(len(added)) < 0.7]
        assert (keys_found(rows, bits_of(rows.of(chosen))) == chosen).all()
        states.add(bool(rows._sizes[FRONTIER]))
    assert states == ({False, True} if rows_a_table == 10**12 else {False})


def test_keys_are_found_while_rows_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touched_rows, "BUCKETS_AT_ONCE", 20)
    random, rows = np.random.default_rng(6), TouchedRows(group_of(10**12), MOST)
    early = some_keys(random, 10**12, 6000)
    bits = bits_of(rows.added(early))
    before = rows.count

    class AddsWhenReleased:
        """A lock. Whenever the search has let go of it, another thread adds rows."""

        adding = False

        @contextmanager
        def reading(self) -> Iterator[None]:
            yield
            if not self.adding:  # not the lock that `added` itself lets go of
                self.adding = True
                rows.added(some_keys(random, 10**12, 20))
                self.adding = False

        def changing(self) -> AbstractContextManager[None]:
            return nullcontext()

    monkeypatch.setattr(rows, "_lock", AddsWhenReleased())
    assert (np.concatenate([keys for keys, _ in rows.found(bits, TABLES, 10**6)]) == early).all()
    assert rows.count > 1.2 * before


def test_a_directory_takes_at_most_12_bytes_a_row() -> None:
    random, rows = np.random.default_rng(2), TouchedRows(group_of(10**12), MOST)
    while rows.count < 500_000:
        rows.added(some_keys(random, 10**12, 1000))
        assert rows.count < 50_000 or rows.nbytes <= touched_rows.ROW_BYTES * rows.count


def test_rows_are_found_while_another_thread_adds_some() -> None:
    random, rows = np.random.default_rng(3), TouchedRows(group_of(10**12), MOST)
    early = some_keys(random, 10**12, 2000)
    numbers = rows.added(early)
    later = [some_keys(random, 10**12, 2000) for _ in range(40)]
    adding = threading.Thread(target=lambda: [rows.added(keys) for keys in later])
    adding.start()
    while adding.is_alive():
        assert (rows.of(early) == numbers).all()
    adding.join()
    assert rows.count == len(np.unique(np.concatenate([early, *later])))


def test_readers_do_not_exclude_each_other_and_one_that_changes_excludes_all() -> None:
    lock, done = SharedLock(), list[str]()

    def change() -> None:
        with lock.changing():
            done.append("changed")

    def read() -> None:
        with lock.reading():
            done.append("read")

    with lock.reading():
        together = threading.Thread(target=read)
        together.start()
        together.join()
        changing = threading.Thread(target=change)
        changing.start()
        while not lock._num_changing:
            time.sleep(0.001)
        later = threading.Thread(target=read)
        later.start()
        later.join(0.02)
        assert done == ["read"]
    changing.join()
    later.join()
    assert done == ["read", "changed", "read"]


def test_threads_that_add_the_same_rows_agree_on_their_numbers() -> None:
    random, rows = np.random.default_rng(4), TouchedRows(group_of(10**12), MOST)
    parts = [some_keys(random, 10**12, 500) for _ in range(30)]
    found = list[list[I64]]()
    adding = [threading.Thread(target=lambda: found.append([rows.added(keys) for keys in parts])) for _ in range(2)]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert all(map(np.array_equal, *found))
    assert rows.count == len(np.unique(np.concatenate(parts)))


def test_more_rows_than_the_index_numbers_are_refused_by_that_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """26 tables of 2**48 rows hold 8,388,607; here a directory of as many rows holds three."""
    monkeypatch.setattr(touched_rows, "MOST_IMPLIED", -12)
    rows = TouchedRows(group_of(2**48), MOST)
    assert rows.most == most_indexed(3 * 2**48) == 3
    rows.added(np.arange(3))
    with pytest.raises(RowcastError) as refused:
        rows.added(np.arange(4))
    assert str(refused.value).endswith(
        f"has 4 trained rows, but an index of its {3 * 2**48} rows holds at most 3; lower num_embeddings of its "
        "tables: half the rows make room for twice as many trained ones"
    )
    assert "memory" not in str(refused.value)
    monkeypatch.undo()
    assert most_indexed(26 * 2**48) == 8_388_607
    assert most_indexed(13 * 2**48) >= 2 * most_indexed(26 * 2**48)


@pytest.mark.parametrize("kind", [IndexedRows, TouchedRows])
def test_more_rows_than_memory_holds_are_refused_and_none_is_added(kind: type[NumberedRows]) -> None:
    group = group_of(1000)
    rows = kind(group, 100)
    rows.added(np.arange(100))
    with pytest.raises(RowcastError, match=facts(f"group {group.name}", "101 trained rows", 100)):
        rows.added(np.arange(50, 101))
    assert rows.count == 100
    assert rows.of(np.array([100])).tolist() == [ABSENT]
