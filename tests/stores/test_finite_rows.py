"""No element of a record that is NaN or infinite is missed, and no other is found."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.stores.elements import FiniteRows, elements_of, first_fault
from rowcast.runtime.stages import ThreadPool
from tests.support.jobs import job, table

LAYOUTS = [
    (dtype, optimizer, master)
    for dtype, optimizer, master in itertools.product(
        ("fp32", "fp16", "bf16"), ("sgd", "adagrad", "rowwise_adagrad", "adam"), (False, True)
    )
    if not (dtype == "fp32" and master)
]
EXPONENTS = {np.dtype("float32"): 0x7F80_0000, np.dtype("float16"): 0x7C00, np.dtype("uint16"): 0x7F80}  # bf16


def group_of(dtype: str, optimizer: str, master: bool, dim: int = 5) -> GroupSpec:
    sparse = {"kind": optimizer, "lr": 0.1, "master": master}
    [group] = group_specs(job(tables=[table("users", 9, dim, dtype=dtype)], optimizer={"sparse": sparse}))
    return group


@pytest.mark.parametrize(("dtype", "optimizer", "master"), LAYOUTS)
def test_every_place_of_a_record_is_looked_at_and_named(dtype: str, optimizer: str, master: bool) -> None:
    group = group_of(dtype, optimizer, master)
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
    group, rng = group_of(*layout, dim=dim), np.random.default_rng(seed)
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
    groups, rows = [group_of(*layout) for layout, _ in pieces], []
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
