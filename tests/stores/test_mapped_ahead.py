"""A mapped store brings the pages of coming steps into memory, and only those; no row depends on it."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.prefetcher.stores import pages_ahead
from rowcast.prefetcher.stores.mapped_store import file_layout
from rowcast.prefetcher.stores.store import Keys, RowStore
from rowcast.prefetcher.stores.table_header import HEADER_BYTES
from rowcast.protocol.plan import GroupPlan
from rowcast.runtime.arrays import I64, Bytes
from tests.stores.every_store import (
    STORES,
    all_keys,
    finish,
    groups,
    keys_of,
    open_mapped,
    opened,
    random_records,
    read,
)
from tests.support.three_steps import step_plan

LARGE = groups(500)[0]  # 20,000, 150,000 and 3,500 rows
NONE = np.empty(0, np.int64)
MINCORE = ctypes.CDLL(None).mincore
FAR_APART = [0, 5_000, 10_000, 15_000]  # rows of the first table, none on another's page


def plan_of(fetched: Keys, victims: Keys = NONE, num_dirty: int | None = None) -> GroupPlan:
    num_dirty = len(victims) if num_dirty is None else num_dirty
    return replace(step_plan().groups[0], fetch_keys=fetched, evict_keys=victims, num_dirty=num_dirty)


class Cold:
    """A store with the rows FAR_APART, none of whose pages is in memory."""

    def __init__(self, folder: Path) -> None:
        self.store = open_mapped(folder, LARGE)
        self.rows = random_records(len(FAR_APART))
        finish(self.store.write(keys_of((0, FAR_APART)), self.rows))
        self.file = os.open(folder / f"{LARGE.name}.rows", os.O_RDONLY)
        self.pages = np.frombuffer(mmap.mmap(self.file, 0, prot=mmap.PROT_READ), np.uint8)  # only to ask for, not read
        self.drop()

    def drop(self) -> None:
        assert self.store._memory is not None
        self.store._memory.flush()
        self.store._memory.madvise(mmap.MADV_DONTNEED)  # a mapped page cannot be dropped
        os.fsync(self.file)
        os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)
        if any(self.is_there(row) for row in FAR_APART):
            pytest.skip("the file system of the temporary folder keeps its files in memory")

    def is_there(self, row: int) -> bool:
        return self.has_page(file_layout(LARGE)[0] + row * LARGE.record_bytes)

    def has_page(self, offset: int) -> bool:
        state, page = (ctypes.c_ubyte * 1)(), offset // mmap.PAGESIZE * mmap.PAGESIZE
        assert MINCORE(ctypes.c_void_p(self.pages.ctypes.data + page), ctypes.c_size_t(mmap.PAGESIZE), state) == 0
        return bool(state[0] & 1)

    def close(self) -> None:
        os.close(self.file)
        self.store.close()


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Cold]:
    with closing(Cold(tmp_path)) as made:
        yield made


def test_pages_of_rows_that_a_plan_reads_or_writes_are_in_memory_once_it_was_staged(cold: Cold) -> None:
    first, _, third, last = FAR_APART
    cold.store.stage(7, plan_of(keys_of((0, [first])), keys_of((0, [third, last])), num_dirty=1))
    assert [cold.is_there(row) for row in FAR_APART] == [False] * 4, "the planning thread does not read"
    assert cold.store.advance(None)
    assert [cold.is_there(row) for row in FAR_APART] == [True, False, True, False], "read, other, dirty, dropped"
    assert not cold.store.advance(None)
    out = np.empty((4, LARGE.record_bytes), np.uint8)
    finish(cold.store.read(keys_of((0, FAR_APART)), out))
    assert np.array_equal(out, cold.rows)


def test_no_page_is_read_for_a_row_that_was_never_written(cold: Cold) -> None:
    cold.store.stage(0, plan_of(keys_of((0, [row + 1 for row in FAR_APART]))))
    assert cold.store.advance(None)
    assert cold.has_page(HEADER_BYTES + FAR_APART[0]), "the mark tells that the row was never written"
    assert [cold.is_there(row) for row in FAR_APART] == [False] * 4


def test_a_step_that_the_trainer_has_passed_is_not_read(cold: Cold) -> None:
    for step, row in enumerate(FAR_APART):
        cold.store.stage(step, plan_of(keys_of((0, [row]))))
    assert cold.store.advance(1)
    assert [cold.is_there(row) for row in FAR_APART] == [False, False, True, False]
    assert not cold.store.advance(3)
    assert not cold.is_there(FAR_APART[3])


def test_the_kernel_is_not_asked_for_pages_that_are_there(cold: Cold, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask_for = list[int](), pages_ahead.ask_for

    def counting(file: Bytes, offset: int, stride: int, numbers: I64) -> None:
        asked.append(stride)
        ask_for(file, offset, stride, numbers)

    monkeypatch.setattr(pages_ahead, "ask_for", counting)
    for step in range(2):
        cold.store.stage(step, plan_of(keys_of((0, FAR_APART))))
        assert cold.store.advance(None)
    assert asked == [1, LARGE.record_bytes], "marks and records of the first step"


@settings(deadline=None)
@given(
    st.sets(st.integers(0, 400), min_size=1),
    st.sampled_from([1, 80, 4096, 4097, 9000]),
    st.sampled_from([mmap.PAGESIZE, 3 * mmap.PAGESIZE]),
)
def test_every_page_of_the_records_is_asked_for_once_and_neighbours_in_one_piece(
    rows: set[int], stride: int, offset: int
) -> None:
    file, numbers = np.empty(1, np.uint8), np.array(sorted(rows), np.int64)
    pieces = list[range]()

    def record(address: int, nbytes: int, advice: int) -> int:
        assert (nbytes % mmap.PAGESIZE, advice) == (0, mmap.MADV_WILLNEED)
        first = (address - file.ctypes.data) // mmap.PAGESIZE
        pieces.append(range(first, first + nbytes // mmap.PAGESIZE))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages_ahead, "c_madvise", record)
        pages_ahead.ask_for.py_func(file, offset, stride, numbers)  # type: ignore[attr-defined]
    begins = [offset + row * stride for row in sorted(rows)]
    expected = {page for at in begins for page in range(at // mmap.PAGESIZE, (at + stride - 1) // mmap.PAGESIZE + 1)}
    pieces = [piece for piece in pieces if piece]
    assert [page for piece in pieces for page in piece] == sorted(expected)
    assert all(before.stop < after.start for before, after in pairwise(pieces))


row_sets = st.sets(st.integers(0, len(all_keys()) - 1), max_size=30)


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=20, deadline=None)
@given(operations=st.lists(st.tuples(st.sampled_from(["stage", "advance", "read", "write"]), row_sets), max_size=15))
def test_no_hint_changes_a_row_of_any_store(kind: str, operations: list[tuple[str, set[int]]]) -> None:
    with opened(kind) as store:
        agree_with_a_dictionary(store, operations)


def agree_with_a_dictionary(store: RowStore, operations: list[tuple[str, set[int]]]) -> None:
    expected: dict[int, bytes] = {}
    for number, (operation, chosen) in enumerate(operations):
        keys = all_keys()[sorted(chosen)]
        if operation == "stage":
            store.stage(number, plan_of(keys[::2], keys[1::2]))
        elif operation == "advance":
            store.advance(number - len(chosen) if chosen else None)
        elif operation == "write":
            rows = random_records(len(keys), number)
            finish(store.write(keys, rows))
            expected |= {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}
        else:
            own = [key for key in keys.tolist() if key in expected]
            assert [row.tobytes() for row in read(store, np.array(own, np.int64))] == [expected[key] for key in own]
