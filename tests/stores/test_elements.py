"""Values of fp16 and bf16: rounded as torch rounds them, and the first values of rows whose weights are rounded."""

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from rowcast.job.embedding_tables import RowType
from rowcast.job.tables import GroupSpec, group_specs, make_keys
from rowcast.prefetcher.stores.elements import elements_of, rounded, widened
from rowcast.prefetcher.stores.first_records import first_records
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.first_values import initial_rows
from rowcast.trainer.kernels import DTYPES
from tests.support.batches import small_job

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
def test_a_tie_goes_to_the_even_neighbour(dtype: RowType) -> None:
    bits = {"fp16": 10, "bf16": 7}[dtype]
    ulp = 2.0**-bits
    values = np.array([1 + ulp / 2, 1 + 3 * ulp / 2, -1 - ulp / 2, -1 - 3 * ulp / 2], np.float32)
    assert widened(rounded(values, dtype), dtype).tolist() == [1, 1 + 2 * ulp, -1, -1 - 2 * ulp]


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


@pytest.mark.parametrize("master", [False, True])
def test_stores_keep_half_rows_as_they_keep_any_record(master: bool) -> None:
    for group in groups_of("bf16", master=master):
        store = TrackedStore(MemoryStore(group), group, SEED)
        table = group.tables[0]
        keys = make_keys(table.index, np.arange(table.num_embeddings))
        records = first_records(group, SEED, keys)
        elements_of(records, group.parts[0])[::3] = 0x3F80  # one, in bf16
        finish(store.write(keys[::3], records[::3]))
        found = np.empty_like(records)
        finish(store.read(keys, found))
        assert np.array_equal(found, records)
        store.close()
