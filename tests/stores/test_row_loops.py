"""Both loops of a kind read or write rows where they belong, and a fence ends those whose rows pass the caches."""

import re
from typing import Any

import numba
import numpy as np
import pytest

from rowcast.prefetcher.stores import row_loops
from rowcast.prefetcher.stores.row_loops import (
    LEAST_TO_PASS,
    LINE_WORDS,
    gather,
    gather_for,
    gather_lines,
    scatter,
    scatter_for,
    scatter_lines,
)
from rowcast.runtime.arrays import U64
from rowcast.runtime.compiled import STORES_PAST_CACHES

past_caches = pytest.mark.skipif(not STORES_PAST_CACHES, reason="needs an x86 processor")


def aligned(num_rows: int, width: int, shift: int = 0) -> U64:
    """Zeros from `shift` words behind the start of a cache line on."""
    words = np.zeros(num_rows * width + 2 * LINE_WORDS, np.uint64)
    start = -(words.ctypes.data // 8) % LINE_WORDS + shift
    return words[start : start + num_rows * width].reshape(num_rows, width)


@past_caches
@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 17, 500])
@pytest.mark.parametrize("width", [8, 24, 26, 64, 66, 70, 72])
def test_both_loops_write_the_same_rows(num_rows: int, width: int) -> None:
    random = np.random.default_rng(num_rows + width)
    positions = np.sort(random.choice(1000, num_rows, replace=False))
    positions[random.random(num_rows) < 0.1] = -1
    source = random.integers(0, 2**63, (num_rows, width), np.uint64)
    stored = -(-width // LINE_WORDS) * LINE_WORDS
    expected = np.zeros((1000, stored), np.uint64)
    expected[positions[positions >= 0], :width] = source[positions >= 0]
    for loop in (scatter, scatter_lines):
        words = aligned(1000, stored)
        loop(source, positions, words)
        assert np.array_equal(words, expected)


@past_caches
@pytest.mark.parametrize("num_rows", [0, 1, 11, 12, 13, 500])
@pytest.mark.parametrize("width", [8, 24, 64, 72])
def test_both_loops_read_the_same_rows(num_rows: int, width: int) -> None:
    random = np.random.default_rng(num_rows + width)
    words = random.integers(0, 2**63, (1000, width), np.uint64)
    positions = random.integers(-1, 1000, num_rows)
    read = [aligned(num_rows, width), aligned(num_rows, width)]
    absent = [loop(words, positions, out) for loop, out in zip((gather, gather_lines), read, strict=True)]
    present = positions >= 0
    assert absent == [num_rows - present.sum()] * 2
    for out in read:
        assert np.array_equal(out, np.where(present[:, None], words[positions], 0))


@pytest.mark.parametrize("width", [2, 26, 66, 71])
def test_what_a_record_leaves_of_its_last_line_is_not_read(width: int) -> None:
    words = np.random.default_rng(width).integers(0, 2**63, (1000, width + 1), np.uint64)
    positions, out = np.array([3, -1, 999, 0]), np.zeros((4, width), np.uint64)
    assert gather(words, positions, out) == 1
    assert np.array_equal(out[[0, 2, 3]], words[[3, 999, 0], :width])
    assert not out[1].any()


@past_caches
def test_only_many_whole_cache_lines_are_read_past_the_caches() -> None:
    width = 64
    num_rows = LEAST_TO_PASS // (8 * width)
    assert gather_for(aligned(num_rows, width)) is gather_lines
    assert gather_for(aligned(num_rows - 1, width)) is gather
    assert gather_for(aligned(num_rows, width, shift=1)) is gather
    assert gather_for(aligned(num_rows, width + 1)) is gather


@past_caches
def test_only_long_records_of_whole_cache_lines_pass_the_caches() -> None:
    assert scatter_for(aligned(10, 64)) is scatter_lines
    assert scatter_for(aligned(10, 24)) is scatter_lines
    assert scatter_for(aligned(10, 16)) is scatter
    assert scatter_for(aligned(10, 60)) is scatter
    assert scatter_for(aligned(10, 64, shift=1)) is scatter


def test_other_processors_take_the_ordinary_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_loops, "STORES_PAST_CACHES", False)
    assert scatter_for(aligned(10, 64)) is scatter


@past_caches
@pytest.mark.parametrize("loop", [gather_lines, scatter_lines])
def test_a_fence_follows_the_last_store_past_the_caches(loop: Any) -> None:
    again = numba.njit(nogil=True, _nrt=False)(loop.py_func)
    rows, positions = aligned(3, 64), np.arange(3)
    of_gather, of_scatter = (rows, positions, aligned(3, 64)), (aligned(3, 64), positions, rows)
    again(*(of_gather if loop is gather_lines else of_scatter))
    (code,) = again.inspect_asm().values()
    instructions = re.findall(r"^\s+(v?movnt\w+|sfence|ret\w*)\b", code, re.MULTILINE)
    stores = [at for at, name in enumerate(instructions) if "movnt" in name]
    assert stores
    assert "sfence" in instructions[stores[-1] :]
