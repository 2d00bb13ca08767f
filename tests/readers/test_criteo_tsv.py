"""Criteo TSV: what its fields mean, and the sentence for each way in which a file is broken."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowcast.prefetcher.readers import text_files as text
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import block_permutation
from rowcast.protocol.batch import Batch
from rowcast.runtime.errors import ConfigError, DataError
from tests.support.data_files import BATCH_SIZE, all_samples, click_log, make_job, table, write_tsv
from tests.support.facts import facts


def fields(**changed: str) -> list[str]:
    """One good line: label 1, integers 0 to 12, hashes 0000000a."""
    names = ["label", *(f"int_{i}" for i in range(13)), *(f"cat_{i}" for i in range(26))]
    values = dict(zip(names, ["1", *map(str, range(13)), *["0000000a"] * 26], strict=True)) | changed
    return list(values.values())


def write(path: Path, lines: list[list[str]], newline: str = "\n") -> Path:
    path.write_bytes("".join("\t".join(line) + newline for line in lines).encode("latin-1"))
    return path


def only_batch(path: Path) -> Batch:
    [batch] = open_reader(make_job("criteo-tsv", path=str(path), eval_fraction=0.0)).batches("train", 0)
    return batch


def refusal(path: Path, **data: Any) -> str:
    job = make_job("criteo-tsv", path=str(path), **data)
    with pytest.raises(DataError) as caught:
        list(open_reader(job).batches("train", 0))
    return str(caught.value)


def test_dense_is_the_logarithm_of_one_more_and_missing_or_negative_is_zero(tmp_path: Path) -> None:
    dense = only_batch(
        write(tmp_path / "a", [fields(int_0="", int_1="-7", int_2="0", int_3="99", int_4=str(2**63 - 1))])
    ).dense[0]
    assert dense[:3].tolist() == [0, 0, 0]
    assert dense[3] == np.float32(np.log(100.0))
    assert dense[4] == np.float32(63 * np.log(2.0))


def test_ids_are_unsigned_hashes_modulo_the_table_and_missing_is_zero(tmp_path: Path) -> None:
    ids = only_batch(write(tmp_path / "a", [fields(cat_3="FFFFFFFF", cat_0="", cat_25="80000aFb")])).ids
    assert ids.tolist() == [(2**32 - 1) % 40, 0, 0x80000AFB % 7]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_may_end_either_way_and_the_last_need_not(newline: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a", [fields(), fields(cat_0="")], newline)
    path.write_bytes(path.read_bytes().removesuffix(newline.encode()))
    assert [row.ids for row in all_samples([only_batch(path)])] == [((10,), (10,), (3,)), ((10,), (0,), (3,))]


BROKEN = {
    "a short line": (fields()[:-1], ": 39 fields between tabs instead of 40 (label, 13 integers, 26 hashes)"),
    "an empty line": ([], ": 1 fields between tabs instead of 40"),
    "a long line": ([*fields(), "x"], ": 41 fields between tabs instead of 40"),
    "a hash that is not hex": (fields(cat_0="0000000g"), ", column cat_0: '0000000g' is not 8 hex digits"),
    "a short hash": (fields(cat_25="abc"), ", column cat_25: 'abc' is not 8 hex digits"),
    "bytes beyond ASCII": (fields(cat_3="\xff0000000"), ", column cat_3: '\ufffd0000000' is not 8 hex digits"),
    "a fraction": (fields(int_5="1.5"), ", column int_5: '1.5' is not an integer of 64 bits"),
    "a word": (fields(int_12="many"), ", column int_12: 'many' is not an integer of 64 bits"),
    "a huge integer": (fields(int_0=str(2**63)), f", column int_0: '{2**63}' is not an integer of 64 bits"),
    "a label of 2": (fields(label="2"), ", column label: '2' is not 0 or 1"),
    "a label of 1.0": (fields(label="1.0"), ", column label: '1.0' is not 0 or 1"),
    "no label": (fields(label=""), ", column label: '' is not 0 or 1"),
}


@pytest.mark.parametrize(("line", "complaint"), BROKEN.values(), ids=BROKEN)
def test_a_bad_line_is_named_with_file_line_column_and_value(
    line: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", 1000)
    path = write(tmp_path / "a", [fields()] * 17 + [line] + [fields()] * 9)
    assert refusal(path).startswith(f"{path}, line 18{complaint}")


def test_a_carriage_return_within_a_line_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [fields(), fields(cat_3="\r")])
    assert refusal(path, eval_fraction=0.0) == f"{path}, line 2, column cat_3: '\\r' is not 8 hex digits"


def test_a_truncated_gzip_file_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv.gz"
    write_tsv(click_log(), path)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(DataError, match=facts(path, "gzip", "truncated")):
        open_reader(make_job("criteo-tsv", path=str(path)))


def test_gzip_is_known_by_its_first_bytes_and_not_by_its_name(tmp_path: Path) -> None:
    write_tsv(click_log(), tmp_path / "plain.tsv")
    text = (tmp_path / "plain.tsv").read_bytes()
    (tmp_path / "plain.tsv.gz").write_bytes(text)
    (tmp_path / "gzip.tsv").write_bytes(gzip.compress(text))
    paths = [str(tmp_path / name) for name in ("plain.tsv", "plain.tsv.gz", "gzip.tsv")]
    plain, *others = [all_samples(open_reader(make_job("criteo-tsv", path=path)).batches("train", 0)) for path in paths]
    assert all(other == plain for other in others)


def test_a_file_without_lines_is_refused_before_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", 1000)
    (tmp_path / "a").write_bytes(b"\0" * 5000)
    assert "a: a line is longer than 1000 bytes" in refusal(tmp_path / "a")


@pytest.mark.parametrize("left", [0, 4])
def test_a_file_that_shrinks_during_a_run_is_refused(left: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a", [fields()] * 10)
    reader = open_reader(make_job("criteo-tsv", path=str(path), eval_fraction=0.0))
    write(path, [fields()] * left)
    with pytest.raises(DataError, match=facts("10 lines", "line 1", left)):
        list(reader.batches("train", 0))


@pytest.mark.parametrize("path", ["missing.tsv", "missing/*.tsv"])
def test_a_missing_path_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=facts("data.path", "no such file")):
        open_reader(make_job("criteo-tsv", path=str(tmp_path / path)))


def test_a_folder_without_data_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("hello")
    with pytest.raises(ConfigError, match=facts("data.path", "folder", "(tsv|txt)")):
        open_reader(make_job("criteo-tsv", path=str(tmp_path)))


def test_a_feature_that_the_data_has_not_is_named_with_its_table(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [fields()])
    with pytest.raises(ConfigError, match=facts("table shops", "feature shop", "Criteo TSV", "cat_25")):
        open_reader(make_job("criteo-tsv", [table("shops", 9, "cat_1", "shop")], path=str(path)))


def test_weights_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [fields()])
    with pytest.raises(ConfigError, match=facts("data.columns.weights", "criteo-tsv")):
        open_reader(make_job("criteo-tsv", path=str(path), columns={"weights": {"cat_0": "w"}}))


def test_eval_path_beside_eval_fraction_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [fields()])
    with pytest.raises(ConfigError, match=facts("data.eval_path", "data.eval_fraction")):
        open_reader(make_job("criteo-tsv", path=str(path), eval_path=str(path), eval_fraction=0.1))


@pytest.mark.parametrize("shuffle", ["none", "window:20"])
def test_every_batch_before_that_of_a_bad_line_is_given(shuffle: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a", [fields()] * 40 + [fields(label="x")] + [fields()] * 19)
    batches = open_reader(make_job("criteo-tsv", path=str(path), eval_fraction=0.0, shuffle=shuffle)).batches(
        "train", 0
    )
    place = 40 if shuffle == "none" else 40 + block_permutation(5, 0, 2, 20).tolist().index(0)
    assert [next(batches).size for _ in range(place // BATCH_SIZE)] == [BATCH_SIZE] * (place // BATCH_SIZE)
    with pytest.raises(DataError, match=facts(path, "line 41", "column label", "'x'")):
        next(batches)


@pytest.mark.parametrize("columns", [{"cat_0": ""}, {"cat_0": "", "cat_3": "", "cat_25": ""}])
def test_a_column_without_any_hash_is_all_zeros(columns: dict[str, str], tmp_path: Path) -> None:
    ids = only_batch(write(tmp_path / "a", [fields(**columns)] * 5)).ids.reshape(3, 5)
    for name, own, present in zip(("cat_3", "cat_0", "cat_25"), ids, (10, 10, 3), strict=True):
        assert own.tolist() == [0 if name in columns else present] * 5
