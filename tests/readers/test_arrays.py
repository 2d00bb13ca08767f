"""Arrays beside dense features and labels: from Parquet and CSV, from batches of one's own, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.formats.custom import BatchCheck
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.protocol.parts import batch_specs, belonging, check_same
from rowcast.runtime.errors import ConfigError, DataError
from tests.support import jobs
from tests.support.array_models import OF, array_job, histories_of
from tests.support.facts import facts

TABLES = [jobs.table("item", 50, 4, "history", pooling="none"), jobs.table("user", 50, 4)]
COLUMNS = {"inputs": ["time", "age", "member", "history"], "lists": {"history": "|"}, "label_values": "none"}
ROWS = [  # user, history, time, age, member
    (1, [3, 4], [5, 2**60], 2.5, True),
    (2, [], [], -1.0, False),
    (3, [49], [7], 0.5, True),
    (4, [1, 1, 2], [8, 9, 10], 4.0, False),
    (5, [9, 8], [1, 2], 0.0, True),
]


def write_parquet(folder: Path, *parts: slice, **changed: Any) -> None:
    for number, rows in enumerate(parts):
        user, history, time, age, member = zip(*ROWS[rows], strict=True)
        columns = {"user": user, "history": history, "time": time, "age": pa.array(age, pa.float16()), "member": member}
        pq.write_table(pa.table(columns | changed), folder / f"{number}.parquet")


def write_csv(folder: Path) -> None:
    lines = ["user,history,time,age,member"]
    lines += [
        f"{user},{'|'.join(map(str, ids))},{'|'.join(map(str, time))},{age},{m}" for user, ids, time, age, m in ROWS
    ]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")


def file_job(kind: str, folder: Path, of: dict[str, str] | None = None, **columns: Any) -> Job:
    given = COLUMNS if kind == "csv" else {name: own for name, own in COLUMNS.items() if name != "lists"}
    data = {
        **{"format": kind, "path": str(folder), "batch_size": 5, "shuffle": "window:5"},
        **{"of": {"time": "history"} if of is None else of, "columns": given | columns},
    }
    return jobs.job(tables=TABLES, data=data)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_columns_reach_the_batch_sample_by_sample_however_files_divide_and_order_them(
    kind: str, tmp_path: Path
) -> None:
    write_csv(tmp_path) if kind == "csv" else write_parquet(tmp_path, slice(0, 2), slice(2, 3), slice(3, 5))
    [batch] = open_reader(file_job(kind, tmp_path)).batches("train", 0)
    assert batch.offsets is not None
    users, ends = batch.ids[batch.offsets[5] :], batch.offsets[:6]
    assert users.tolist() != [1, 2, 3, 4, 5], "the shuffle left the order as it is"
    by_user = {row[0]: row for row in ROWS}
    own = [slice(*ends[i : i + 2]) for i in range(5)]
    inputs = batch.inputs
    assert list(inputs) == ["time", "age", "member", "history.id"]
    assert [inputs["time"][at].tolist() for at in own] == [by_user[user][2] for user in users]
    assert [inputs["history.id"][at].tolist() for at in own] == [by_user[user][1] for user in users]
    assert inputs["age"].tolist() == [by_user[user][3] for user in users]
    assert inputs["member"].tolist() == [by_user[user][4] for user in users]
    dtypes = ["int64", "float64" if kind == "csv" else "float16", "bool", "int64"]
    assert [str(array.dtype) for array in inputs.values()] == dtypes


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"time": pa.array([[5], [], [7], [8, 9, 10], [1, 2]])}, facts("row 0", "column time", "1 values for 2 ids")),
        ({"time": pa.array([[5, None], [], [7], [8, 9, 10], [1, 2]])}, facts("row 0", "column time", "missing")),
        ({"age": pa.array(["a"] * 5)}, facts("column age", "string", "numbers")),
        ({"age": pa.array([[1]] * 5)}, facts("column age", 'data.of.age = "FEATURE"')),
    ],
)  # fmt: skip
def test_a_column_that_does_not_fit_is_named(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    write_parquet(tmp_path, slice(0, 5), **changed)
    with pytest.raises(DataError, match=sentence):
        list(open_reader(file_job("parquet", tmp_path)).batches("train", 0))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"of": {"time": "histori"}}, facts("time", "histori", "the nearest is history")),
        ({"of": {"time": "batch"}}, facts("time is no feature", "batch")),
        ({"of": {"time": "user"}}, facts("table user", 'pooling = "none"')),
        ({"of": {"user": "batch"}}, facts("user", "table user", 'pooling = "none"')),
        ({"of": {"history": "user"}}, facts("history is a feature", "'user'")),
        ({"of": {"time.s": "history"}}, facts("time.s", "dot")),
    ],
)
def test_a_job_that_says_what_cannot_be_is_refused(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        jobs.job(tables=TABLES, data={"format": "tests.support.array_models:histories", **data})


def test_files_have_only_the_arrays_that_the_job_names(tmp_path: Path) -> None:
    for of, columns, sentence in (
        ({"times": "history"}, {}, facts("times", "data.columns.inputs", "the nearest is time")),
        ({"history": "batch"}, {}, facts("history", "a data set of your own")),
        ({}, {"inputs": ["user"]}, facts("table user", "none")),
        ({}, {"inputs": ["age", "age"]}, facts("age twice")),
    ):
        with pytest.raises(ConfigError, match=sentence):
            file_job("parquet", tmp_path, of, **columns)
    with pytest.raises(ConfigError, match=facts('"batch"', "rename")):
        jobs.job(tables=[jobs.table("batch", 5, 4, pooling="none")], data={"format": "a:b", "of": {"batch": "batch"}})


Change = Callable[[dict[str, Any]], Any]
BAD: dict[str, tuple[Change, str]] = {
    "an array without an entry for each sample": (
        lambda own: own | {"tokens": own["tokens"][:3]},
        facts("tokens has 3 entries", "12 samples", 'data.of.tokens = "FEATURE"'),
    ),
    "fewer entries than look-ups": (
        lambda own: own | {"time": own["time"][:-1]},
        facts("time", "look-ups of feature history"),
    ),
    "no such array": (
        lambda own: {key: own[key] for key in own if key != "time"},
        facts("data.of names the array time"),
    ),
    "strings": (lambda own: own | {"weight": ["a"] * 12}, facts("weight is <U1")),
    "objects": (lambda own: own | {"weight": [{}] * 12}, facts("weight is object")),
    "a name with a dot": (lambda own: own | {"a.b": np.zeros(12)}, facts("'a.b'", "dot")),
    "one value": (lambda own: own | {"weight": 3}, facts("weight has 0 dimensions")),
    "a feature of the batch in another sample": (
        lambda own: own | {"sparse": own["sparse"] | {"negative": [[], [1], *[[]] * 10]}, "log_q": np.zeros(1)},
        facts("feature negative", "sample 1", "sample 0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_batch_that_does_not_fit_is_named(case: str) -> None:
    change, sentence = BAD[case]
    check, own = BatchCheck(array_job("causal")), histories_of(np.random.default_rng(1), 12)
    assert set(check.check(own, "batch 0").inputs) == {*OF, "tokens", "weight"} - {"negative"}
    with pytest.raises(DataError, match=sentence):
        check.check(change(own), "batch 1")


def test_labels_may_be_missing_only_where_a_model_can_do_without() -> None:
    own = histories_of(np.random.default_rng(1), 12)
    assert np.isnan(BatchCheck(array_job("causal")).check(own, "here").labels).all()
    binary = array_job("causal", data={"columns": {"label_values": "binary"}})
    with pytest.raises(DataError, match=facts("has no labels", 'label_values = "none"')):
        BatchCheck(binary).check(own, "here")


def test_batches_with_other_arrays_than_the_first_are_refused() -> None:
    job = array_job("causal")
    own, of = histories_of(np.random.default_rng(1), 12), belonging(job).arrays

    def specs(**changes: Any) -> Any:
        return batch_specs(BatchCheck(job).check(own | changes, "here"), of)

    first = specs()
    check_same(specs(), first, "step 3")
    for changes, sentence in (
        ({"weight": np.zeros(12, np.float32)}, facts("step 3", "weight", "float32", "float64")),
        ({"tokens": np.zeros((12, 2), np.uint8)}, facts("tokens", "[2]", "[2, 3]")),
        ({"more": np.zeros(12)}, facts("more", "float64", "missing")),
    ):
        with pytest.raises(DataError, match=sentence):
            check_same(specs(**changes), first, "step 3")
    with pytest.raises(DataError, match=facts("weight is missing", "float64")):
        check_same(first[:-1], first, "step 3")
