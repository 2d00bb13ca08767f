"""Every number that a reader or a script gives is trained as it is, rounded as decimals are, or refused.

The walks go over the tables in docs/data.md: roles, dtypes and edge values.
"""

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rowcast.prefetcher.readers.formats.custom import BatchCheck
from rowcast.prefetcher.readers.formats.user_arrays import as_batch
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.protocol.batch import Batch
from rowcast.runtime.errors import DataError
from tests.support import jobs
from tests.support.data_files import table

INF, NAN = math.inf, math.nan
FP32_MAX = float(np.finfo(np.float32).max)
WHOLE = [
    2**24,
    2**24 + 1,
    -(2**24),
    -(2**24) - 1,
    2**24 + 2,
    2**31 - 1,
    2**53,
    2**53 + 1,
    -(2**63),
    2**63 - 1,
    2**64 - 1,
]
DECIMAL = [0.1, 2**24 + 0.5, 1e9 + 0.1, FP32_MAX, -FP32_MAX, 1e39, -1e39, 1e300, -0.0, 1e-45, 1e-310, INF, -INF, NAN]
EDGES: list[int | float] = [0, 1, -1, *WHOLE, *DECIMAL]
ROLES = ("dense", "label", "labels", "weight")
ROW = 2  # of the odd value
SMALL = [1.0, 0.0, 1.0, 0.0]


def expected(value: float, role: str) -> float | None:
    """What a model gets for an exact number; None if it is refused."""
    if not math.isfinite(value):
        return NAN if math.isnan(value) and role == "labels" else None
    if isinstance(value, int):
        return float(value) if significant_bits(value) <= 24 else None
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    is_changed = value.is_integer() and rounded != value
    return None if is_changed or math.isinf(rounded) else rounded


def significant_bits(whole: int) -> int:
    return len(f"{abs(whole):b}".rstrip("0"))


def job_of(format: str, role: str, **data: Any) -> Any:
    columns: dict[str, Any] = {"label_values": "real"}
    columns |= {"labels": ["y", "z"]} if role == "labels" else {}
    columns |= {"weights": {"cat_0": "w"}} if role == "weight" else {}
    columns |= {"dense": ["x"], "label": "y"} if format in ("parquet", "csv") else {}
    if role == "labels":
        columns.pop("label", None)
    return jobs.job(
        data={"format": format, "columns": columns, **data},
        tables=[table("t", 10, "cat_0")],
        model={"kind": "examples.mmoe:build"},
    )


def got(batch: Batch, role: str) -> float:
    found: Any = {"dense": batch.dense, "label": batch.labels, "labels": batch.labels, "weight": batch.weights}[role]
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    return float(found.reshape(4, -1)[ROW, 0])


def columns_of(role: str, values: Any, small: Any) -> dict[str, Any]:
    column = {"dense": "x", "label": "y", "labels": "y", "weight": "w"}[role]
    return {"cat_0": [0, 1, 2, 3], "x": small, "y": small, "z": small, "w": small} | {column: values}


def through_parquet(folder: Path, role: str, values: Any) -> Batch:
    pq.write_table(pa.table(columns_of(role, values, SMALL)), folder / "a.parquet")
    [batch] = open_reader(job_of("parquet", role, path=str(folder))).batches("train", 0)
    return batch


def through_csv(folder: Path, role: str, values: Any) -> Batch:
    columns = columns_of(role, values, [1, 0, 1, 0])
    with (folder / "a.csv").open("w") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    [batch] = open_reader(job_of("csv", role, path=str(folder / "a.csv"))).batches("train", 0)
    return batch


def through_npy(folder: Path, role: str, values: Any) -> Batch:
    several = [values, np.zeros(4, values.dtype)] if role == "labels" else [values]
    parts: dict[str, Any] = {
        "dense": np.ones((4, 1), np.float32),
        "sparse": np.arange(4)[:, None],
        "labels": np.stack(several, 1),
    }
    for part, array in parts.items():
        np.save(folder / f"day_0_{part}.npy", values[:, None] if part == role == "dense" else array)
    [batch] = open_reader(job_of("criteo-npy", role, path=str(folder))).batches("train", 0)
    return batch


def through_script(folder: Path, role: str, values: Any) -> Batch:
    small = np.array(SMALL, np.float32)
    ids = {"keys": lambda: ["cat_0"], "values": lambda: np.arange(4), "lengths": lambda: np.ones(4, np.int64)}
    sparse = SimpleNamespace(**ids, weights_or_none=lambda: values)
    labels = values if role == "label" else small
    if role == "labels":
        stack: Any = torch.stack if isinstance(values, torch.Tensor) else np.stack
        labels = stack([values, values], 1)
    offered = {
        "dense": values[:, None] if role == "dense" else small[:, None],
        "sparse": sparse if role == "weight" else {"cat_0": np.arange(4)},
        "labels": labels,
    }
    return BatchCheck(job_of("tests.readers.factories:iterable", role)).check(offered, "here")


def check(through: Callable[[Path, str, Any], Batch], folder: Path, role: str, values: Any, value: float) -> None:
    """`value`: exactly what `values` hold in ROW."""
    right = expected(value, role)
    if right is None:
        with pytest.raises(DataError) as caught:
            through(folder, role, values)
        sentence = str(caught.value)
        assert re.search(r"row 2|line 4|sample 2|look-up 2|\[2(, 0)?\]", sentence), sentence
        assert math.isnan(value) or str(value) in sentence or str(float(value)) in sentence, sentence
    else:
        found = got(through(folder, role, values), role)
        assert np.array_equal(np.float32(found), np.float32(right), equal_nan=True), (value, found)
        assert math.copysign(1, found) == math.copysign(1, right) or math.isnan(right)


NUMPY = [
    np.dtype(name)
    for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", ">i8", ">f8", ">f4")
]


def fitting(dtype: np.dtype[Any]) -> list[tuple[Any, float]]:
    """The edges that the dtype holds: four values with it, and it as an exact number of Python."""
    found = {}
    for edge in EDGES:
        with np.errstate(all="ignore"):
            try:
                values = (
                    np.array([1, 0, edge, 0]).astype(dtype) if dtype.kind in "fb" else np.array([1, 0, edge, 0], dtype)
                )
            except (OverflowError, ValueError):
                continue
        exact = values[ROW]
        is_wide = dtype.itemsize > 8 and abs(exact) > 1 and exact == np.rint(exact)
        is_whole = dtype.kind in "biu" or is_wide
        exact = int(exact) if is_whole and np.isfinite(exact) else float(exact)
        found[repr(exact)] = values, exact
    return list(found.values())


def test_the_walks_are_over_values_that_are_kept_rounded_and_refused() -> None:
    for role in ROLES:
        outcomes = [expected(edge, role) for edge in EDGES]
        assert None in outcomes
        assert any(found == edge for found, edge in zip(outcomes, EDGES, strict=True))
    counts = {name: len(fitting(np.dtype(name))) for name in ("?", "i8", "u8", "f4", "f8")}
    assert counts == {"?": 2, "i8": 14, "u8": 11, "f4": 20, "f8": 27}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", NUMPY, ids=str)
def test_a_scripts_array_is_kept_or_refused(dtype: np.dtype[Any], role: str, tmp_path: Path) -> None:
    for values, value in fitting(dtype):
        check(through_script, tmp_path, role, values, value)
        wider = np.repeat(values, 2)[::2]  # strided
        wider.flags.writeable = False
        check(through_script, tmp_path, role, wider, value)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"])
def test_a_scripts_tensor_is_kept_or_refused(dtype: str, role: str, tmp_path: Path) -> None:
    for values, value in fitting(np.dtype(dtype)):
        check(through_script, tmp_path, role, torch.from_numpy(values), value)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", [own for own in NUMPY if own.isnative and own != "g"], ids=str)
def test_a_column_of_parquet_is_kept_or_refused(dtype: np.dtype[Any], role: str, tmp_path: Path) -> None:
    for values, value in fitting(dtype):
        check(through_parquet, tmp_path, role, pa.array(values), value)


@pytest.mark.parametrize("role", ROLES)
def test_a_cell_of_csv_is_kept_or_refused(role: str, tmp_path: Path) -> None:
    for value in EDGES:
        read = float(value) if abs(value) >= 2**53 else value  # by Arrow, which reads fp64
        check(through_csv, tmp_path, role, [1, 0, value, 0], read)


@pytest.mark.parametrize("role", ["label", "labels"])
@pytest.mark.parametrize("dtype", [own for own in NUMPY if own != "g"], ids=str)
def test_a_label_of_npy_is_kept_or_refused(dtype: np.dtype[Any], role: str, tmp_path: Path) -> None:
    for values, value in fitting(dtype):
        check(through_npy, tmp_path, role, values, value)


def test_dense_features_of_npy_are_fp32_and_finite(tmp_path: Path) -> None:
    for dtype in NUMPY:
        values, _ = fitting(dtype)[0]
        if dtype != "f4":
            with pytest.raises(DataError, match=re.escape(f"day_0_dense.npy holds {dtype}; it must hold float32")):
                through_npy(tmp_path, "dense", values)
    for values, value in fitting(np.dtype("f4")):
        check(through_npy, tmp_path, "dense", values, value)


def test_an_unknown_label_hides_no_other(tmp_path: Path) -> None:
    for wrong in (2**24 + 1, 2**53 + 1):
        with pytest.raises(DataError, match=rf"row 2, column y: value {wrong}(\.0)? is "):
            through_parquet(tmp_path, "labels", pa.array([None, 1, wrong, 0]))
    assert np.isnan(through_parquet(tmp_path, "labels", pa.array([None, 1, 2**53, 0])).labels[0, 0])


LABELS_OF_4: dict[str, tuple[Any, str]] = {
    "of one column": (np.zeros((4, 1)), r"labels have shape \[4, 1\]; give \[B\]"),
    "of two columns without names": (np.zeros((4, 2)), r"labels have shape \[4, 2\].*data.columns.labels"),
    "without a dimension": (np.float32(1), r"labels have shape \[\]; give \[B\]"),
    "of no sample": (np.zeros(0), "4 bags for 0 samples"),
    "complex": (np.zeros(4, complex), "labels of complex128 are no numbers"),
    "of text": (np.array(["0", "1", "0", "1"]), "labels of <U1 are no numbers"),
    "of times": (np.zeros(4, "M8[s]"), "labels of datetime64.s. are no numbers"),
    "of objects": (np.array([1, 0, None, 0], object), "labels of object are no numbers"),
    "masked": (np.ma.masked_array(np.zeros(4), np.arange(4) == 1), "labels is a masked array"),
    "in bfloat16": (torch.zeros(4, dtype=torch.bfloat16), "labels of type Tensor cannot be read"),
    "with a gradient": (torch.zeros(4, requires_grad=True), "labels of type Tensor cannot be read"),
    "sparse": (torch.zeros(4).to_sparse(), "labels of type Tensor cannot be read"),
    "as integers of any size": ([1, 0, 2**70, 0], r"\[2\]: value 1180591620717411303424|no numbers"),
}


@pytest.mark.parametrize("what", LABELS_OF_4)
def test_labels_of_another_kind_are_refused(what: str) -> None:
    labels, sentence = LABELS_OF_4[what]
    check = BatchCheck(job_of("tests.readers.factories:iterable", "label"))
    with pytest.raises(DataError, match=f"^here.*{sentence}"):
        check.check((np.ones((4, 1), np.float32), {"cat_0": np.arange(4)}, labels), "here")


@pytest.mark.parametrize("part", ["dense", "labels", "ids", "bags", "time"])
def test_a_masked_array_is_refused_wherever_it_is(part: str) -> None:
    def masked(values: Any) -> Any:
        return np.ma.masked_array(values, np.zeros(np.shape(values), bool))

    small = np.ones(4, np.float32)
    whole: dict[str, Any] = {"dense": small[:, None], "labels": small, "ids": np.arange(4), "time": small}
    odd = whole | ({part: masked(whole[part])} if part in whole else {})
    bags = [masked([own]) for own in range(4)] if part == "bags" else odd["ids"]
    check = BatchCheck(job_of("tests.readers.factories:iterable", "label"))
    with pytest.raises(DataError, match=r"^here.*masked array"):
        check.check(
            {"dense": odd["dense"], "labels": odd["labels"], "time": odd["time"], "sparse": {"cat_0": bags}}, "here"
        )
    if part != "bags":
        with pytest.raises(DataError, match=r"^here.*MaskedArray"):
            check.check(
                Batch(dense=odd["dense"], labels=odd["labels"], ids=odd["ids"], inputs={"time": odd["time"]}), "here"
            )


@pytest.mark.parametrize("dtype", [*NUMPY, np.dtype("c8"), np.dtype(object)], ids=str)
def test_ids_and_arrays_keep_their_values_or_are_refused(dtype: np.dtype[Any]) -> None:
    values = np.array([1, 0, 3, 0]).astype(dtype)
    offered = (np.ones((4, 1), np.float32), {"cat_0": values}, np.zeros(4))
    if dtype.kind in "iu":
        assert as_batch(offered, ["cat_0"], "here", (), frozenset()).ids.tolist() == [1, 0, 3, 0]
    else:
        with pytest.raises(DataError, match=r"here.*ids must be integers"):
            as_batch(offered, ["cat_0"], "here", (), frozenset())
    check = BatchCheck(job_of("tests.readers.factories:iterable", "label"))
    batch = {"dense": np.ones((4, 1)), "sparse": {"cat_0": np.arange(4)}, "labels": np.zeros(4), "own": values}
    if dtype.kind in "biuf" and dtype.itemsize <= 8:
        own = check.check(batch, "here").inputs["own"]
        assert (own.dtype, own.tolist()) == (dtype.newbyteorder("="), values.tolist())
    else:
        with pytest.raises(DataError, match="here: own is"):
            check.check(batch, "here")
