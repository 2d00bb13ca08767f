"""Columns that the job prepares: the same values from CSV and Parquet, and what a rule cannot take is named."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rowcast.prefetcher.readers.reader import open_reader
from rowcast.runtime.errors import DataError
from tests.support.data_files import Row, all_samples, hashed_row, make_job, table

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


def test_a_round_trip_through_pandas_changes_no_row(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("label,user\n0,35\n1,\n0,7\n1,-1\n")
    columns = {"dense": [], "hash": True, "hash_by_value": True}
    expected = rows(tmp_path / "data.csv", columns, TABLES[1:])
    again = pd.read_csv(tmp_path / "data.csv")
    assert again["user"].dtype == float
    for kind in ("csv", "parquet"):
        assert rows(written(tmp_path, again, kind), columns, TABLES[1:]) == expected
    as_bytes = rows(written(tmp_path, again, "csv"), columns | {"hash_by_value": False}, TABLES[1:])
    assert as_bytes != rows(tmp_path / "data.csv", columns, TABLES[1:])
