"""What is refused in files, and the place, column and value that its sentence names: a table of faults."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.feather import write_feather

from rowcast.job.schema import Job
from rowcast.prefetcher.readers import text_files as text
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.runtime.errors import ConfigError, DataError
from tests.support.data_files import click_log, good, make_job, table, write_bags, write_day, write_tsv
from tests.support.facts import facts

Make = Callable[[Path], Job]
TABLES = [table("scalars", 10, "a"), table("bags", 10, "b")]
LISTS = pa.list_(pa.int64())


def tsv(line: list[str], tables: Any = None, **data: Any) -> Make:
    """Line 18 of 27, read in short pieces."""

    def make(folder: Path) -> Job:
        lines = [good()] * 17 + [line] + [good()] * 9
        (folder / "a.tsv").write_bytes("".join("\t".join(own) + "\n" for own in lines).encode("latin-1"))
        return make_job("criteo-tsv", tables, **{"path": str(folder), "eval_fraction": 0.0, **data})

    return make


def json_lines(line: str, tables: Any = None, **data: Any) -> Make:
    """Line 18 of 27, read in short pieces."""
    good = '{"label": 1, "int_0": 0.5, "a": 1, "b": [1, 2], "unused": {"x": []}}'

    def make(folder: Path) -> Job:
        (folder / "a.jsonl").write_text("".join(f"{own}\n" for own in [good] * 17 + [line] + [good] * 9))
        return make_job("jsonl", tables or TABLES, **{"path": str(folder), "eval_fraction": 0.0, **data})

    return make


def npy(part: str = "labels", change: Callable[[Any], Any] = np.asarray, more_days: int = 0, **data: Any) -> Make:
    """A good day_0 of 20 rows, but for one array; None removes its file."""

    def make(folder: Path) -> Job:
        for day in range(1 + more_days):
            write_day(folder, f"day_{day}", 20)
        path = folder / f"day_0_{part}.npy"
        changed = change(np.load(path))
        path.unlink()
        if changed is not None:
            np.save(path, changed)
        return make_job("criteo-npy", **{"path": str(folder), "eval_fraction": 0.0, **data})

    return make


def put(row: int, column: int, value: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[row, column] = value
        return array

    return change


def parquet(tables: Any = TABLES, columns: Any = None, data: Any = None, **changed: Any) -> Make:
    """The second of two files: good, but for these columns; None leaves one out."""

    def make(folder: Path) -> Job:
        write_bags(folder / "0.parquet", **{name: None for name, own in changed.items() if own is None})
        write_bags(folder / "1.parquet", **changed)
        own = {"path": str(folder), "eval_fraction": 0.0, "columns": columns or {}, **(data or {})}
        return make_job("parquet", tables, **own)

    return make


def arrow(compression: str = "uncompressed", **changed: Any) -> Make:
    """A file of four rows; None leaves a column out."""

    def make(folder: Path) -> Job:
        write_bags(folder / "0.parquet", **changed)
        write_feather(pq.read_table(folder / "0.parquet"), folder / "0.arrow", compression=compression)
        return make_job("arrow", TABLES, path=str(folder), eval_fraction=0.0)

    return make


def cut(make: Make, name: str, change: Callable[[bytes], bytes]) -> Make:
    def made(folder: Path) -> Job:
        job = make(folder)
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        return job

    return made


def gzipped(folder: Path) -> Job:
    write_tsv(click_log(), folder / "a.tsv.gz")
    return make_job("criteo-tsv", path=str(folder))


def large(folder: Path) -> Job:
    columns = {name: np.arange(5000) % 2 for name in ("label", "int_0", "a", "b")}
    pq.write_table(pa.table(columns), folder / "0.parquet", use_dictionary=False, compression="zstd")
    return make_job("parquet", TABLES, path=str(folder), eval_fraction=0.0)


NO_HEX, NO_INTEGER = "is not 8 hex digits", "is not an integer of 64 bits"
NO_IDS = "it must be integers or lists of integers"
DATA: dict[str, tuple[Make, str]] = {
    "tsv, a short line": (
        tsv(good()[:-1]),
        r"a\.tsv, line 18: 39 fields between tabs instead of 40 \(label, 13 integers, 26 hashes\)",
    ),
    "tsv, an empty line": (tsv([]), "line 18: 1 fields between tabs instead of 40"),
    "tsv, a long line": (tsv([*good(), "x"]), "line 18: 41 fields between tabs instead of 40"),
    "tsv, no hex": (tsv(good(cat_0="0000000g")), f"line 18, column cat_0: '0000000g' {NO_HEX}"),
    "tsv, a short hash": (tsv(good(cat_25="abc")), f"line 18, column cat_25: 'abc' {NO_HEX}"),
    "tsv, no ASCII": (tsv(good(cat_3="\xff0000000")), f"column cat_3: '\ufffd0000000' {NO_HEX}"),
    "tsv, a carriage return": (tsv(good(cat_3="\r")), rf"line 18, column cat_3: '\\r' {NO_HEX}"),
    "tsv, a fraction": (tsv(good(int_5="1.5")), rf"line 18, column int_5: '1\.5' {NO_INTEGER}"),
    "tsv, a word": (tsv(good(int_12="many")), f"line 18, column int_12: 'many' {NO_INTEGER}"),
    "tsv, a huge integer": (tsv(good(int_0=str(2**63))), f"column int_0: '{2**63}' {NO_INTEGER}"),
    "tsv, a label of 2": (tsv(good(label="2")), "line 18, column label: '2' is not 0 or 1"),
    "tsv, no label": (tsv(good(label="")), "line 18, column label: '' is not 0 or 1"),
    "tsv, no line ends": (
        cut(tsv(good()), "a.tsv", lambda own: bytes(5000)),
        "a line is longer than 1000 bytes",
    ),
    "tsv, truncated gzip": (cut(gzipped, "a.tsv.gz", lambda own: own[:-500]), facts("a.tsv.gz", "gzip", "truncated")),
    "json, an empty line": (json_lines(""), r"a\.jsonl, line 18: the line is empty; remove it"),
    "json, two objects": (json_lines('{"a": 1}{"a": 2}\n'), r"line 18: the line is no JSON \(Extra data"),
    "json, no object": (json_lines("[1]"), r"line 18: '\[1\]' is no object; give each sample as an object"),
    "json, no JSON": (json_lines('{"a": 1,}'), r"line 18: the line is no JSON \(.*property name"),
    "json, text for an id": (
        json_lines('{"label": 1, "int_0": 1, "a": "x", "b": []}'),
        'line 18, column a: "x" is not an integer of 64 bits, as in the first lines',
    ),
    "json, a fraction in a list": (
        json_lines('{"label": 1, "int_0": 1, "a": 1, "b": [1, 2.5]}'),
        "line 18, column b: 2.5 is not an integer",
    ),
    "json, no list": (json_lines('{"label": 1, "int_0": 1, "a": 1, "b": 5}'), "line 18, column b: 5 is no list"),
    "json, true for a number": (
        json_lines('{"label": true, "int_0": 1, "a": 1}'),
        "line 18, column label: true is not a number",
    ),
    "json, NaN": (json_lines('{"label": 1, "int_0": NaN, "a": 1}'), "line 18, column int_0: "),
    "json, no label": (json_lines('{"int_0": 1, "a": 1}'), "line 18, column label: label nan is not 0 or 1"),
    "json, an id": (
        json_lines('{"label": 1, "int_0": 1, "a": 10, "b": []}'),
        r"line 18, column a: id 10 is outside table scalars \(num_embeddings = 10\)",
    ),
    "arrow, an id": (arrow(a=pa.array([1, 2, 10, 3])), r"0\.arrow, row 2, column a: id 10 is outside table scalars"),
    "arrow, compressed": (arrow("lz4"), r"0\.arrow: no uncompressed Arrow file \(it is compressed\); write it with"),
    "arrow, torn": (cut(arrow(), "0.arrow", lambda own: own[:-20]), r"0\.arrow: no uncompressed Arrow file \("),
    "npy, a label of 2": (npy("labels", put(7, 0, 2)), facts("row 7", "column label", "label 2.0")),
    "npy, fewer rows": (npy("sparse", lambda a: a[:-1]), "dense, sparse and labels have 20, 19 and 20 rows"),
    "npy, doubles": (npy("dense", np.float64), "_dense.npy holds float64; it must hold float32"),
    "npy, short integers": (npy("sparse", np.int16), "_sparse.npy holds int16; it must hold int32 or int64"),
    "npy, flat dense": (npy("dense", np.ravel), r"the array has shape \(100,\); it must have 2 dimensions"),
    "npy, two labels": (
        npy("labels", lambda a: np.hstack([a, a])),
        r"_labels.npy holds int32 \(20, 2\); it must hold one number per row",
    ),
    "npy, objects": (npy("labels", lambda a: a.astype(object)), facts("day_0_labels.npy", "Python objects")),
    "npy, truncated": (
        cut(npy(), "day_0_sparse.npy", lambda own: own[:1000]),
        r"day_0_sparse\.npy: not a whole \.npy file",
    ),
    "npy, two widths": (
        npy("dense", lambda a: a[:, :4], more_days=1),
        facts("day_1_dense.npy", 5, "day_0_dense.npy", 4),
    ),
    "parquet, an id in a shuffled window": (
        parquet(b=pa.array([[3, 3], None, [4, 10], []], LISTS), data={"shuffle": "window:8"}),
        r"1\.parquet, row 2, column b: id 10 is outside table bags",
    ),
    "parquet, weights": (
        parquet(
            columns={"weights": {"b": "w"}}, w=pa.array([[1.0, 1.0], None, [], [1.0, 2.0]], pa.list_(pa.float32()))
        ),
        r"1\.parquet, row 3, column w: 2 values for 1 ids of feature b",
    ),
    "parquet, text for ids": (
        parquet(a=pa.array(["x"] * 4)),
        rf"1\.parquet, column a: the type is string; {NO_IDS}; set data.columns.hash = true to use strings as ids",
    ),
    "parquet, numbers with a point for ids": (parquet(a=pa.array([1.0] * 4)), f"the type is double; {NO_IDS}"),
    "parquet, and under a hash": (
        parquet(columns={"hash": True}, a=pa.array([1.0] * 4)),
        facts("column a", "double", "integers"),
    ),
    "parquet, lists of them": (
        parquet(b=pa.array([[1.0]] * 4)),
        f"column b: the type is list<element: double>; {NO_IDS}",
    ),
    "parquet, text for a label": (
        parquet(label=pa.array(["no"] * 4)),
        "column label: the type is string; it must be numbers",
    ),
    "parquet, lists for a number": (
        parquet(int_0=pa.array([[1.0]] * 4)),
        "column int_0: the type is list<element: double>; it must be numbers",
    ),
    "parquet, truncated": (
        cut(parquet(), "1.parquet", lambda own: own[:600]),
        r"1\.parquet: it cannot be decoded \(Arrow",
    ),
    "parquet, a damaged page": (
        cut(large, "0.parquet", lambda own: own[:30] + bytes(170) + own[200:]),
        r"0\.parquet, row group 0: it cannot be decoded \(OSError: ZSTD",
    ),
}
JOB: dict[str, tuple[Make, str]] = {  # what its file, or a name in it, cannot mean
    "tsv, no such file": (tsv(good(), path="gone/*.tsv"), facts("data.path", "no such file")),
    "tsv, an unknown feature": (
        tsv(good(), [table("shops", 9, "cat_1", "shop")]),
        facts("table shops", "feature shop", "Criteo TSV", "cat_25"),
    ),
    "tsv, weights": (
        tsv(good(), columns={"weights": {"cat_0": "w"}}),
        facts("data.columns.weights", "criteo-tsv"),
    ),
    "tsv, two ways to evaluate": (
        tsv(good(), eval_path="x", eval_fraction=0.1),
        facts("data.eval_path", "data.eval_fraction"),
    ),
    "npy, a missing part": (npy("labels", lambda a: None), facts("day_0_labels.npy", "dense, sparse and labels")),
    "npy, an unknown feature": (
        npy(tables=[table("t", 7, "cat_26")]),
        facts("table t", "feature cat_26", "day_0_sparse.npy", "cat_25"),
    ),
    "parquet, no such feature": (
        parquet(b=None),
        r"table bags: feature b is not in .*parquet, which has label, int_0, a, w; correct the table's",
    ),
    "parquet, no such dense column": (
        parquet(columns={"dense": ["int_0", "int0"]}),
        "data.columns.dense: .* has no column int0, the nearest is int_0",
    ),
    "parquet, no such weights": (
        parquet(columns={"weights": {"b": "ww"}}),
        "data.columns.weights: .* has no column ww, the nearest is w;",
    ),
    "parquet, hash": (parquet(data={"hash": True}), "data.hash: parquet ids are used as they are"),
}


@pytest.mark.parametrize("fault", [*DATA, *JOB])
def test_it_is_refused(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", 1000)
    make, sentence = (DATA | JOB)[fault]
    with pytest.raises(DataError if fault in DATA else ConfigError) as caught:
        list(open_reader(make(tmp_path)).batches("train", 0))
    assert re.search(sentence, str(caught.value)), str(caught.value)
