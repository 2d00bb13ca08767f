"""`rowcast score --data`: every row of its table in docs/data.md, and random files."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from rowcast.deploy.score import scoring_job
from rowcast.job.training_identity import is_only_of_training, setting_differences
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.runtime.errors import ConfigError, DataError
from tests.support.data_files import Row, all_samples, hashed_row, make_job, table
from tests.support.facts import facts
from tests.support.repeats import count

ROOT = Path(__file__).parents[2]
USERS, TAGS = 50, 10  # rows of their tables
Columns = dict[str, list[Any]]
TRAINED: Columns = {
    "user": ["a", "b", "c", None],
    "tags": [[1, 2], [], [3], [9]],
    "w": [[0.5, 2.0], [], [1.0], [-1.0]],
    "price": [0.5, 1.5, -2.5, 3.5],
    "label": [0, 1, 1, 0],
}


def cell(value: Any) -> str:
    return "" if value is None else "|".join(map(str, value)) if isinstance(value, list) else str(value)


def write(path: Path, columns: Columns) -> None:
    if path.suffix == ".csv":
        rows = [list(columns), *zip(*columns.values(), strict=True)]
        path.write_text("".join(",".join(map(cell, row)) + "\n" for row in rows))
        return
    types = {name: pa.array(TRAINED.get(name, values)).type for name, values in columns.items() if name != "label"}
    pq.write_table(pa.table({name: pa.array(own, types.get(name)) for name, own in columns.items()}), path)


def read_to_score(folder: Path, path: Path, overrides: tuple[str, ...] = (), **data: Any) -> list[Row]:
    """What the trainer gets of the new samples at `path`, which may be a glob."""
    own = {"hash": ["user"], "weights": {"tags": "w"}, "dense": ["price"]}
    columns = own | ({"lists": {"tags": "|"}} if path.suffix == ".csv" else {})
    tables = [table("users", USERS, "user"), table("tags", TAGS, "tags")]
    form = path.suffix[1:]
    job = make_job(form, tables, path=f"trained.{form}", columns=columns, batch_size=3, **data)
    scored = scoring_job(cast(Any, SimpleNamespace(job=job.content())), folder, path, overrides)
    assert all(map(is_only_of_training, setting_differences(job.content(), scored)))
    return all_samples(open_reader(scored).batches("eval", 0))


def expected(columns: Columns) -> list[Row]:
    rows = zip(*(columns[name] for name in ("user", "tags", "w", "price")), strict=True)
    return [
        Row(
            (float(np.float32(price)),),
            0.0,
            ((0 if user is None else hashed_row(user.encode(), USERS),), tuple(tags)),
            ((1.0,), tuple(np.float32(own).item() for own in weights)),
        )
        for user, tags, weights, price in rows
    ]


Change = Callable[[Columns], Columns]


def without(*names: str) -> Change:
    return lambda columns: {name: own for name, own in columns.items() if name not in names}


def last(name: str, value: Any) -> Change:
    return lambda columns: columns | {name: [*columns[name][:-1], value]}


def first(rows: int) -> Change:
    return lambda columns: {name: own[:rows] for name, own in columns.items()}


TAKEN: list[tuple[str, Change]] = [
    ("no label, or labels of any kind", without("label")),
    ("no label, or labels of any kind", lambda columns: columns | {"label": ["x", None, "7", "?"]}),
    ("other columns too, or another order of columns", lambda columns: columns | {"zz": [1, 2, 3, 4]}),
    ("other columns too, or another order of columns", lambda columns: dict(reversed(columns.items()))),
    ("few rows, or no whole number of batches", first(1)),
    ("few rows, or no whole number of batches", first(4)),
    ("a value under `hash` that training never saw, or none", last("user", "new")),
    ("a value under `hash` that training never saw, or none", last("user", None)),
]
REFUSED: list[tuple[str, Change, type[Exception], tuple[str | int, ...]]] = [
    ("no column for a feature, a dense value, a weight or an array", without("user"), ConfigError, ("user",)),
    ("no column for a feature, a dense value, a weight or an array", without("w"), ConfigError, ("w",)),
    ("no column for a feature, a dense value, a weight or an array", without("price"), ConfigError, ("price",)),
    ("no row", first(0), DataError, ()),
    ("an id outside its table", last("tags", [TAGS]), DataError, ("tags", TAGS)),
    ("an id outside its table", last("tags", [-1]), DataError, ("tags", -1)),
    ("a dense value or weight that is missing or not finite", last("price", None), DataError, ("price", "nan")),
    ("a dense value or weight that is missing or not finite", last("price", math.inf), DataError, ("price", "inf")),
    ("a dense value or weight that is missing or not finite", last("w", [math.nan]), DataError, ("w", "nan")),
    ("a whole number that fp32 would round", last("price", 2**24 + 1), DataError, ("price", 2**24)),
    ("a whole number that fp32 would round", last("w", [2**24 + 1]), DataError, ("w", 2**24)),
    ("more or fewer weights than ids", last("w", [1.0, 1.0]), DataError, ("w", 2, 1)),
]


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("number", range(len(TAKEN)))
def test_what_the_table_takes_is_read_as_it_is(number: int, form: str, tmp_path: Path) -> None:
    changed = TAKEN[number][1](TRAINED)
    write(tmp_path / f"new.{form}", changed)
    assert without_labels(read_to_score(tmp_path, tmp_path / f"new.{form}")) == expected(changed)


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_the_table_refuses_names_the_file_and_the_column(number: int, form: str, tmp_path: Path) -> None:
    _, change, kind, named = REFUSED[number]
    write(tmp_path / f"new.{form}", change(TRAINED))
    with pytest.raises(kind, match=facts(f"new.{form}", *named)):
        read_to_score(tmp_path, tmp_path / f"new.{form}")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_ids_outside_their_table_are_row_0_if_asked(form: str, tmp_path: Path) -> None:
    write(tmp_path / f"new.{form}", last("tags", [TAGS])(TRAINED))
    found = read_to_score(tmp_path, tmp_path / f"new.{form}", ("data.on_invalid_id=zero",))
    assert without_labels(found) == expected(last("tags", [0])(TRAINED))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_several_files_are_one_after_another(form: str, tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"part-{number}.{form}", first(number + 1)(TRAINED))
    found = read_to_score(tmp_path, tmp_path / f"part-*.{form}")
    assert without_labels(found) == [row for number in range(3) for row in expected(first(number + 1)(TRAINED))]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_random_files_are_read_as_they_are(form: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    for _ in range(count(20, 2000)):
        rows = int(rng.integers(1, 12))
        lengths = rng.integers(0, 4, rows)
        columns: Columns = {
            "user": [None if rng.random() < 0.1 else f"u{rng.integers(0, 10**9)}" for _ in range(rows)],
            "tags": [rng.integers(0, TAGS, n).tolist() for n in lengths],
            "w": [rng.normal(0, 1e3, n).tolist() for n in lengths],
            "price": (10.0 ** rng.uniform(-30, 7, rows) * rng.choice([-1, 0, 1], rows)).tolist(),
            "label": rng.choice(["0", "1", "2.5", "no"], rows).tolist(),
            "more": rng.random(rows).tolist(),
        }
        order = [name for name in rng.permutation(list(columns)).tolist() if name in TRAINED or rng.random() < 0.5]
        write(
            tmp_path / f"new.{form}", {name: columns[name] for name in order if name != "label" or rng.random() < 0.5}
        )
        assert without_labels(read_to_score(tmp_path, tmp_path / f"new.{form}")) == expected(columns)


def without_labels(rows: list[Row]) -> list[Row]:
    """Labels that are not read may be anything."""
    return [Row(row.dense, 0.0, row.ids, row.weights) for row in rows]


def test_the_page_has_every_case() -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    shown = re.split(r"^\| the new samples have \|.*\n\|---\|---\|\n", page, flags=re.MULTILINE)[1].partition("\n\n")[0]
    cases = {case for case, *_ in (*TAKEN, *REFUSED)} | {"several files"}
    assert {line.split(" | ")[0].removeprefix("| ") for line in shown.splitlines()} == cases


def test_a_key_that_is_gone_is_refused_though_a_manifest_may_name_it(tmp_path: Path) -> None:
    write(tmp_path / "new.parquet", TRAINED)
    with pytest.raises(ConfigError, match=facts("store.kind = mapped", "tiered")):
        read_to_score(tmp_path, tmp_path / "new.parquet", ("store.kind=mapped",))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_run_of_files_that_arrive_scores_a_file_as_it_is(form: str, tmp_path: Path) -> None:
    write(tmp_path / f"new.{form}", TRAINED)
    rows = read_to_score(tmp_path, tmp_path / f"new.{form}", follow=True, eval_fraction=0.0)
    assert without_labels(rows) == expected(TRAINED)
