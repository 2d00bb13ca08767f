"""Numbers of touched rows: the directory behind tables that are larger than memory."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.tables import make_keys
from rowcast.prefetcher.stores import touched_rows
from rowcast.prefetcher.stores.store import ABSENT
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.runtime.arrays import I64, U64
from rowcast.runtime.errors import RowcastError
from rowcast.runtime.splitmix import FACTOR_1, FACTOR_2, GOLDEN

MOST = 10**6


def some_keys(random: np.random.Generator, num_rows: int, count: int) -> I64:
    tables = [make_keys(table, np.unique(random.integers(0, num_rows, count))) for table in (0, 3, 25)]
    return np.concatenate(tables)


@pytest.mark.parametrize("num_rows", [50, 10**6, 10**12])
def test_rows_keep_the_numbers_in_which_they_were_first_added(num_rows: int) -> None:
    random, rows, expected = np.random.default_rng(1), TouchedRows("g", MOST), dict[int, int]()
    for _ in range(60):
        asked = some_keys(random, num_rows, 700)
        assert rows.of(asked).tolist() == [expected.get(key, ABSENT) for key in asked.tolist()]
        added = some_keys(random, num_rows, 700)
        for key in added.tolist():
            expected.setdefault(key, len(expected))
        assert rows.added(added).tolist() == [expected[key] for key in added.tolist()]
        assert rows.count == len(expected)
    assert rows.keys[: rows.count].tolist() == list(expected)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sets(st.integers(0, 2**59), max_size=40), max_size=12))
def test_any_keys_are_found_again(batches: list[set[int]]) -> None:
    rows, expected = TouchedRows("g", MOST), dict[int, int]()
    for batch in batches:
        keys = np.array(sorted(batch), np.int64)
        for key in keys.tolist():
            expected.setdefault(key, len(expected))
        assert rows.added(keys).tolist() == [expected[key] for key in keys.tolist()]
    everything = np.array(sorted(expected), np.int64)
    assert rows.of(everything).tolist() == [expected[key] for key in everything.tolist()]


def test_rows_whose_cells_are_alike_are_told_apart() -> None:
    """Their hashes differ only in bits that neither a cell's tag nor the place of the search has."""
    hashes = np.uint64(0x123456789ABCDEF0) ^ (np.arange(200, dtype=np.uint64) << np.uint64(26))
    twins = np.sort(unmixed(hashes).view(np.int64))
    assert len({touched_rows.hash_of(key) & touched_rows.TAG for key in twins.tolist()}) == 1
    rows = TouchedRows("g", MOST)
    for own in (twins[::2], twins[1::2]):
        rows.added(own)
    assert rows.of(twins[::2]).tolist() == list(range(100))
    assert rows.of(twins[1::2]).tolist() == list(range(100, 200))


def unmixed(hashes: U64) -> U64:
    """The inverse of `hash_of`."""
    x = hashes
    for shift, factor in ((31, FACTOR_2), (27, FACTOR_1), (30, GOLDEN)):
        x = x ^ (x >> np.uint64(shift)) ^ (x >> np.uint64(2 * shift))
        x = x * np.uint64(pow(int(factor), -1, 2**64))
    return x


def test_a_directory_takes_at_most_12_bytes_a_row() -> None:
    random, rows = np.random.default_rng(2), TouchedRows("g", MOST)
    while rows.count < 500_000:
        rows.added(np.unique(random.integers(0, 10**12, 30_000)))
    assert rows.nbytes - 8 * rows.count <= 12 * rows.count


def test_rows_are_found_while_another_thread_adds_some() -> None:
    random, rows = np.random.default_rng(3), TouchedRows("g", MOST)
    early = np.unique(random.integers(0, 10**12, 5_000))
    numbers = rows.added(early)
    later = [np.unique(random.integers(0, 10**12, 5_000)) for _ in range(40)]
    adding = threading.Thread(target=lambda: [rows.added(keys) for keys in later])
    adding.start()
    while adding.is_alive():
        assert (rows.of(early) == numbers).all()
    adding.join()
    assert rows.count == len(np.unique(np.concatenate([early, *later])))


def test_more_rows_than_memory_holds_are_refused_and_none_is_added() -> None:
    rows = TouchedRows("fp32_d6_adagrad", 100)
    rows.added(np.arange(100))
    with pytest.raises(RowcastError, match=r"group fp32_d6_adagrad has 101 trained rows, .* holds at most 100; use "):
        rows.added(np.arange(50, 101))
    assert rows.count == 100
    assert rows.of(np.array([100])).tolist() == [ABSENT]
