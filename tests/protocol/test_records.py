"""Records: each part has aligned bytes and a dtype of its own; only tables with equal records share a group."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowcast.job.embedding_tables import RowType
from rowcast.job.optimizers import SparseOptimizer
from rowcast.job.schema import Job
from rowcast.job.tables import ALIGNMENT, group_specs, record_parts
from rowcast.runtime.errors import ConfigError
from tests.support import jobs
from tests.support.facts import facts

DTYPES: tuple[RowType, ...] = ("fp32", "fp16", "bf16")
KINDS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
NUM_STATES = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 1, "adam": 2}
STATE_NAMES = {"sgd": (), "adagrad": ("sum",), "rowwise_adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}


def settings_of(kind: str, *, master: bool) -> SparseOptimizer:
    return msgspec.convert({"kind": kind, "lr": 0.1, "master": master}, SparseOptimizer)


@given(st.sampled_from(KINDS), st.sampled_from(DTYPES), st.booleans(), st.integers(1, 4096))
def test_parts_are_aligned_never_overlap_and_end_within_the_record(
    kind: str, dtype: RowType, master: bool, dim: int
) -> None:
    parts, record_bytes = record_parts(settings_of(kind, master=master), dtype, dim)
    assert record_bytes % ALIGNMENT == 0
    assert parts[0].offset == 0
    for part, following in itertools.pairwise([part.bytes for part in parts] + [slice(record_bytes, record_bytes)]):
        assert part.start % ALIGNMENT == 0
        assert part.stop > part.start
        assert 0 <= following.start - part.stop < ALIGNMENT, (
            "parts follow each other with less than one alignment of padding"
        )
    for part in parts:
        item = 2 if part.dtype != "fp32" else 4
        assert (part.elements.start * item, part.elements.stop * item) == (part.offset, part.offset + part.nbytes)
        assert part.elements.stop - part.elements.start == part.width


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("master", [False, True])
def test_a_record_has_weights_then_the_master_that_was_asked_for_then_fp32_state(
    kind: str, dtype: RowType, master: bool
) -> None:
    parts, _ = record_parts(settings_of(kind, master=master), dtype, 5)
    expected: list[tuple[str, RowType]] = [("weight", dtype)]
    if master and dtype != "fp32":
        expected.append(("master", "fp32"))
    expected += [(name, "fp32") for name in STATE_NAMES[kind]]
    assert [(part.name, part.dtype) for part in parts] == expected
    assert [part.name for part in parts if part.initial is None] == [
        name for name, _ in expected[: len(expected) - NUM_STATES[kind]]
    ]


@pytest.mark.parametrize(
    ("dtype", "kind", "master", "record_bytes"),
    [
        ("fp32", "adagrad", False, 128),
        ("bf16", "adagrad", False, 96),
        ("bf16", "sgd", False, 32),
        ("fp16", "adagrad", True, 160),
    ],
)
def test_bytes_of_a_row_of_width_16(dtype: RowType, kind: str, master: bool, record_bytes: int) -> None:
    assert record_parts(settings_of(kind, master=master), dtype, 16)[1] == record_bytes


def job_of(*tables: tuple[str, int], capacity: str = "1MiB", **sparse: Any) -> Job:
    return jobs.job(
        tables=[jobs.table(f"t{i}", 9, dim, f"f{i}", dtype=dtype) for i, (dtype, dim) in enumerate(tables)],
        optimizer={"sparse": {"kind": "sgd", "lr": 0.1, **sparse}},
        cache={"capacity": capacity},
    )


def test_tables_share_a_group_where_dtype_and_width_are_equal() -> None:
    groups = group_specs(job_of(("bf16", 5), ("fp32", 5), ("fp16", 5), ("bf16", 8), ("bf16", 5)))
    assert {group.name: [table.index for table in group.tables] for group in groups} == {
        "bf16_d5_sgd": [0, 4],
        "fp32_d5_sgd": [1],
        "fp16_d5_sgd": [2],
        "bf16_d8_sgd": [3],
    }


def test_fp32_tables_of_a_job_with_master_weights_have_none() -> None:
    groups = group_specs(job_of(("bf16", 4), ("fp32", 4), master=True))
    assert {group.name: [part.name for part in group.parts] for group in groups} == {
        "bf16_d4_sgd_master": ["weight", "master"],
        "fp32_d4_sgd": ["weight"],
    }


def test_a_capacity_in_rows_is_of_one_kind_of_rows() -> None:
    assert job_of(("bf16", 4), ("bf16", 4), capacity="7 rows").cache.capacity_rows == 7
    for other in (("bf16", 5), ("fp16", 4)):
        with pytest.raises(ConfigError, match=facts("cache.capacity", "7 rows", "2 widths")):
            job_of(("bf16", 4), other, capacity="7 rows")
