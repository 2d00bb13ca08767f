"""Values of fp16 and bf16 are rounded as torch rounds them; no element that is NaN or infinite is missed."""

import itertools

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rowcast.job.embedding_tables import RowType
from rowcast.job.tables import GroupSpec, group_specs, make_keys
from rowcast.prefetcher.stores.records import FiniteRows, elements_of, first_fault, first_records, rounded, widened
from rowcast.protocol.first_values import initial_rows
from rowcast.runtime.stages import ThreadPool
from rowcast.trainer.kernels import DTYPES
from tests.support.batches import small_job
from tests.support.jobs import job, table

HALVES: tuple[RowType, ...] = ("fp16", "bf16")
SEED = 11
EVERY_HALF = np.arange(2**16, dtype=np.uint32).astype(np.uint16)


def by_torch(values: npt.NDArray[np.float32], dtype: RowType) -> Tensor:
    return torch.from_numpy(values).to(DTYPES[dtype]).view(torch.int16)


def by_us(values: npt.NDArray[np.float32], dtype: RowType) -> Tensor:
    return torch.from_numpy(rounded(values, dtype).view(np.int16))


def interesting_values(dtype: RowType) -> npt.NDArray[np.float32]:
    """Every finite value, ties between neighbours, fp32 values beside them, infinities, zeros, fp32 subnormals."""
    every = torch.from_numpy(EVERY_HALF.view(np.int16)).view(DTYPES[dtype]).float().numpy()
    finite = np.sort(every[np.isfinite(every)]).astype(np.float64)
    ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(ties, np.float32(way)) for way in (-np.inf, np.inf)]
    special = np.array(
        [np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 65519.0, 65520.0, -65520.0, 3.3961776e38, 3.4028235e38], np.float32
    )
    return np.concatenate([finite.astype(np.float32), ties, *beside, special])


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_has_the_bits_of_torchs_conversion(dtype: RowType) -> None:
    anything = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint64).astype(np.uint32).view(np.float32)
    values = np.concatenate([interesting_values(dtype), anything[~np.isnan(anything)]])
    assert torch.equal(by_us(values, dtype), by_torch(values, dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_nan_stays_a_nan(dtype: RowType) -> None:
    values = np.array([0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(widened(rounded(values, dtype), dtype)).all()


@pytest.mark.parametrize("dtype", [*HALVES, "fp32"])
def test_widening_is_exact_and_rounding_takes_it_back(dtype: RowType) -> None:
    every = (
        EVERY_HALF.view(np.float16)
        if dtype == "fp16"
        else EVERY_HALF
        if dtype == "bf16"
        else np.linspace(-9, 9, 50, dtype=np.float32)
    )
    wide = widened(every, dtype)
    numbers = ~np.isnan(wide)
    assert numbers.any()
    assert np.array_equal(rounded(wide, dtype)[numbers].view(np.uint8), every[numbers].view(np.uint8))
    torch_dtype = DTYPES[dtype]
    assert torch.equal(
        torch.from_numpy(every[numbers].view(np.uint8)).view(torch_dtype).float(), torch.from_numpy(wide[numbers])
    )


def groups_of(dtype: RowType, *, master: bool) -> tuple[GroupSpec, ...]:
    """Adagrad rows of 5 and of 8 values."""
    job = small_job("adagrad", dtypes=(dtype,) * 4, master=master)
    sparse = msgspec.structs.replace(job.optimizer.sparse, initial_accumulator=0.25)
    return group_specs(msgspec.structs.replace(job, optimizer=msgspec.structs.replace(job.optimizer, sparse=sparse)))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("master", [False, True])
def test_first_records_hold_rounded_weights_unrounded_masters_and_initial_state(dtype: RowType, master: bool) -> None:
    for group in groups_of(dtype, master=master):
        table = group.tables[1]
        rows = np.arange(table.num_embeddings)
        records = first_records(group, SEED, make_keys(table.index, rows))
        values = torch.from_numpy(initial_rows(SEED, table, rows))
        expected = torch.zeros(len(rows), group.record_bytes, dtype=torch.uint8)
        for part in group.parts:
            content = torch.full((len(rows), part.width), 0.25) if part.name == "sum" else values.to(DTYPES[part.dtype])
            expected[:, part.bytes] = content.view(torch.uint8)
        assert len(group.parts) == 2 + master
        assert torch.equal(torch.from_numpy(records), expected)
        assert not torch.equal(values.to(DTYPES[dtype]).float(), values), "no value needed rounding"


LAYOUTS = [
    (dtype, optimizer, master)
    for dtype, optimizer, master in itertools.product(
        ("fp32", "fp16", "bf16"), ("sgd", "adagrad", "rowwise_adagrad", "adam"), (False, True)
    )
    if not (dtype == "fp32" and master)
]
EXPONENTS = {np.dtype("float32"): 0x7F80_0000, np.dtype("float16"): 0x7C00, np.dtype("uint16"): 0x7F80}  # bf16


def users_of(dtype: str, optimizer: str, master: bool, dim: int = 5) -> GroupSpec:
    sparse = {"kind": optimizer, "lr": 0.1, "master": master}
    [group] = group_specs(job(tables=[table("users", 9, dim, dtype=dtype)], optimizer={"sparse": sparse}))
    return group


@pytest.mark.parametrize(("dtype", "optimizer", "master"), LAYOUTS)
def test_every_place_of_a_record_is_looked_at_and_named(dtype: str, optimizer: str, master: bool) -> None:
    group = users_of(dtype, optimizer, master)
    finite, keys = FiniteRows(group), np.arange(9)
    for part in group.parts:
        for column in range(part.width):
            records = np.zeros((9, group.record_bytes), np.uint8)
            elements = elements_of(records, part)
            unsigned = elements.view(f"u{elements.itemsize}")
            infinity = EXPONENTS[elements.dtype]
            sign = 1 << (8 * elements.itemsize - 1)
            for bits, shown in ((infinity, "inf"), (infinity | sign, "-inf"), (infinity + 1, "nan"), (sign - 1, "nan")):
                unsigned[7, column] = bits
                assert finite.fault(keys, records) == f"row 7 of table users: {part.name}[{column}] is {shown}"
            for bits in (infinity - 1, infinity - 1 | sign, 1, sign, 0):
                unsigned[7, column] = bits
                assert finite.fault(keys, records) == ""


@given(st.sampled_from(LAYOUTS), st.integers(1, 40), st.integers(0, 2**32))
def test_records_of_any_bits_are_finite_as_numpy_says(layout: tuple[str, str, bool], dim: int, seed: int) -> None:
    group, rng = users_of(*layout, dim=dim), np.random.default_rng(seed)
    records = np.zeros((3, group.record_bytes), np.uint8)
    for part in group.parts:
        elements_of(records, part).view(np.uint8)[:] = rng.integers(0, 256, (3, part.nbytes))
    shown = FiniteRows(group).fault(np.arange(3), records)
    wide = [elements_of(records, part) for part in group.parts]
    wide = [own.astype(np.uint32) << 16 if own.dtype == np.uint16 else own for own in wide]
    rows = np.all([np.isfinite(own.view(np.float32) if own.dtype == np.uint32 else own).all(1) for own in wide], axis=0)
    assert shown.startswith("" if rows.all() else f"row {np.argmin(rows)} of table users: ")
    assert bool(shown) == (not rows.all())


@given(st.lists(st.tuples(st.sampled_from(LAYOUTS), st.integers(0, 12)), max_size=4), st.integers(0, 2**32))
def test_any_number_of_threads_names_the_first_row_that_is_not_finite(
    pieces: list[tuple[tuple[str, str, bool], int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    groups, rows = [users_of(*layout) for layout, _ in pieces], []
    for number, (group, (_, count)) in enumerate(zip(groups, pieces, strict=True)):
        records = np.zeros((count, group.record_bytes), np.uint8)
        if count and rng.random() < 0.5:
            part = group.parts[rng.integers(len(group.parts))]
            elements_of(records, part)[rng.integers(count), rng.integers(part.width)] = (
                0xFFFF if (part.dtype == "bf16") else np.nan
            )
        rows.append((number, np.arange(count), records))
    finite = [FiniteRows(group) for group in groups]
    faults = [finite[number].fault(keys, records) for number, keys, records in rows]
    for num_threads in (1, 2, 3):
        shown = first_fault(finite, rows, ThreadPool(num_threads, least=3))
        assert shown == next(filter(None, faults), "")
