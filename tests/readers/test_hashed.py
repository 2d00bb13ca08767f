"""Strings as ids: which row a value takes, the same in every type of column, and what is refused."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from rowcast.prefetcher.readers.hashed_ids import by_its_value, hashed_rows, hashes_of
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.runtime.errors import ConfigError
from tests.support.data_files import all_samples, hashed_row, make_job, table
from tests.support.facts import facts

WORDS = ["a", None, "bb", "a", "", "ünïcode", "a" * 300]
STRINGS = pa.array(WORDS)


@pytest.mark.parametrize("num_embeddings", [2, 3, 1000, 2**48])
@pytest.mark.parametrize(
    "values",
    [
        STRINGS,
        STRINGS.cast(pa.large_string()),
        STRINGS.cast(pa.binary()),
        STRINGS.cast(pa.large_binary()),
        STRINGS.cast(pa.string_view()),
        STRINGS.dictionary_encode(),
        STRINGS.cast(pa.large_string()).dictionary_encode().slice(0),
        pa.concat_arrays([pa.array(["x", None]), STRINGS]).slice(2),
    ],
    ids=str,
)
def test_a_string_takes_the_row_of_its_bytes_and_a_missing_one_row_0(values: Any, num_embeddings: int) -> None:
    expected = [0 if word is None else hashed_row(word.encode(), num_embeddings) for word in WORDS]
    assert hashed_rows(values, num_embeddings, by_value=False).tolist() == expected
    assert min(expected[:1] + expected[2:]) > 0, "no value shares the row of those that are missing"


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), pa.uint64()])
def test_an_integer_takes_the_row_of_its_8_little_endian_bytes_whatever_its_type(kind: Any) -> None:
    numbers = (
        [0, None, 7, 100] + ([] if kind == pa.int8() else [2**31 - 1]) + ([2**63 - 1] if kind.bit_width == 64 else [])
    )
    numbers += [2**64 - 1] if kind == pa.uint64() else [-1]
    expected = [0 if n is None else hashed_row((n % 2**64).to_bytes(8, "little"), 1000) for n in numbers]
    assert hashed_rows(pa.array(numbers, kind), 1000, by_value=False).tolist() == expected


@pytest.mark.parametrize(
    "values", [STRINGS, pa.array([None, None], pa.string()), pa.array([], pa.string()), pa.array([1, None])], ids=str
)
def test_a_table_of_one_row_has_row_0_only(values: Any) -> None:
    assert hashed_rows(values, 1, by_value=False).tolist() == [0] * len(values)


def test_many_hashes_at_once_are_those_of_one_by_one() -> None:
    numbers = [0, 1, -1, 2**63 - 1, -(2**63), *(7**i for i in range(22)), *(-(11**i) for i in range(18))]
    found = hashes_of(pa.array([*numbers, None]), by_value=False).to_pylist()
    assert found == [xxhash.xxh3_64_intdigest(own.to_bytes(8, "little", signed=True)) for own in numbers] + [None]
    texts = [str(own).encode() for own in numbers] + [
        b" 35.0 ",
        b"35.",
        b"\v-8\t",
        b"00501",
        b"-0",
        b"1e3",
        b"",
        b"\xff",
        b"\xff7",
    ]
    texts += [b"9" * 17, b"9" * 18, b"9" * 18 + b".00", b"9" * 19, b"9" * 20, b"7." + b"0" * 40, b"3 5", b"3\n", b"\n"]
    by_value = hashes_of(pa.array(texts, pa.binary()), by_value="earlier").to_pylist()
    assert by_value == [xxhash.xxh3_64_intdigest(by_its_value(text, "earlier")) for text in texts]


def write(folder: Path, **changed: Any) -> str:
    columns = {
        "label": pa.array([0, 1, 1, 0]),
        "int_0": pa.array([0.5] * 4),
        "user": pa.array(["ann", "bob", None, "ann"]),
        "item": pa.array([["x", "y"], None, [], ["x", None]]),
        "hour": pa.array([3, 4, 5, 6]),
    }
    pq.write_table(pa.table(columns | changed), folder / "data.parquet")
    return str(folder / "data.parquet")


TABLES = [table("user", 100, "user"), table("item", 50, "item"), table("hour", 24, "hour")]


def ids(path: str, hash: bool | list[str], **data: Any) -> list[Any]:
    job = make_job("parquet", TABLES, path=path, eval_fraction=0.0, columns={"hash": hash}, **data)
    reader = open_reader(job)
    rows = [row.ids for row in all_samples(reader.batches("train", 0))]
    assert reader.invalid_ids == 0, "a missing value has a row of its own"
    return rows


def test_strings_lists_of_strings_and_integers_are_ids_unless_features_are_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    ann, bob, x, y = hashed_row(b"ann", 100), hashed_row(b"bob", 100), hashed_row(b"x", 50), hashed_row(b"y", 50)
    expected = [((ann,), (x, y)), ((bob,), ()), ((0,), ()), ((ann,), (x, 0))]
    hours = [hashed_row(hour.to_bytes(8, "little"), 24) for hour in (3, 4, 5, 6)]
    assert ids(path, True) == [(*own, (hour,)) for own, hour in zip(expected, hours, strict=True)]
    assert ids(path, ["user", "item"]) == [(*own, (hour,)) for own, hour in zip(expected, (3, 4, 5, 6), strict=True)]


def test_a_list_of_a_dictionary_of_strings_is_hashed(tmp_path: Path) -> None:
    item = pa.ListArray.from_arrays(
        pa.array([0, 2, 2, 2, 4], pa.int32()), pa.array(["x", "y", "x", None]).dictionary_encode()
    )
    rows = ids(write(tmp_path, item=item), True)
    x, y = hashed_row(b"x", 50), hashed_row(b"y", 50)
    assert [own[1] for own in rows] == [(x, y), (), (), (x, 0)]


def test_hash_names_features_that_exist_and_a_format_that_has_columns(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=facts("data.columns.hash", "feature usr", "user")):
        ids(write(tmp_path), ["usr"])
    with pytest.raises(ConfigError, match=facts("columns.hash", "parquet", "csv", "'criteo-npy'")):
        make_job("criteo-npy", path="x", columns={"hash": True})
