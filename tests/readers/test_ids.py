"""One id has one row, in whatever type and file it is written, or it is refused with the place."""

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from pyarrow.feather import write_feather

from rowcast.deploy.frames import open_frame
from rowcast.deploy.score import scoring_content
from rowcast.job.schema import Job
from rowcast.prefetcher.checkpoints.import_checkpoint import open_source
from rowcast.prefetcher.readers.data_files import with_recorded_rule
from rowcast.prefetcher.readers.hashed_ids import by_its_value, hashed_rows, hashes_of
from rowcast.prefetcher.readers.id_check import check_id_types
from rowcast.prefetcher.readers.reader import id_types, open_reader
from rowcast.runtime.checkpoint_manifest import MANIFEST_NAME, Manifest, read_manifest
from rowcast.runtime.disk import render, seal
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.serving.raw_ids import id_rules, rows_of
from tests.checkpoints import golden
from tests.checkpoints.fake_run import FakeRun
from tests.support.data_files import all_samples, hashed_row, make_job, table
from tests.support.facts import facts

ROWS = 10**6
NOT_PREPARED: dict[str, Any] = {"hash": [], "dense": [], "prepare": {}}
NUMBERS = [0, 7, 127, 128, 1000, 2047, 2048, 65504, 10**6, 1_234_567, 2**24 - 1, 2**24, 2**31, 2**53 - 1, 2**53]
NUMBERS += [2**53 + 1, 10**16, 864_691_135_341_199_232, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, -1, -(2**24), -(2**62)]
DTYPES = [f"{sign}int{bits}" for sign, bits in product(("", "u"), (8, 16, 32, 64))] + ["float16", "float32", "float64"]


def job_of(folder: Path, form: str, **columns: Any) -> Job:
    own = {"dense": [], "hash": True, "label_values": "none"} | columns
    return make_job(form, [table("u", ROWS, "u")], path=str(folder / f"*.{form}"), eval_fraction=0.0, columns=own)


def held(number: int, dtype: str) -> Any:
    """The number in numpy, or None where the type does not hold it."""
    kind = np.dtype(dtype)
    if kind.kind in "iu" and not np.iinfo(kind).min <= number <= np.iinfo(kind).max:
        return None
    with np.errstate(over="ignore"):
        value = kind.type(number)
    return value if np.isfinite(value) and int(value) == number else None


def in_parquet(folder: Path, values: Any) -> None:
    pq.write_table(pa.table({"u": values}), folder / "a.parquet")


def in_arrow(folder: Path, values: Any) -> None:
    write_feather(pa.table({"u": values}), str(folder / "a.arrow"), compression="uncompressed")


def in_json(folder: Path, values: Any) -> None:
    texts = [json.dumps(value) if isinstance(value, str) else str(value) for value in values.to_pylist()]
    (folder / "a.jsonl").write_text("".join(f'{{"u": {text}}}\n' for text in texts))


def in_csv(folder: Path, values: Any) -> None:
    """As pandas writes floats of 64 bits: of fewer it writes other numbers, such as 65500.0 for 65504."""
    (folder / "a.csv").write_text("u\n" + "".join(f"{value}\n" for value in values.to_pylist()))


FORMS: dict[str, Callable[[Path, Any], None]] = {
    "parquet": in_parquet, "arrow": in_arrow, "jsonl": in_json, "csv": in_csv,
}  # fmt: skip


def read(job: Job) -> list[int]:
    return [row for sample in all_samples(open_reader(job).batches("train", 0)) for [row] in sample.ids]


def expected(number: int) -> int:
    return hashed_row((number % 2**64).to_bytes(8, "little"), ROWS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [*DTYPES, "text", "fraction", "exponent"])
def test_a_number_has_one_row_in_every_type_and_format_or_is_refused(dtype: str, form: str, tmp_path: Path) -> None:
    """Each alone, so that one that is refused hides no other."""
    taken, job = 0, job_of(tmp_path, form, hash_by_value=True)
    for number in NUMBERS:
        texts = {"text": str(number), "fraction": f"{number}.0", "exponent": f"{number:.17e}"}
        if dtype not in texts and held(number, dtype) is None:
            continue
        given = [texts[dtype]] if dtype in texts else np.array([number], dtype)
        FORMS[form](tmp_path, values := pa.array(given))
        ways: list[Callable[[], list[int]]] = [
            partial(read, job),
            partial(framed, job, values),
            partial(served, job, values),
        ]
        found, refused = list[int](), list[str]()
        for way in ways:
            try:
                found += way()
            except (DataError, ValueError) as error:
                refused.append(str(error))
        assert all("whole number" in sentence for sentence in refused), refused
        assert set(found) <= {expected(number)}, number
        taken += len(found) == 3
    assert taken >= 4


def framed(job: Job, values: Any) -> list[int]:
    ids: list[int] = next(open_frame(job, pa.table({"u": values})).batches("eval", 0)).ids.tolist()
    return ids


def served(job: Job, values: Any) -> list[int]:
    [rule] = id_rules(job, {})
    rows: list[int] = rows_of(rule, ROWS, values, {}).tolist()
    return rows


def test_a_number_that_a_float_may_have_rounded_names_file_row_and_column(tmp_path: Path) -> None:
    in_parquet(tmp_path, pa.array([5.0, 0.5, 2.0**53]))
    with pytest.raises(DataError, match=facts("a.parquet, row 2", "column u", "9007199254740992")):
        read(job_of(tmp_path, "parquet", hash_by_value=True))
    (tmp_path / "a.csv").write_text("u\n5\n1e+16\n")
    with pytest.raises(DataError, match=facts("a.csv, line 3", "column u", "1e+16")):
        read(job_of(tmp_path, "csv", hash_by_value=True))


def test_json_numbers_beyond_int64_keep_every_digit(tmp_path: Path) -> None:
    numbers = [2**64 - 1, 2**64 - 2, 2**53 + 1, 2**63]
    in_json(tmp_path, pa.array(numbers, pa.uint64()))
    for by_value in (True, False):
        assert read(job_of(tmp_path, "jsonl", hash_by_value=by_value)) == [expected(own) for own in numbers]
    (tmp_path / "a.jsonl").write_text('{"u": 18446744073709551616}\n')
    with pytest.raises(DataError, match=facts("a.jsonl, line 1", "column u")):
        read(job_of(tmp_path, "jsonl", hash_by_value=True))


# rule 1


def test_rule_1_gives_the_rows_of_before() -> None:
    floats = [pa.array(np.array([1_234_567], own)) for own in ("float32", "float64")]
    assert [hashed_rows(own, ROWS, by_value="earlier").tolist() for own in floats] == [[623121], [283004]]
    assert hashed_rows(pa.array(["1e+16", "35.0"]), ROWS, by_value="earlier").tolist() == [
        hashed_row(b"1e+16", ROWS), expected(35),
    ]  # fmt: skip
    power = hashed_rows(pa.array([2.0**60]), ROWS, by_value="earlier").tolist()
    assert power == [hashed_row(b"1.152921504606847e+18", ROWS)]


def test_json_of_rule_1_is_read_as_before(tmp_path: Path) -> None:
    in_json(tmp_path, pa.array([2**64 - 1, 2**64 - 2], pa.uint64()))
    rows = read(job_of(tmp_path, "jsonl", hash_by_value=True, value_rule=1))
    assert rows == [hashed_row(b"1.8446744073709552e+19", ROWS)] * 2


def written(folder: Path, version: int, **columns: Any) -> Manifest:
    """The checkpoint of an earlier version, with these keys of data.columns."""
    content = json.loads((golden.FOLDER / f"{golden.ALL_KEYS}.version-{version}.json").read_bytes())
    content["job"]["data"]["columns"] |= columns
    manifest = seal(msgspec.convert(content, Manifest))
    path = folder / "checkpoints" / manifest.name / MANIFEST_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(render(manifest))
    return read_manifest(path.parent)


@pytest.mark.parametrize(("version", "rule"), [(8, 1), (9, 1), (10, 2)])
def test_a_run_keeps_the_rule_with_which_it_has_begun(version: int, rule: int, tmp_path: Path) -> None:
    manifest = written(tmp_path, version, hash_by_value=True)
    job = job_of(tmp_path, "csv", hash_by_value=True)
    assert with_recorded_rule(job, manifest).data.columns.value_rule == rule
    assert scoring_content(manifest, tmp_path, "new")["data"]["columns"].get("value_rule") == rule
    rules = id_rules(with_recorded_rule(job, manifest), {})
    assert [own.rule for own in rules] == ["hash by value" if rule == 1 else "hash by value 2"]


def test_another_run_starts_from_rows_of_its_own_rule_only(tmp_path: Path) -> None:
    run = FakeRun(of_run(tmp_path, value_rule=1))
    run.train({0: [1, 2]})
    run.writer.id_types = {"u": "text"}
    run.checkpoint()
    with pytest.raises(ConfigError, match=facts("--from", "data.columns.value_rule = 1", 2)):
        open_source(of_run(tmp_path), run.job.run_dir)
    assert open_source(of_run(tmp_path, value_rule=1), run.job.run_dir).id_types == {"u": "text"}
    assert open_source(of_run(tmp_path, hash_by_value=False), run.job.run_dir).id_types == {"u": "text"}


def of_run(folder: Path, **columns: Any) -> Job:
    job = job_of(folder, "csv", **({"hash_by_value": True} | columns))
    return msgspec.structs.replace(job, job=msgspec.structs.replace(job.job, run_dir=str(folder / "run")))


# types of hashed columns


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_text_in_one_file_and_integers_in_the_next_are_refused(form: str, tmp_path: Path) -> None:
    for name, values in {"a": pa.array(["35", None]), "b": pa.nulls(2), "c": pa.array([35, 36])}.items():
        (tmp_path / name).mkdir()
        FORMS[form](tmp_path / name, values)
    sentence = facts(f"c/a.{form}", "column u", "integers", f"a/a.{form}", "text", "hash_by_value")
    job = job_of(tmp_path, form)
    with pytest.raises(DataError, match=sentence):
        open_reader(with_paths(job, str(tmp_path / "*" / f"a.{form}"), None))
    train, held_out = (str(tmp_path / name / f"a.{form}") for name in "ac")
    with pytest.raises(DataError, match=sentence):
        open_reader(with_paths(job, train, held_out))
    by_value = with_paths(job_of(tmp_path, form, hash_by_value=True), str(tmp_path / "*" / f"a.{form}"), None)
    assert read(by_value) == [expected(35), 0, 0, 0, expected(35), expected(36)]


def with_paths(job: Job, train: str, held_out: str | None) -> Job:
    return msgspec.structs.replace(job, data=msgspec.structs.replace(job.data, path=train, eval_path=held_out))


@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
def test_a_checkpoint_refuses_ids_of_another_type(form: str, tmp_path: Path) -> None:
    FORMS[form](tmp_path, pa.array([35, 36]))
    job = job_of(tmp_path, form)
    reader, manifest = open_reader(job), written(tmp_path, 10)
    assert id_types(reader) == {"u": "integers"}
    trained_on_text = msgspec.structs.replace(manifest, id_types={"u": "text"})
    files = facts(f"a.{form}", "column u", "integers", "data/day_0_dense.npy", "text", "hash_by_value")
    with pytest.raises(DataError, match=files):
        check_id_types(trained_on_text, id_types(reader), reader.paths)
    for known in ({}, {"u": "integers"}):
        check_id_types(msgspec.structs.replace(manifest, id_types=known), id_types(reader), reader.paths)
    [rule] = id_rules(job, {"u": "text"})
    with pytest.raises(ValueError, match=facts("feature u", "int64", "text")):
        rows_of(rule, ROWS, [35], {})
    assert rows_of(rule, ROWS, ["35", None], {}).tolist() == [hashed_row(b"35", ROWS), 0]


# columns without any value


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_column_that_is_all_missing_is_missing_values(form: str, tmp_path: Path) -> None:
    columns = {
        "u": pa.array([3, 4]),
        "tags": pa.array([[1], [2]]),
        "price": pa.array([0.5, 1.5]),
        "w": pa.array([5, 6]),
    }
    missing = {
        "u": pa.nulls(2),
        "tags": pa.array([[], None], pa.list_(pa.null())),
        "price": pa.nulls(2),
        "w": pa.nulls(2),
    }
    for name, own in {"a": columns, "b": missing}.items():
        content = pa.table(own)
        if form == "parquet":
            pq.write_table(content, tmp_path / f"{name}.parquet")
        else:
            write_feather(content, str(tmp_path / f"{name}.arrow"), compression="uncompressed")
    rules = {"price": {"fill": 9.0}, "w": {"buckets": [5.5]}}
    own = {"dense": ["price"], "hash": ["u"], "label_values": "none", "prepare": rules}
    tables = [table("u", 100, "u"), table("tags", 9, "tags"), table("w", 3, "w")]
    for path, expected_dense in {"*": [0.5, 1.5, 9.0, 9.0], "b": [9.0, 9.0]}.items():
        job = make_job(form, tables, path=str(tmp_path / f"{path}.{form}"), eval_fraction=0.0, columns=own)
        samples = list(all_samples(open_reader(job).batches("train", 0)))
        assert [sample.dense[0] for sample in samples] == expected_dense
        assert [sample.ids for sample in samples[-2:]] == [((0,), (), (0,))] * 2
    with pytest.raises(DataError, match=facts("row 0", "column w", "missing")):
        read(make_job(form, [table("w", 9, "w")], path=str(tmp_path / f"b.{form}"), columns=own | NOT_PREPARED))


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
