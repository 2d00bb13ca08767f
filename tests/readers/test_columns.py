"""data.columns: prepared values, the same from CSV and Parquet, and several labels in each format."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.protocol.batch import Batch
from rowcast.runtime.errors import ConfigError, DataError
from tests.support import jobs
from tests.support.data_files import Row, all_samples, hashed_row, make_job, table
from tests.support.facts import facts

RNG = np.random.default_rng(7)
NUM_ROWS = 500
FRAME = pd.DataFrame(
    {
        "label": RNG.integers(1, 6, NUM_ROWS),
        "count": pd.array(RNG.geometric(0.1, NUM_ROWS) - 3, "Int64"),
        "year": RNG.integers(1930, 2000, NUM_ROWS),
        "age": RNG.normal(30, 20, NUM_ROWS),
        "user": RNG.integers(0, 50, NUM_ROWS),
        "side": RNG.choice(["left", "right"], NUM_ROWS),
    }
)
FRAME.loc[RNG.random(NUM_ROWS) < 0.2, "count"] = pd.NA
FRAME.loc[RNG.random(NUM_ROWS) < 0.2, "age"] = np.nan
BOUNDS = [0.0, 18.0, 40.0]
PREPARE: dict[str, Any] = {
    "label": {"at_least": 4},
    "count": {"fill": 0, "least": 0, "log1p": True, "standardize": [1.5, 0.7]},
    "year": {"standardize": [1965, 20]},
    "age": {"buckets": BOUNDS},
    "side": {"map": {"left": -1, "right": 1}},
}
TABLES = [table("ages", 8, "age"), table("users", 1000, "user")]
COLUMNS = {
    "dense": ["count", "year", "side"],
    "hash": ["user"],
    "hash_by_value": True,
    "prepare": PREPARE,
}


def rows(path: Path, columns: dict[str, Any], tables: Any = TABLES) -> list[Row]:
    job = make_job(path.suffix[1:], tables, path=str(path), eval_fraction=0.0, columns=columns)
    return all_samples(open_reader(job).batches("train", 0))


def written(folder: Path, frame: pd.DataFrame, kind: str) -> Path:
    path = folder / f"data.{kind}"
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    return path


def by_hand(own: Any) -> tuple[float, tuple[float, ...], tuple[tuple[int, ...], ...]]:
    count = (math.log1p(max(0.0 if own.count is pd.NA else float(own.count), 0.0)) - 1.5) / 0.7
    dense = np.array([count, (own.year - 1965) / 20, -1 if own.side == "left" else 1], np.float32)
    bucket = 0 if math.isnan(own.age) else 1 + sum(own.age >= bound for bound in BOUNDS)
    user = hashed_row(int(own.user).to_bytes(8, "little"), 1000)
    return float(own.label >= 4), tuple(dense.tolist()), ((bucket,), (user,))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_values_are_those_of_a_loop_over_the_rows(kind: str, tmp_path: Path) -> None:
    found = rows(written(tmp_path, FRAME, kind), COLUMNS)
    expected = [by_hand(own) for own in FRAME[["label", "count", "year", "age", "user", "side"]].itertuples(name="R")]
    assert [(row.label, row.dense, row.ids) for row in found] == expected


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("changed", "at", "rules", "sentence"),
    [
        (
            {"year": -1.0},
            3,
            {"year": {"log1p": True}},
            "column year: log1p takes numbers above -1, and the value is -1",
        ),
        ({"year": -1.5}, 0, {"year": {"log1p": True}}, "set data.columns.prepare.year.least = 0.0"),
        ({"side": "up"}, 2, {}, "column side: 'up' is not in data.columns.prepare.side.map, which has 'left', 'right'"),
        ({"count": pd.NA}, 4, {"count": {"least": 0, "log1p": True}}, "column count: value nan is not finite in fp32"),
        ({"side": None}, 4, {}, "column side: value nan is not finite in fp32"),
    ],
)
def test_a_value_that_a_rule_cannot_take_is_named(
    kind: str, changed: dict[str, Any], at: int, rules: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    frame = FRAME.fillna({"count": 1}).head(8).copy()
    [(column, value)] = changed.items()
    frame[column] = frame[column].astype(object if isinstance(value, str | None) else "Float64")
    frame.loc[at, column] = value
    path = written(tmp_path, frame, kind)
    with pytest.raises(DataError) as raised:
        rows(path, COLUMNS | {"prepare": PREPARE | rules})
    place = f"line {at + 2}" if kind == "csv" else f"row {at}"
    assert str(raised.value).startswith(f"{path}, {place}, ")
    assert sentence in str(raised.value)


def test_labels_of_numbers_and_words_are_mapped(tmp_path: Path) -> None:
    columns = {"dense": [], "hash": ["user"]}
    for values, given in (
        ([1, 2, 2], {"1": 0, "2": 1}),
        (["no", "sí", "sí"], {"no": 0, "sí": 1}),
        ([-1.0, 1, 1], {"-1": 0, "1": 1}),
    ):
        for kind in ("csv", "parquet"):
            path = written(tmp_path, pd.DataFrame({"label": values, "user": 1}), kind)
            found = rows(path, columns | {"prepare": {"label": {"map": given}}}, TABLES[1:])
            assert [row.label for row in found] == [0, 1, 1]


WRITTEN = ["35", "35.0", "0035", "-7", "-7.0", "", "abc", "1.5", "18446744073709551615", "99999999999999999999", "-0"]


def test_a_whole_number_is_hashed_by_its_value_however_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("label,user\n" + "".join(f"0,{own}\n" for own in WRITTEN))
    columns = {"dense": [], "hash": ["user"], "hash_by_value": True}

    def row_of(own: str) -> int:
        if own in ("35", "35.0", "-7", "-7.0", "18446744073709551615", "-0"):
            number = round(float(own)) if "." in own else int(own)
            return hashed_row((number % 2**64).to_bytes(8, "little"), 1000)
        return hashed_row(own.encode(), 1000) if own else 0

    assert [row.ids for row in rows(tmp_path / "data.csv", columns, TABLES[1:])] == [
        ((row_of(own),),) for own in WRITTEN
    ]


ITEMS = [table("items", 10, "cat_0")]
NAN = float("nan")
LABELS = [[1, 0], [0, NAN], [NAN, 1], [NAN, NAN]]
SEVERAL = {"labels": ["click", "buy"]}
REAL = SEVERAL | {"label_values": "real"}


def job_of(format: str, columns: dict[str, Any], **data: Any) -> Job:
    return jobs.job(
        data={"format": format, "columns": columns} | data, tables=ITEMS, model={"kind": "examples.mmoe:build"}
    )


def write(kind: str, folder: Path, labels: Any) -> Path:
    """Rows with these labels [n, 2]; NaN is null in Parquet, an empty cell in CSV, NaN in npy."""
    rows = np.array(labels, np.float64)
    ids = np.arange(len(rows)) % 10
    if kind == "parquet":
        columns = {name: pa.array(own, from_pandas=True) for name, own in zip(SEVERAL["labels"], rows.T, strict=True)}
        pq.write_table(pa.table(columns | {"int_0": ids * 0.5, "cat_0": ids, "label": ids % 2}), folder / "a.pq")
        return folder / "a.pq"
    if kind == "csv":
        cells = [["" if np.isnan(value) else f"{value:g}" for value in row] for row in rows]
        lines = [f"{click},{buy},0.5,{own},{own % 2}" for (click, buy), own in zip(cells, ids, strict=True)]
        (folder / "a.csv").write_text("\n".join(["click,buy,int_0,cat_0,label", *lines, ""]))
        return folder / "a.csv"
    for part, array in (("dense", np.zeros((len(rows), 1), np.float32)), ("sparse", ids[:, None]), ("labels", rows)):
        np.save(folder / f"day_0_{part}.npy", array)
    return folder


FORMATS = {"parquet": "parquet", "csv": "csv", "npy": "criteo-npy"}


def read(kind: str, folder: Path, labels: Any, columns: dict[str, Any]) -> Batch:
    path = write(kind, folder, labels)
    job = job_of(FORMATS[kind], columns, path=str(path))
    [batch] = open_reader(job).batches("train", 0)
    return batch


@pytest.mark.parametrize("kind", FORMATS)
def test_each_label_is_a_column_and_a_missing_one_is_nan(kind: str, tmp_path: Path) -> None:
    found = read(kind, tmp_path, LABELS, SEVERAL).labels
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert np.array_equal(found, np.array(LABELS, np.float32), equal_nan=True)


@pytest.mark.parametrize("values", [[True, None, False], [1, None, 0], [1.0, None, NAN]], ids=["bool", "int", "float"])
def test_a_null_is_unknown_whatever_the_type_of_its_column(values: list[Any], tmp_path: Path) -> None:
    columns = {"click": pa.array(values), "buy": [1, 0, 1], "int_0": [0.5] * 3, "cat_0": [1, 2, 3]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    job = job_of("parquet", SEVERAL, path=str(tmp_path))
    [batch] = open_reader(job).batches("train", 0)
    expected = np.array([[NAN if value is None else value for value in values], [1, 0, 1]], np.float32).T
    assert np.array_equal(batch.labels, expected, equal_nan=True)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("columns", "value", "sentence"),
    [
        (SEVERAL, 2, "column buy: label 2.0 is not 0 or 1"),
        (REAL, float("inf"), "column buy: label inf is not finite in fp32"),
        (REAL, 1e300, r"column buy: value 1e\+300 is inf in fp32"),
    ],
)
def test_a_label_that_the_job_does_not_allow_is_named(
    kind: str, columns: dict[str, Any], value: float, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        read(kind, tmp_path, [[0, 1], [1, 0], [NAN, value]], columns)
    assert ("line 4" if kind == "csv" else "row 2") in str(caught.value)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_label_without_a_column_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=facts("data.columns.labels", "column buys", "buy")):
        read(kind, tmp_path, LABELS, {"labels": ["click", "buys"]})


def test_an_npy_file_has_a_number_for_each_label(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=facts("(4, 2)", 3, "data.columns.labels")):
        read("npy", tmp_path, LABELS, {"labels": ["a", "b", "c"]})
    with pytest.raises(DataError, match=facts("(4, 2)", "one number")):
        read("npy", tmp_path, LABELS, {})


def test_the_synthetic_stream_draws_each_label_and_leaves_the_first_as_it_is() -> None:
    data: dict[str, Any] = {"batch_size": 5000, "synthetic": {"samples": 5000}}
    one, several = (
        next(iter(open_reader(job_of("synthetic", columns, **data)).batches("train", 0)))
        for columns in (dict[str, Any](), SEVERAL)
    )
    assert (one.labels.shape, several.labels.shape) == ((5000,), (5000, 2))
    assert np.array_equal(one.labels, several.labels[:, 0])
    assert np.array_equal(one.ids, several.ids)
    assert np.array_equal(one.dense, several.dense)
    assert several.labels[:, 1].mean() == pytest.approx(0.26, abs=0.05)
    assert not np.array_equal(several.labels[:, 0], several.labels[:, 1])


def batches(job: Any, labels: Any, *, as_tuple: bool = False) -> Any:
    own = np.array(labels, np.float32)
    ids = np.arange(len(own)) % 10
    whole = Batch(dense=np.zeros((len(own), 1), np.float32), labels=own, ids=ids)
    return [(whole.dense, {"cat_0": ids}, own) if as_tuple else whole]


def read_custom(labels: Any, columns: dict[str, Any], **options: Any) -> Batch:
    name = "tests.readers.test_columns:batches"
    job = job_of(name, columns, options={"labels": labels, **options})
    [batch] = open_reader(job).batches("train", 0)
    return batch


@pytest.mark.parametrize("as_tuple", [False, True], ids=["a batch", "a tuple"])
def test_a_data_set_of_ones_own_gives_a_column_for_each_label(as_tuple: bool) -> None:
    assert np.array_equal(
        read_custom(LABELS, SEVERAL, as_tuple=as_tuple).labels, np.array(LABELS, np.float32), equal_nan=True
    )
    for labels, sentence in (
        ([0, 1, 1], r"labels are float32\[3\]; give float32\[3, 2\]"),
        ([[0, 1, 1]] * 4, r"labels are float32\[4, 3\]; give float32\[4, 2\]"),
        ([[0, 1], [1, 5]], "sample 1, column buy: label 5.0 is not 0 or 1"),
    ):
        with pytest.raises(DataError, match=sentence):
            read_custom(labels, SEVERAL, as_tuple=as_tuple)
    assert read_custom([[0, 5]], REAL, as_tuple=as_tuple).labels.tolist() == [[0, 5]]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"labels": ["click"]}, 'labels names one column; write label = "click"'),
        ({"labels": ["a", "b", "a"]}, "labels names a twice"),
        ({"labels": ["a", "b"], "label": "c"}, 'give either label = "c" or labels, not both'),
        ({"labels": [f"l{i}" for i in range(65)]}, "labels names 65 columns, more than 64"),
        ({"label_values": "any"}, "label_values"),
    ],
)
def test_labels_that_make_no_sense_are_refused_at_the_job_file(columns: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        job_of("synthetic", columns)


@pytest.mark.parametrize("columns", [SEVERAL, {"label_values": "real"}])
def test_criteo_tsv_has_one_label(columns: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=facts("columns.labels", "criteo-tsv", "one label")):
        job_of("criteo-tsv", columns, path="days")
