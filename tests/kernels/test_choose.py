"""Which kernels a device gets, and how long rows are cut into chunks."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.trainer import kernels
from rowcast.trainer.kernels import SPARE_ITEMS, cut_long_rows, derived_items, most_chunk_items, torch_ops
from rowcast.trainer.kernels.choose import choose_kernels
from tests.support.full_capacity import make_job


def test_a_cuda_device_gets_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_ops = pytest.importorskip("rowcast.trainer.kernels.triton_ops")
    monkeypatch.setattr(triton_ops, "make_launcher", lambda: None)
    assert choose_kernels(torch.device("cuda", 0)) is triton_ops


@pytest.mark.parametrize("cause", [RuntimeError("Failed to find C compiler."), subprocess.CalledProcessError(1, "gcc")])
def test_a_cuda_device_whose_launcher_cannot_be_made_gets_torch_and_a_warning(
    cause: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton_ops = pytest.importorskip("rowcast.trainer.kernels.triton_ops")

    def fail() -> None:
        raise cause

    monkeypatch.setattr(triton_ops, "make_launcher", fail)
    assert choose_kernels(torch.device("cuda", 0)) is torch_ops
    said = capsys.readouterr()
    assert (said.out + said.err).count("kernels in plain torch operations") == 1


def test_a_cuda_device_with_rows_too_wide_for_triton_gets_torch_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton_ops = pytest.importorskip("rowcast.trainer.kernels.triton_ops")
    monkeypatch.setattr(triton_ops, "make_launcher", lambda: None)
    tables = [{"name": "wide", "num_embeddings": 9, "embedding_dim": 1025, "features": ["a"]}]
    job = make_job(tables, model={"bottom_mlp": [1025], "top_mlp": [1]})
    assert choose_kernels(torch.device("cuda", 0), job) is torch_ops
    said = capsys.readouterr()
    assert "rows of 1025 columns" in said.out + said.err


def test_a_cuda_device_without_triton_gets_torch_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("triton_ops", "triton_kernels"):
        monkeypatch.delitem(sys.modules, f"trainer.kernels.{name}", raising=False)
        monkeypatch.delattr(kernels, name, raising=False)
    assert choose_kernels(torch.device("cuda", 0)) is torch_ops
    said = capsys.readouterr()
    assert (said.out + said.err).count("kernels in plain torch operations") == 1


def test_torch_s_defaults_change_no_choice() -> None:
    job = make_job([{"name": "a", "num_embeddings": 9, "embedding_dim": 4, "features": ["a"]}])
    torch.set_default_dtype(torch.float64)
    try:
        assert choose_kernels(torch.device("cpu"), job) is not torch_ops
    finally:
        torch.set_default_dtype(torch.float32)


bounded = settings(derandomize=True, max_examples=300)
counts = st.lists(st.integers(0, 30) | st.just(3), max_size=30)  # look-ups of each row


@bounded
@given(counts)
def test_chunks_of_long_rows_equal_brute_force(counts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK_LOOKUPS", 3)
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
        patch.setattr(kernels, "CHUNK_LOOKUPS", 3)
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
