"""What is refused in files, with its place; files of strangers end a reader with one sentence, or are read."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.feather import write_feather

from rowcast.job.schema import Job
from rowcast.prefetcher.readers import id_check, workers
from rowcast.prefetcher.readers import text_files as text
from rowcast.prefetcher.readers.formats.jsonl import MOST_DEPTH
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.workers import DecoderShare, WorkerSource
from rowcast.runtime.errors import ConfigError, DataError, RowcastError
from tests.readers.polling import rest_of
from tests.support.data_files import all_samples, click_log, good, make_job, table, write_bags, write_day, write_tsv
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


HASHED = [table("a", 100, "a"), table("b", 100, "b")]
OF_STRANGERS = {"dense": [], "label_values": "none", "hash": ["b"]}
NUM_ROWS = 200


def job_of(path: Path, form: str) -> Job:
    copies = str(path.parent / "copies")
    return make_job(form, HASHED, path=str(path), eval_fraction=0.0, columns=OF_STRANGERS, copies=copies)


def samples(job: Job) -> list[Any]:
    return list(all_samples(open_reader(job).batches("train", 0)))


def read_or_refused(path: Path, form: str) -> list[Any] | None:
    """None if it is refused, as it must be: with its name."""
    try:
        return samples(job_of(path, form))
    except RowcastError as error:
        sentence, is_data = str(error), isinstance(error, DataError)
    assert path.name in sentence
    assert is_data or "no column" in sentence, "the name of a column may be damaged"
    return None


# JSON lines


def nested(opening: str, closing: str, depth: int) -> str:
    return opening * depth + "1" + closing * depth


DEEP = [("[", "]"), ('{"y":', "}"), ('[{"y":', "}]")]


@pytest.mark.parametrize(("opening", "closing"), DEEP, ids=["lists", "objects", "both"])
@pytest.mark.parametrize("key", ["unused", "a"])
@pytest.mark.parametrize("depth", [MOST_DEPTH, 2000, 100_000])
def test_a_line_that_is_nested_too_deep_is_refused_before_a_parser_sees_it(
    depth: int, key: str, opening: str, closing: str, tmp_path: Path
) -> None:
    for place in (0, 5):
        lines = ['{"a": 1, "b": "x"}'] * 9
        lines[place] = f'{{"{key}": {nested(opening, closing, depth)}, "b": "x"}}'
        (tmp_path / "log.jsonl").write_text("\n".join(lines))
        with pytest.raises(DataError, match=facts("log.jsonl", f"line {place + 1}", MOST_DEPTH)):
            samples(job_of(tmp_path / "log.jsonl", "jsonl"))


def test_brackets_that_are_not_deep_are_read(tmp_path: Path) -> None:
    wide, deep = [[{"y": [1]}]] * 500, json.loads(nested("[", "]", MOST_DEPTH - 1))
    lines = [{"a": 1, "b": "[" * 300 + '\\"[{', "unused": wide}, {"a": 2, "b": "x", "unused": deep}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(own) + "\n" for own in lines * 20))
    assert [sample.ids[0] for sample in samples(job_of(tmp_path / "log.jsonl", "jsonl"))] == [(1,), (2,)] * 20


def test_a_key_that_no_one_reads_may_hold_anything(tmp_path: Path) -> None:
    values = ["a", 3, {}, [], None, 1.5, {"x": [1, "a"]}, [1, "a", {}], 2**70, True]
    lines = [json.dumps({"a": 1, "b": "x", "unused": own, f"unused_{i}": own}) for i, own in enumerate(values)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    assert len(samples(job_of(tmp_path / "log.jsonl", "jsonl"))) == len(values)


def test_a_key_that_is_read_names_the_line_of_another_type(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"a": 1, "b": null}\n' * 30 + '{"a": 1, "b": "x"}\n{"a": 1, "b": 3}\n')
    with pytest.raises(DataError, match=facts("log.jsonl", "line 32", "column b", 3, "text")):
        samples(job_of(tmp_path / "log.jsonl", "jsonl"))


# Arrow


def arrow_file(path: Path, **changed: Any) -> Path:
    columns = {"a": pa.array([i % 100 for i in range(NUM_ROWS)]), "b": pa.array([f"u{i}" for i in range(NUM_ROWS)])}
    write_feather(pa.table(columns | changed), str(path), compression="uncompressed")
    return path


def places_of(content: bytes, number: int) -> Iterator[int]:
    """Where an int64 lies in a file."""
    at = content.find(wanted := number.to_bytes(8, "little", signed=True))
    while at >= 0:
        yield at
        at = content.find(wanted, at + 1)


@pytest.mark.parametrize("claimed", [-5, 2000, 200_000_000, 2**62])
def test_lengths_that_a_record_batch_claims_are_compared_with_its_buffers(claimed: int, tmp_path: Path) -> None:
    """Each place that holds the number of rows alone, and all together, as a batch and its columns claim it."""
    path = arrow_file(tmp_path / "log.arrow")
    content, expected = path.read_bytes(), samples(job_of(path, "arrow"))
    places = [*places_of(content, NUM_ROWS)]
    assert len(places) >= 3, "of the batch and of two columns"
    for chosen in (*([at] for at in places), places):
        changed = bytearray(content)
        for at in chosen:
            changed[at : at + 8] = claimed.to_bytes(8, "little", signed=True)
        path.write_bytes(changed)
        assert read_or_refused(path, "arrow") in (None, expected), "unless nobody reads the number"
    assert read_or_refused(path, "arrow") is None, "all claim it"


@pytest.mark.parametrize("offset", [-1, 2**31 - 1, 0, 7])
@pytest.mark.parametrize("name", ["a", "b"])
def test_offsets_of_texts_and_lists_lead_into_their_values(name: str, offset: int, tmp_path: Path) -> None:
    columns = {"b": pa.array([f"u{i}" for i in range(NUM_ROWS)]), "a": pa.array([[i % 100] for i in range(NUM_ROWS)])}
    path = arrow_file(tmp_path / "log.arrow", **columns)
    offsets = np.frombuffer(columns[name].buffers()[1], np.int32)[: NUM_ROWS + 1].tobytes()
    content = path.read_bytes()
    at = content.index(offsets) + 4 * 120
    path.write_bytes(content[:at] + offset.to_bytes(4, "little", signed=True) + content[at + 4 :])
    assert read_or_refused(path, "arrow") is None


def test_texts_of_any_encoding_are_hashed_as_their_bytes(tmp_path: Path) -> None:
    latin = pa.array([b"caf\xe9"] * NUM_ROWS, pa.binary()).view(pa.string())
    path = arrow_file(tmp_path / "log.arrow", b=latin)
    assert len({sample.ids[1] for sample in samples(job_of(path, "arrow"))}) == 1


# Parquet, and whatever a library raises


def damaged(content: bytes, seed: int) -> bytes:
    rng, changed = np.random.default_rng(seed), bytearray(content)
    for at in rng.integers(4, len(content), 6):
        changed[at] = rng.integers(0, 256)
    return bytes(changed)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_damaged_files_are_read_or_refused_by_name(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"log.{form}"
    columns = pa.table({"a": [i % 100 for i in range(NUM_ROWS)], "b": [f"u{i % 7}" for i in range(NUM_ROWS)]})
    if form == "parquet":
        pq.write_table(columns, path)
    else:
        arrow_file(path)
    content, refused = path.read_bytes(), 0
    for seed in range(60):
        path.write_bytes(damaged(content, seed))
        refused += read_or_refused(path, form) is None
    assert refused > 0


ERRORS: list[Callable[[], Exception]] = [
    lambda: RecursionError("deep"), lambda: SystemError("negative"), lambda: MemoryError("2**62"),
    lambda: OverflowError("wide"), lambda: KeyError("x"), lambda: pa.ArrowNotImplementedError("kind"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=[type(own()).__name__ for own in ERRORS])
def test_whatever_a_decoder_raises_is_a_sentence_with_the_place(error: Callable[[], Exception]) -> None:
    raised, kept = error(), DataError("its own sentence")
    sentence = facts("log.x, row 7", type(raised).__name__)
    with pytest.raises(DataError, match=sentence), id_check.decoding(lambda i: f"log.x, row {7 + i}", 1):
        raise raised
    with pytest.raises(DataError) as found, id_check.decoding(lambda i: "log.x", 1):
        raise kept
    assert found.value is kept


# the decoding process


def without_room(share: DecoderShare, sender: Any) -> None:
    raise MemoryError("no room")


def fails(share: DecoderShare, pipe: Connection) -> None:
    workers.send_share = without_room
    DECODE(share, pipe)


def ends_slowly(share: DecoderShare, pipe: Connection) -> None:
    pipe.close()
    time.sleep(1.5)  # as with a large core file
    os._exit(7)


DECODE = workers.decode


@pytest.mark.parametrize(
    ("target", "told"), [(fails, ("MemoryError", "no room")), (ends_slowly, ("exit code 7",))], ids=["fails", "slowly"]
)
def test_a_decoding_process_tells_how_it_ended(
    target: Callable[..., None], told: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "decode", target)
    source = WorkerSource(make_job("synthetic", None))
    source.start()
    with pytest.raises(RowcastError, match=facts(*told)):
        rest_of(source)
    source.close()
