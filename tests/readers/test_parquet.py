"""Parquet: nulls, bags and weights, and the sentence for each way in which a file does not fit."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowcast.analysis.new.files import look_at
from rowcast.analysis.show import AnalysisProgress
from rowcast.prefetcher.readers.reader import Reader, block_permutation, open_reader, schedule
from rowcast.prefetcher.readers.row_reader import RowReader
from rowcast.prefetcher.readers.workers import DecoderShare, decode_share
from rowcast.protocol.batch import Batch, Samples
from rowcast.protocol.parts import UNDIVIDED
from rowcast.runtime.errors import ConfigError, DataError
from tests.readers.polling import next_dense, next_ids
from tests.support.data_files import (
    PARQUET_COLUMNS,
    all_samples,
    long_job,
    make_job,
    same_batch,
    samples_of,
    table,
    write_bags,
    write_parquet,
)
from tests.support.facts import facts
from tests.support.inline_source import InlineSource

TABLES = [table("scalars", 10, "a"), table("bags", 10, "b")]
LISTS = pa.list_(pa.int64())


def write(folder: Path, name: str = "data.parquet", **changed: Any) -> Path:
    write_bags(folder / name, **changed)
    return folder / name


def opened(path: Path, **data: Any) -> Reader:
    return open_reader(make_job("parquet", TABLES, path=str(path), eval_fraction=0.0, **data))


def only_batch(path: Path, **data: Any) -> Batch:
    [batch] = opened(path, **data).batches("train", 0)
    return batch


def refusal(kind: type[Exception], path: Path, **data: Any) -> str:
    with pytest.raises(kind) as caught:
        only_batch(path, **data)
    return str(caught.value)


def test_a_null_list_is_an_empty_bag(tmp_path: Path) -> None:
    reader = opened(write(tmp_path))
    rows = all_samples(reader.batches("train", 0))
    assert [row.ids for row in rows] == [((1,), (3, 4)), ((2,), ()), ((0,), ()), ((9,), (5,))]
    assert [row.weights for row in rows] == [None] * 4
    assert reader.invalid_ids == 0


def test_weights_belong_to_their_feature_and_the_others_weigh_one(tmp_path: Path) -> None:
    rows = samples_of(only_batch(write(tmp_path), columns={"weights": {"b": "w"}}))
    assert [row.weights for row in rows] == [((1,), (0.5, 2)), ((1,), ()), ((1,), ()), ((1,), (1.5,))]


def test_a_scalar_feature_may_have_scalar_weights(tmp_path: Path) -> None:
    batch = only_batch(write(tmp_path), columns={"weights": {"a": "int_0"}, "dense": []})
    assert batch.weights is not None
    assert batch.weights[:4].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert batch.dense.shape == (4, 0)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint8()), pa.list_(pa.int64(), 2)]
)
def test_lists_of_any_kind_of_integers_are_bags(kind: Any, tmp_path: Path) -> None:
    rows = samples_of(only_batch(write(tmp_path, b=pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], kind))))
    assert [row.ids[1] for row in rows] == [(1, 2), (3, 4), (5, 6), (7, 8)]


def test_bags_of_exactly_one_id_need_no_offsets(tmp_path: Path) -> None:
    assert only_batch(write(tmp_path, b=pa.array([[1], [2], [3], [4]], LISTS))).offsets is None


def test_dense_columns_are_those_named_or_all_numbered_ones_by_number(tmp_path: Path) -> None:
    path = write(tmp_path, int_10=pa.array([10] * 4), int_9=pa.array([9] * 4), int_x=pa.array([0] * 4))
    assert only_batch(path).dense[0].tolist() == [0.5, 9, 10]
    assert only_batch(path, columns={"dense": ["int_10", "label"]}).dense[1].tolist() == [10, 1]


def test_without_labels_and_dense_columns_every_row_is_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    batch = only_batch(path, columns={"dense": [], "label_values": "none", "label": "gone"})
    assert (batch.size, batch.dense.shape) == (len(samples_of(only_batch(path))), (batch.size, 0))
    assert np.isnan(batch.labels).all()
    columns = {"dense": [], "label_values": "none"}
    job = make_job("parquet", TABLES, path=str(path), eval_fraction=0.0, columns=columns)
    [dense] = cast(RowReader, open_reader(job, "dense")).pending("train", 0)
    assert cast(Samples, dense(UNDIVIDED)).labels.shape == (batch.size,)


@pytest.mark.parametrize("shuffle", ["none", "window:3", "window:5", "window:100"])
def test_one_file_may_hold_bags_and_another_single_ids_of_a_feature(shuffle: str, tmp_path: Path) -> None:
    write(tmp_path, "0.parquet")
    write(tmp_path, "1.parquet", b=pa.array([6, 7, 0, 8], pa.int32()), w=pa.array([0.1, 0.2, 0.3, 0.4]))
    write(
        tmp_path,
        "2.parquet",
        b=pa.array([[1], [2, 3], [], [4]], pa.large_list(pa.int32())),
        w=pa.array([[1], [2, 3], [], [4]]),
    )
    data = {
        "path": str(tmp_path),
        "columns": {"weights": {"b": "w"}},
        "shuffle": shuffle,
        "eval_fraction": 0.0,
        "batch_size": 7,
    }
    rows = all_samples(open_reader(make_job("parquet", TABLES, **data)).batches("train", 0))
    bags = [(3, 4), (), (), (5,), (6,), (7,), (0,), (8,), (1,), (2, 3), (), (4,)]
    weights = [
        (0.5, 2),
        (),
        (),
        (1.5,),
        *((float(np.float32(x)),) for x in (0.1, 0.2, 0.3, 0.4)),
        (1,),
        (2, 3),
        (),
        (4,),
    ]
    window = 12 if shuffle == "none" else int(shuffle.removeprefix("window:"))
    order = np.concatenate(
        [first + block_permutation(5, 0, first // window, min(window, 12 - first)) for first in range(0, 12, window)]
    )
    order = np.arange(12) if shuffle == "none" else order
    assert [row.ids for row in rows] == [(((1,), (2,), (0,), (9,))[i % 4], bags[i]) for i in order]
    assert [row.weights for row in rows] == [((1,), weights[i]) for i in order]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[str]]]:
    """The row groups and columns that were read, in order."""
    read: list[tuple[list[int], list[str]]] = []

    class Noting(pq.ParquetFile):  # type: ignore[misc]
        def iter_batches(self, *args: Any, row_groups: list[int], columns: list[str], **options: Any) -> Any:
            read.append((row_groups, columns))
            return super().iter_batches(*args, row_groups=row_groups, columns=columns, **options)

    monkeypatch.setattr(pq, "ParquetFile", Noting)
    return read


def test_row_groups_without_a_wanted_row_are_not_read(tmp_path: Path, asked: list[tuple[list[int], list[str]]]) -> None:
    columns = {name: np.arange(80) % 2 for name in ("label", "int_0", "a", "b")}
    for name in ("0.parquet", "1.parquet"):
        pq.write_table(pa.table(columns), tmp_path / name, row_group_size=8)
    job = make_job("parquet", TABLES, path=str(tmp_path), eval_fraction=0.0, batch_size=8)
    share = DecoderShare(job=job, columns="all", max_steps=None, start=None, index=1, num_decoders=3)
    assert [own.step for own in decode_share(share, open_reader(job))] == [1, 4, 7, 10, 13, 16, 19]
    assert [group for groups, _ in asked for group in groups] == [1, 4, 7, 0, 3, 6, 9]


def test_evaluation_between_train_steps_reads_no_row_group_twice(
    tmp_path: Path, asked: list[tuple[list[int], list[str]]]
) -> None:
    write_parquet(tmp_path / "a.parquet", 100)
    job = long_job(make_job("parquet", path=str(tmp_path), columns=PARQUET_COLUMNS))
    assert sum(batch.batch.size for batch in schedule(job, open_reader(job))) == 2 * 80 + 6 * 20
    assert sum(len(groups) for groups, _ in asked) == 2 * 7 + 6 * 2


def test_only_the_columns_of_the_part_are_read(tmp_path: Path, asked: list[tuple[list[int], list[str]]]) -> None:
    write_parquet(tmp_path / "a.parquet", 100)
    source = InlineSource(make_job("parquet", path=str(tmp_path), columns=PARQUET_COLUMNS))
    assert next_ids(source) is not None
    assert [columns for _, columns in asked] == [["cat_3", "cat_0", "cat_25", "cat_0_weights"]]
    next_dense(source)
    assert [columns for _, columns in asked[1:]] == [["click", "int_2", "int_10"]]


def test_of_many_columns_some_are_listed_and_the_nearest_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, **{f"other_{i}": pa.array([0] * 4) for i in range(30)}, price=pa.array([0.0] * 4))
    sentence = refusal(ConfigError, path, columns={"dense": ["pricee"]})
    assert sentence.endswith(
        "has no column pricee, the nearest is price; it has label, int_0, a, b, w, "
        + ", ".join(f"other_{i}" for i in range(7))
        + " and 24 more"
    )
    tables = [*TABLES, table("near", 10, "other_99")]
    with pytest.raises(
        ConfigError,
        match=facts("feature other_99", "24 more", "other_9"),
    ):
        open_reader(make_job("parquet", tables, path=str(path)))


def test_a_bottom_mlp_without_a_dense_column_is_refused_with_candidates(tmp_path: Path) -> None:
    columns = {
        "label": [1, 0],
        "a": [1, 2],
        "b": [[1], [2]],
        "w": [[0.5], [0.5]],
        "age": [30, 40],
        "price": [0.5, 1.5],
        "name": ["x", "y"],
    }
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    assert refusal(ConfigError, tmp_path, columns={"weights": {"b": "w"}}) == (
        f"{tmp_path / 'data.parquet'}: the model has a bottom MLP for dense features, and no column is named int_0, "
        "int_1, ...; name the dense ones of the other columns with numbers: "
        'data.columns.dense = ["age", "price"]; data.columns.dense = [] says that there are none'
    )
    assert only_batch(tmp_path, columns={"dense": ["age"]}).dense.tolist() == [[30], [40]]
    assert only_batch(tmp_path, columns={"dense": []}).dense.shape == (2, 0)


def test_without_a_column_that_could_be_dense_the_sentence_says_so(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [1], "a": [1], "b": [1]}), tmp_path / "data.parquet")
    assert refusal(ConfigError, tmp_path).endswith(
        "the file has no other column with numbers; data.columns.dense = [] says that there are none"
    )


@pytest.mark.parametrize("name", ["label", "int_0", "a", "b", "w"])
def test_two_columns_of_one_name_are_refused_if_the_job_uses_them(name: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    table = pq.read_table(path)
    pq.write_table(table.append_column("extra", table["a"]).append_column("extra", table["a"]), path)
    columns = {"weights": {"b": "w"}}
    only_batch(path, columns=columns)
    pq.write_table(table.append_column(name, table[name]), path)
    sentence = f"{path}: 2 columns are named {name}; rename all but one of them"
    assert refusal(DataError, path, columns=columns) == sentence
    with pytest.raises(DataError) as refused:
        look_at(str(path), [], {}, AnalysisProgress())
    assert str(refused.value) == sentence


def test_text_with_separators_is_lists_as_in_csv(tmp_path: Path) -> None:
    rows = {"label": [0, 1, 0, 1], "a": ["x|y", "", None, "y||z"], "b": ["['u', 'v']", "[]", "[3]", None]}
    pd.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    columns = {"lists": {"a": "|", "b": "[]"}, "hash": True, "dense": []}
    tables = [table("a", 100, "a"), table("b", 100, "b")]
    jobs = [make_job(form, tables, path=str(tmp_path / f"a.{form}"), columns=columns) for form in ("parquet", "csv")]
    [of_parquet], [of_csv] = (list(open_reader(job).batches("train", 0)) for job in jobs)
    assert same_batch(of_parquet, of_csv)
    assert len(of_parquet.ids) == 2 + 3 + 2 + 1


def test_a_cell_that_is_no_list_is_named(tmp_path: Path) -> None:
    pd.DataFrame({"label": [0, 1, 0], "a": ["[1]", "[2]", "3"]}).to_parquet(tmp_path / "a.parquet")
    job = make_job(
        "parquet", [table("a", 100, "a")], path=str(tmp_path), columns={"lists": {"a": "[]"}, "hash": True, "dense": []}
    )
    with pytest.raises(DataError, match=r"a\.parquet, row 2, column a: '3' is no list such as \[1, 2\]"):
        list(open_reader(job).batches("train", 0))
