"""The checksum has the same bits on both sides, and notices what it says it notices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.prefetcher.verify.checksum_loops import row_checksums
from rowcast.protocol.messages import RowChecksums
from rowcast.protocol.row_checksum import (
    CHECKED_WORDS,
    MESSAGE_BYTES,
    checksum_messages,
    checksums_of,
    column_constants,
)
from rowcast.runtime.arrays import I64
from rowcast.trainer.step.row_checksums import BLOCK_WORDS, write_checksums

WORD = st.integers(-(2**31), 2**31 - 1)


def by_definition(words: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]") -> list[int]:
    constants = column_constants(words.shape[1]).tolist()
    sums = [sum(word * constant for word, constant in zip(row, constants, strict=True)) for row in words.tolist()]
    return [(total + 2**63) % 2**64 - 2**63 for total in sums]


def by_numba(words: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]", places: I64) -> I64:
    out = np.empty(len(places), np.int64)
    row_checksums(words, places, column_constants(words.shape[1]), out)
    return out


@pytest.mark.parametrize(("num_rows", "num_words"), [(1, 4), (7, 12), (300, 32), (5, 1024), (BLOCK_WORDS // 4 + 3, 4)])
def test_numba_and_torch_compute_the_same_bits_for_rows_in_any_order(num_rows: int, num_words: int) -> None:
    rng = np.random.default_rng(num_rows)
    words = rng.integers(-(2**31), 2**31, (num_rows, num_words)).astype(np.int32)
    words[0] = -(2**31)
    places = rng.permutation(num_rows)
    out = torch.empty(num_rows, dtype=torch.int64)
    rows = torch.from_numpy(words).view(torch.float32)
    write_checksums(rows, torch.from_numpy(places.astype(np.int32)), torch.from_numpy(column_constants(num_words)), out)
    assert out.numpy().tobytes() == by_numba(words, places).tobytes()
    shown = places[:300]
    assert by_numba(words, shown).tolist() == by_definition(words[shown])


@settings(max_examples=300, deadline=None)
@given(st.lists(WORD, min_size=4, max_size=16), st.data())
def test_any_change_of_one_word_changes_the_checksum(row: list[int], data: st.DataObject) -> None:
    place, other = data.draw(st.integers(0, len(row) - 1)), data.draw(WORD)
    changed = [*row]
    changed[place] = other
    sums = by_numba(np.array([row, changed], np.int32), np.arange(2))
    assert (sums[0] == sums[1]) == (other == row[place])


@settings(max_examples=300, deadline=None)
@given(st.lists(WORD, min_size=4, max_size=16), st.data())
def test_two_words_that_change_places_change_the_checksum(row: list[int], data: st.DataObject) -> None:
    a, b = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(0, len(row) - 1))
    changed = [*row]
    changed[a], changed[b] = row[b], row[a]
    sums = by_numba(np.array([row, changed], np.int32), np.arange(2))
    assert (sums[0] == sums[1]) == (row[a] == row[b])


def test_the_constants_are_odd_and_differ_in_their_low_halves() -> None:
    constants = column_constants(CHECKED_WORDS)
    assert (constants & 1).all()
    assert len(np.unique(constants & (2**32 - 1))) == CHECKED_WORDS


def test_checksums_travel_in_messages_of_bounded_size() -> None:
    checksums = np.arange(-5, MESSAGE_BYTES // 4, dtype=np.int64)
    messages = list(checksum_messages(7, None, checksums))
    assert len(messages) == 3
    assert all(isinstance(message, RowChecksums) and len(message.checksums) <= MESSAGE_BYTES for message in messages)
    assert [message.start for message in messages] == [0, MESSAGE_BYTES // 8, MESSAGE_BYTES // 4]
    assert np.concatenate([checksums_of(message) for message in messages]).tolist() == checksums.tolist()
    assert list(checksum_messages(7, None, checksums[:0])) == []
