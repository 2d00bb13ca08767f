"""The bits of every format's batches never change: digests of all arrays of a run over fixed data.

After a change that is meant to alter them, print the new ones:

    python -m tests.readers.test_digests
"""

import gzip
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.draws import draws
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.workers import DecoderShare, decode_share
from rowcast.protocol.batch import Scheduled
from rowcast.runtime.arrays import I64
from tests.support import jobs

NUM_ROWS, FILES = 211, (120, 1, 90)
WORDS = ["plain", "with, comma", 'with "quotes"', "ünïcode", "042", "42", " ", ""]
TABLES = [
    jobs.table("words", 50, 4, "word", "tags"),
    jobs.table("items", 40, 4, "item", "history"),
    jobs.table("users", 30, 4, "user", pooling="none"),
]
APART = [*TABLES[:1], jobs.table("item", 40, 4, "item"), jobs.table("rest", 40, 4, "history", "user", pooling="none")]
CATS = [jobs.table("late", 40, 4, "cat_3", "cat_0"), jobs.table("last", 7, 4, "cat_25")]
COLUMNS: dict[str, Any] = {
    "label": "click",
    "dense": ["price", "flag", "count"],
    "weights": {"history": "strength"},
    "inputs": ["when", "age", "member", "user"],
}
HASH = {"hash": ["word", "tags"]}
LISTS = {"lists": {"history": "|", "tags": ";"}}


def numbers(stream: int, below: int, count: int = NUM_ROWS) -> I64:
    return draws(7, "train", 0, stream).below(below, count).ids


def log() -> dict[str, list[Any]]:
    """Columns of labels, numbers, words, and lists of 0 to 3 items; some are missing."""
    ends = np.cumsum(numbers(0, 4)).tolist()
    lists = [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
    words = [WORDS[i] or None for i in numbers(1, len(WORDS)).tolist()]
    history, strength, tags = (numbers(2 + i, size, 800).tolist() for i, size in enumerate((40, 9, len(WORDS) - 1)))
    return {
        "click": (numbers(6, 2) == 1).tolist(),
        "buy": [None if i == 2 else i for i in numbers(7, 3).tolist()],
        "rating": [i / 4 for i in numbers(8, 17).tolist()],
        "price": [i / 8 - 50 for i in numbers(9, 999).tolist()],
        "flag": (numbers(10, 2) == 0).tolist(),
        "count": numbers(11, 10**6).tolist(),
        "item": [None if i == 60 else i for i in numbers(12, 61).tolist()],  # some are outside the table
        "user": numbers(13, 30).tolist(),
        "history": [history[own] for own in lists],
        "strength": [[i / 16 for i in strength[own]] for own in lists],
        "word": words,
        "tags": [[WORDS[i] for i in tags[own]] for own in lists],
        "when": (numbers(14, 2**31 - 1) * 2**20).tolist(),
        "age": [i / 3 for i in numbers(15, 300).tolist()],
        "member": (numbers(16, 2) == 1).tolist(),
    }


def cell(value: Any, separator: str) -> str:
    if isinstance(value, list):
        value = separator.join(map(str, value))
    text = "" if value is None else str(value)
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',"') else text


def csv(folder: Path, **data: Any) -> Job:
    columns, first = log(), 0
    for number, rows in enumerate(FILES):
        own = slice(first, first := first + rows)
        cells = [[cell(value, ";" if name == "tags" else "|") for value in columns[name][own]] for name in columns]
        end = "\r\n" if number else "\n"
        text = end.join(map(",".join, [[*columns], *zip(*cells, strict=True)])).encode() + b"\n" * (number < 2)
        (folder / f"{number}.csv").write_bytes(gzip.compress(text) if number == 1 else text)
    return job_of("csv", folder, TABLES, COLUMNS | HASH | LISTS, data)


def parquet(folder: Path, **data: Any) -> Job:
    columns, first = log(), 0
    types = {
        "price": pa.float32(),
        "user": pa.uint64(),
        "age": pa.float16(),
        "buy": pa.int8(),
        "item": pa.int16(),
        "history": pa.list_(pa.int32()),
    }
    for number, rows in enumerate(FILES):
        own = slice(first, first := first + rows)
        arrays = {name: pa.array(values[own], types.get(name)) for name, values in columns.items()}
        arrays["word"] = arrays["word"].dictionary_encode()
        pq.write_table(pa.table(arrays), folder / f"{number}.parquet", row_group_size=25)
    return job_of("parquet", folder, TABLES, COLUMNS | HASH, data)


def tsv(folder: Path, **data: Any) -> Job:
    integers = [numbers(20 + i, 10 ** (1 + i % 7)) - 3 for i in range(13)]
    columns = [[*map(str, numbers(19, 2).tolist())]]
    columns += [["" if value == 0 else str(value) for value in own.tolist()] for own in integers]
    hashes = [numbers(40 + i, 2**32 - 1).tolist() for i in range(26)]
    columns += [["" if value % 9 == 0 else f"{value:08x}" for value in own] for own in hashes]
    rows = zip(*columns, strict=True)
    lines = ["\t".join(row) + "\n" for row in rows]
    for number, start in enumerate((0, FILES[0])):
        text = "".join(lines[start : start + (FILES[0] if not number else NUM_ROWS)]).encode()
        (folder / f"day_{number}").write_bytes(gzip.compress(text) if number else text)
    return job_of("criteo-tsv", folder, CATS, {}, data)


def npy(folder: Path, **data: Any) -> Job:
    for number, dtype in enumerate(("int32", "int64")):
        base, count = 80 + 10 * number, FILES[2 * number]
        np.save(folder / f"day_{number}_dense.npy", numbers(base, 99, 5 * count).reshape(-1, 5).astype(np.float32) / 8)
        ids = numbers(base + 1, 2**32 - 1, 26 * count).astype(np.uint32).view(np.int32)
        np.save(folder / f"day_{number}_sparse.npy", ids.reshape(-1, 26).astype(dtype))
        np.save(folder / f"day_{number}_labels.npy", numbers(base + 2, 2, count).astype(np.int32))
    return job_of("criteo-npy", folder, CATS, {}, {"hash": True} | data)


def job_of(format: str, folder: Path, tables: Any, columns: dict[str, Any], data: dict[str, Any]) -> Job:
    defaults = {"path": str(folder), "batch_size": 16, "eval_fraction": 0.2, "epochs": 2}
    tables = data.pop("tables", tables)
    given = {"format": format, "columns": columns | data.pop("columns", {})} | defaults | data
    if format in ("csv", "parquet"):
        given |= {"on_invalid_id": data.get("on_invalid_id", "modulo")}
    return jobs.job(
        job={"seed": 5}, data=given, tables=tables, model={"kind": "examples.mmoe:build"}, eval={"every": 4}
    )


CASES: dict[str, Callable[[Path], Job]] = {
    f"{make.__name__}, {shuffle}": partial(make, shuffle=shuffle)
    for make in (csv, parquet, tsv, npy)
    for shuffle in ("none", "window:20", "window:200")
}
OTHERS: dict[str, dict[str, Any]] = {
    "hashed": {"columns": {"hash": True}},
    "labels": {"columns": {"label": "label", "labels": ["click", "buy"], "label_values": "real"}},
    "rating": {"columns": {"label": "rating", "label_values": "real"}, "on_invalid_id": "zero"},
    "of": {
        "columns": {"inputs": ["when", "strength"], "weights": {}},
        "of": {"strength": "history"},
        "tables": APART,
    },
}
CASES |= {f"{make.__name__}, {what}": partial(make, **own) for make in (csv, parquet) for what, own in OTHERS.items()}
DIGESTS = {
    "csv, none": "79c39a4eb3ac6c292a0ba9055deb9060",
    "csv, window:20": "046040a5259509a824052d21633f0dfa",
    "csv, window:200": "64c882367c6857839faf0505cdc8d5e3",
    "parquet, none": "8c72c8fb30a20a166387f417f49f7b3e",
    "parquet, window:20": "57501d72ceaa9d0b8dd23741365ad4a3",
    "parquet, window:200": "56cd912e03fcf9d910b619d653ea7378",
    "tsv, none": "3e4ebdc30146b9f3d2c06c0e38ead6c1",
    "tsv, window:20": "8c2337a42e4c430ca16b5b53199a5816",
    "tsv, window:200": "9c1effe9b90c093718f0408f8433d821",
    "npy, none": "38c4ec84b4e20583cff1626e25c65da4",
    "npy, window:20": "0f6131fab6a187cee84a71d691de13f4",
    "npy, window:200": "d9b72dec55e3eefd62891505738af373",
    "csv, hashed": "11ab6fdec2e839400a7d1c2431fbd659",
    "csv, labels": "f3a1de88886e46c24e2fca0796202c1f",
    "csv, rating": "8d13a15b7f459ba0d2f733e316ae2be5",
    "csv, of": "9bd598f0f65942aa4e7aad2b00fd237f",
    "parquet, hashed": "a7b097122c870d87f280948adb1955d7",
    "parquet, labels": "4f46475d8de4a98473bb494af70dfa28",
    "parquet, rating": "121702a80dd51a5f9af8182dc9224de2",
    "parquet, of": "9bd598f0f65942aa4e7aad2b00fd237f",
}


def digest(job: Job, num_readers: int) -> str:
    """xxh3_128 of all arrays of a run with evaluations, by readers that share its batches."""
    found: list[Scheduled[Any]] = []
    for index in range(num_readers):
        share = DecoderShare(job=job, columns="all", max_steps=None, start=None, index=index, num_decoders=num_readers)
        found += decode_share(share, open_reader(job))
    hasher = xxhash.xxh3_128()
    for own in sorted(found, key=lambda placed: placed.step):
        batch = own.batch
        arrays: dict[str, Any] = {
            name: getattr(batch, name) for name in ("dense", "labels", "ids", "offsets", "weights")
        }
        for name, array in (arrays | batch.inputs).items():
            if array is not None:
                hasher.update(f"{own.kind} {name} {array.dtype.str} {array.shape} ".encode())
                hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()


@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_batches_have_the_bits_that_they_always_had(name: str, num_readers: int, tmp_path: Path) -> None:
    assert digest(CASES[name](tmp_path), num_readers) == DIGESTS[name]


if __name__ == "__main__":
    for name, case in CASES.items():
        with TemporaryDirectory() as folder:
            sys.stdout.write(f'    "{name}": "{digest(case(Path(folder)), 1)}",\n')
