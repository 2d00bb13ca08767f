"""What does reading a file cost in processor time a sample, in the first epoch and in later ones?

    python -m benchmarks.read_files [--rows 200000] [--formats csv,criteo-tsv,criteo-npy,parquet] [--batch 2048]

One made-up log, written as each format: a label, 3 dense columns, 8 columns of text of 5 to 150,000 values, which are
hashed, and 2 of integers (of Criteo's format: 13 integers and 26 hashes). One process reads every batch of two epochs
with shuffle = "window:65536": whole batches, or the stream of ids and then that of dense values, as a run's decoders
do. `open` is what opening the readers takes. `one of 4 ranks`: the second epoch again, but of each batch one rank's
samples; also per sample of the batch. Processor time counts all threads, so it says how many cores a trainer
loses, and a busy machine does not change it much. The floor is what parsing alone takes (pyarrow's CSV reader, all its
columns as bytes or numbers), and hashing the text alone, value by value. Imports are not counted: a
decoding process has them before it opens its data.

For a comparison with an older version, copy this file into a check-out of it and run both in turn.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from pyarrow import csv as arrow_csv
from pyarrow import parquet as pq

from rowcast.job.file import parse_job
from rowcast.job.formats import format_of
from rowcast.job.schema import Job
from rowcast.prefetcher.readers import workers  # noqa: F401 - a decoder's imports
from rowcast.prefetcher.readers.draws import draws
from rowcast.prefetcher.readers.reader import open_reader, stream_columns
from rowcast.protocol.parts import UNDIVIDED, Rank
from rowcast.runtime.arrays import I64

DISTINCT = (5, 50, 500, 2_000, 5_000, 20_000, 100_000, 150_000)
TEXTS = [f"text_{i}" for i in range(len(DISTINCT))]
INTEGERS = {"user": 100_000, "item": 20_000}
INTS, CATS = [f"int_{i}" for i in range(13)], [f"cat_{i}" for i in range(26)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.read_files")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--formats", default="csv,criteo-tsv,parquet")
    parser.add_argument("--batch", type=int, default=2048)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        for name in options.formats.split(","):
            path = Path(folder) / f"log.{name}"
            write(name, path, options.rows)
            measure(name, job_of(name, path, options.batch), options.rows)
            if name == "csv":
                floor(path, options.rows)


def measure(name: str, job: Job, num_rows: int) -> None:
    import_module(format_of(name).module)
    readers: list[Any] = []
    open_s = seconds(lambda: readers.extend(open_reader(job, columns) for columns in stream_columns(job)))
    epochs_s = [seconds(partial(read, readers, epoch, UNDIVIDED)) for epoch in range(2)]
    epochs_s.append(seconds(partial(read, readers, 1, Rank(number=1, count=4, parts=4))))
    again_s = seconds(lambda: [open_reader(job, columns) for columns in stream_columns(job)])
    each = [own / num_rows * 1e6 for own in (open_s, *epochs_s, again_s)]
    print(
        f"{name}: open {each[0]:.2f}, first epoch {each[1]:.2f}, second {each[2]:.3f}, one of 4 ranks {each[3]:.3f}, "
        f"open again {each[4]:.3f}; first with opening {each[0] + each[1]:.2f} us a sample"
    )


def read(readers: list[Any], epoch: int, rank: Rank) -> None:
    for reader in readers:
        for pending in reader.pending("train", epoch):
            pending(rank)


def floor(path: Path, num_rows: int) -> None:
    types = dict.fromkeys(TEXTS, pa.binary()) | dict.fromkeys(INTEGERS, pa.int64())
    tables: list[Any] = []

    def parse() -> None:
        options = arrow_csv.ConvertOptions(column_types=types, check_utf8=False)
        tables.append(
            arrow_csv.read_csv(
                path, read_options=arrow_csv.ReadOptions(use_threads=False, block_size=2**22), convert_options=options
            )
        )

    def hashed() -> None:
        for name in TEXTS:
            for chunk in tables[0][name].chunks:
                [*map(xxhash.xxh3_64_intdigest, chunk.to_numpy(zero_copy_only=False))]

    def distinct() -> None:
        for name in TEXTS:
            for chunk in tables[0][name].chunks:
                encoded = chunk.dictionary_encode()
                [*map(xxhash.xxh3_64_intdigest, encoded.dictionary.to_numpy(zero_copy_only=False))]

    found = {"parse": seconds(parse), "hash each value": seconds(hashed), "each distinct one": seconds(distinct)}
    found["count lines"] = seconds(lambda: path.read_bytes().count(b"\n"))
    found["hash the bytes"] = seconds(lambda: xxhash.xxh3_128_digest(path.read_bytes()))
    print("  floor: " + ", ".join(f"{what} {own / num_rows * 1e6:.3f}" for what, own in found.items()))


def seconds(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def skewed(stream: int, below: int, count: int) -> I64:
    return draws(1, "train", 0, stream).log_uniform(below, count).ids


def write(name: str, path: Path, num_rows: int) -> None:
    labels = draws(1, "train", 0, 0).below(2, num_rows).ids
    if name == "criteo-tsv":
        rows = [labels.astype("S1"), *(skewed(1 + i, 10**5, num_rows).astype("S8") for i in range(13))]
        for i in range(26):
            value = (skewed(20 + i, 10 ** (2 + i % 4), num_rows) * 2654435761) % 2**32
            rows.append(np.array([f"{own:08x}" for own in value.tolist()], "S8"))
        lines = np.array(rows).T.tolist()
        path.write_bytes(b"".join(b"\t".join(line) + b"\n" for line in lines))
        return
    if name == "criteo-npy":
        path.mkdir()
        np.save(path / "day_0_labels.npy", labels.astype(np.int32))
        np.save(
            path / "day_0_dense.npy",
            np.stack([skewed(1 + i, 10**5, num_rows) for i in range(13)], 1, dtype="f4", casting="unsafe"),
        )
        ids = [skewed(20 + i, 10 ** (2 + i % 4), num_rows) for i in range(26)]
        np.save(path / "day_0_sparse.npy", np.stack(ids, 1, dtype=np.int32, casting="unsafe"))
        return
    columns: dict[str, Any] = {"label": labels}
    columns |= {f"int_{i}": skewed(50 + i, 10**5, num_rows) / 8 for i in range(3)}
    columns |= {own: skewed(60 + i, size, num_rows) for i, (own, size) in enumerate(INTEGERS.items())}
    for i, (own, size) in enumerate(zip(TEXTS, DISTINCT, strict=True)):
        value = skewed(1 + i, size, num_rows) * 2654435761 % 2**32
        columns[own] = pa.array([f"{each:08x}" for each in value.tolist()])
    table = pa.table(columns)
    pq.write_table(table, path) if name == "parquet" else arrow_csv.write_csv(table, path)


def job_of(name: str, path: Path, batch_size: int) -> Job:
    own = CATS if name.startswith("criteo") else [*TEXTS, *INTEGERS]
    tables = [{"name": each, "num_embeddings": 200_000, "embedding_dim": 4, "features": [each]} for each in own]
    data: dict[str, Any] = {"format": name, "path": str(path), "shuffle": "window:65536", "batch_size": batch_size}
    data |= {} if name.startswith("criteo") else {"columns": {"hash": TEXTS}}
    kind = {"kind": "adagrad", "lr": 0.1}
    return parse_job(
        {
            "job": {"run_dir": str(path.parent / "runs" / name), "seed": 1},
            "data": data,
            "tables": tables,
            "model": {"kind": "dlrm", "bottom_mlp": [4], "top_mlp": [1]},
            "optimizer": {"sparse": kind, "dense": kind},
            "cache": {"capacity": "64MiB"},
        }
    )


if __name__ == "__main__":
    main()
