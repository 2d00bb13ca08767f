"""The chunks of long rows equal brute force, and never take more room than is set aside for them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.trainer.kernels import derived
from rowcast.trainer.kernels.derived import SPARE_ITEMS, cut_long_rows, derived_items, most_chunk_items

bounded = settings(derandomize=True, max_examples=300)
counts = st.lists(st.integers(0, 30) | st.just(3), max_size=30)  # look-ups of each row


@bounded
@given(counts)
def test_chunks_of_long_rows_equal_brute_force(counts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derived, "CHUNK_LOOKUPS", 3)
        found = cut_long_rows(np.cumsum([0, *counts], dtype=np.int32))
        most_items = most_chunk_items(sum(counts))
    long_rows = [row for row, count in enumerate(counts) if count > 3]
    num_chunks = [len(range(0, counts[row], 3)) for row in long_rows]
    assert found.long_rows.tolist() == long_rows
    assert found.chunk_offsets.tolist() == [sum(num_chunks[:k]) for k in range(len(long_rows) + 1)]
    assert found.chunk_rows.tolist() == [k for k, own in enumerate(num_chunks) for _ in range(own)]
    assert sum(map(len, found)) <= most_items
    assert {array.dtype for array in found} == {np.dtype(np.int32)}


@bounded
@given(st.lists(counts, min_size=1, max_size=5))
def test_groups_are_cut_together_as_each_by_itself(counts_of_groups: list[list[int]]) -> None:
    offsets = [np.cumsum([0, *own], dtype=np.int32) for own in counts_of_groups]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derived, "CHUNK_LOOKUPS", 3)
        places = [(sum(map(len, offsets[:g])), len(own) - 1, 0, 0) for g, own in enumerate(offsets)]
        room = sum(most_chunk_items(int(own[-1])) + SPARE_ITEMS for own in offsets)
        items, found = derived_items(np.concatenate(offsets), places, room)
        for ends, own in zip(found.tolist(), offsets, strict=True):
            for (first, end), expected in zip(ends[:-1], cut_long_rows(own), strict=True):
                array = items[first:end]
                assert array.dtype == np.int32
                assert array.tolist() == expected.tolist()


@pytest.mark.parametrize("num_lookups", [0, 1, 128, 129, 256, 258, 2**20])
def test_the_room_for_chunks_is_enough_where_all_rows_are_just_long_or_one_row_has_all(num_lookups: int) -> None:
    for segments in (np.append(np.arange(0, num_lookups, 129), num_lookups), np.array([0, num_lookups])):
        assert sum(map(len, cut_long_rows(segments.astype(np.int32)))) <= most_chunk_items(num_lookups)
