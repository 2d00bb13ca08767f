"""Every format with every kind of id: the row that docs/data.md says, or a sentence with the place and the value."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.runtime.errors import DataError
from tests.support.data_files import all_samples, hashed_row, make_job, table

NUM_ROWS = 1000  # of the table
GOOD = 5
IDS: dict[str, int | None] = {
    "small": 7,
    "negative": -7,
    "beyond 32 bits": 2**31 + 5,
    "the largest of 64 bits": 2**63 - 1,
    "the smallest of 64 bits": -(2**63),
    "unsigned of 64 bits": 2**63 + 11,
    "the largest unsigned": 2**64 - 1,
    "missing": None,
}


def is_signed(value: int | None) -> bool:
    return value is None or -(2**63) <= value < 2**63


def arrow(value: int | None, kind: Any = None) -> Any:
    return pa.array([GOOD, value], kind or (pa.int64() if is_signed(value) else pa.uint64()))


def numbers(value: int | None) -> Any:
    return np.array([GOOD, value], np.int64 if is_signed(value) else np.uint64)


def csv(folder: Path, value: int | None, **data: Any) -> tuple[Job, str]:
    path = folder / "a.csv"
    path.write_text(f"label,int_0,a\n0,0.5,{GOOD}\n1,0.5,{'' if value is None else value}\n")
    return job("csv", path, **data), f"{path}, line 3, column a: "


def parquet(folder: Path, ids: Any, **data: Any) -> tuple[Job, str]:
    path = folder / "a.parquet"
    pq.write_table(pa.table({"label": [0, 1], "int_0": [0.5, 0.5], "a": ids}), path)
    return job("parquet", path, **data), f"{path}, row 1, column a: "


def npy(folder: Path, value: int | None, **data: Any) -> tuple[Job, str]:
    parts = {"dense": np.zeros((2, 1), np.float32), "sparse": numbers(value)[:, None], "labels": np.array([0, 1])}
    for part, array in parts.items():
        np.save(folder / f"day_0_{part}.npy", array)
    place = "_sparse.npy, row 1, column cat_0: " if is_signed(value) else "_sparse.npy holds uint64"
    return job("criteo-npy", folder, feature="cat_0", **data), f"{folder / 'day_0'}{place}"


class Offered:
    """What the factory of this module yields as sparse features."""

    sparse: ClassVar[Any] = None


def factory(job: Job) -> list[Any]:
    return [(np.zeros((2, 1), np.float32), Offered.sparse, np.array([0.0, 1.0]))]


class Keyed:
    """In the shape of a KeyedJaggedTensor."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def keys(self) -> list[str]:
        return ["a"]

    def values(self) -> Any:
        return self._values

    def lengths(self) -> Any:
        return np.array([1, 1])


def own(sparse: Any, **data: Any) -> tuple[Job, str]:
    Offered.sparse = sparse
    return job("tests.readers.test_ids_everywhere:factory", None, **data), "train batch 0 of epoch 0"


def job(format: str, path: Path | None, feature: str = "a", hashed: bool = False, **data: Any) -> Job:
    place = {} if path is None else {"path": str(path)}
    hash = ({"hash": True} if format == "criteo-npy" else {"columns": {"hash": True}}) if hashed else {}
    return make_job(format, [table("t", NUM_ROWS, feature)], eval_fraction=0.0, **place, **hash, **data)


@dataclass(frozen=True)
class Format:
    write: Callable[..., tuple[Job, str]]  # (folder, value, **data) -> the job, and how an error begins
    rule: Callable[[int | None], int] | None = None  # the row under a hash, if the format has one
    missing: bool = True  # whether a cell can be
    missing_is_error: bool = False  # whatever data.on_invalid_id says
    plain: bool = True  # ids can be rows without a hash


def hashed_cell(value: int | None) -> int:
    return 0 if value is None else hashed_row(str(value).encode(), NUM_ROWS)


def hashed_integer(value: int | None) -> int:
    return 0 if value is None else hashed_row((value % 2**64).to_bytes(8, "little"), NUM_ROWS)


def modulo(value: int | None) -> int:
    assert value is not None, "npy has no missing values"
    return value % 2**64 % NUM_ROWS


ALL = {
    "csv": Format(csv, hashed_cell),
    "parquet": Format(lambda folder, value, **data: parquet(folder, arrow(value), **data), hashed_integer),
    "parquet, lists": Format(
        lambda folder, value, **data: parquet(folder, pa.array([[GOOD], [value]], pa.list_(arrow(value).type)), **data),
        hashed_integer,
    ),
    "parquet, dictionary": Format(
        lambda folder, value, **data: parquet(folder, arrow(value).dictionary_encode(), **data),
        hashed_integer,
        plain=False,
    ),
    "parquet, text": Format(
        lambda folder, value, **data: parquet(folder, arrow(value).cast(pa.string()), **data), hashed_cell, plain=False
    ),
    "npy": Format(npy, modulo, missing=False),
    "own reader, array": Format(lambda folder, value, **data: own([numbers(value)], **data), missing=False),
    "own reader, lists": Format(lambda folder, value, **data: own([[[GOOD], [value]]], **data), missing_is_error=True),
    "own reader, one list": Format(
        lambda folder, value, **data: own({"a": [GOOD, value]}, **data), missing_is_error=True
    ),
    "script, tensor": Format(
        lambda folder, value, **data: own({"a": torch.from_numpy(numbers(value))}, **data), missing=False
    ),
    "script, keyed": Format(
        lambda folder, value, **data: own(Keyed(torch.from_numpy(numbers(value))), **data), missing=False
    ),
}


def second_row(job: Job, num_invalid: int = 0) -> int:
    reader = open_reader(job)
    _, second = all_samples(reader.batches("train", 0))
    assert reader.invalid_ids == num_invalid
    return second.ids[0][0]


def cases(*, hashed: bool) -> list[Any]:
    return [
        pytest.param(format, value, id=f"{name}, {kind}")
        for name, format in ALL.items()
        for kind, value in IDS.items()
        if (value is not None or format.missing) and (format.rule is not None if hashed else format.plain)
    ]


@pytest.mark.parametrize(("format", "value"), cases(hashed=True))
def test_under_a_hash_every_id_takes_the_row_of_the_rule(format: Format, value: int | None, tmp_path: Path) -> None:
    assert format.rule is not None
    job, _ = format.write(tmp_path, value, hashed=True)
    if format.rule is modulo and not is_signed(value):
        with pytest.raises(DataError, match="must hold int32 or int64"):
            open_reader(job)
    else:
        assert second_row(job) == format.rule(value)


@pytest.mark.parametrize(("format", "value"), cases(hashed=False))
def test_without_a_hash_an_id_is_its_row_or_refused_with_place_and_value(
    format: Format, value: int | None, tmp_path: Path
) -> None:
    job, place = format.write(tmp_path, value)
    if value == 7:
        assert second_row(job) == 7
        return
    with pytest.raises(DataError) as caught:
        second_row(job)
    sentence = str(caught.value)
    assert place in sentence
    if value is None or value == -(2**63):
        assert "is missing" in sentence
    elif "holds uint64" not in place:
        assert str(value) in sentence


@pytest.mark.parametrize("policy", ["zero", "modulo"])
@pytest.mark.parametrize(("format", "value"), cases(hashed=False))
def test_ids_that_are_replaced_are_replaced_alike(
    format: Format, value: int | None, policy: str, tmp_path: Path
) -> None:
    job, place = format.write(tmp_path, value, on_invalid_id=policy)
    if not is_signed(value) or (value is None and format.missing_is_error):
        with pytest.raises(DataError) as caught:
            second_row(job)
        assert place in str(caught.value)
    elif value is None or value == -(2**63):
        assert second_row(job, 1) == 0, "the smallest stands for a missing one"
    else:
        assert second_row(job, value != 7) == (7 if value == 7 else value % NUM_ROWS if policy == "modulo" else 0)
