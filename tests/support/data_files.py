"""Small random data sets of every format, written by pandas and decoded by pandas, to hold the readers beside."""

import csv
import gzip
import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from msgspec.structs import replace

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import Part
from rowcast.protocol.batch import Batch, Kind
from tests.support import jobs

NUM_ROWS = 103
BATCH_SIZE = 8
EVAL_FRACTION = 0.2
NUM_TRAIN = NUM_ROWS - 20
INTS = [f"int_{i}" for i in range(13)]
CATS = [f"cat_{i}" for i in range(26)]


@dataclass(frozen=True)
class Row:
    """One sample, comparable and independent of how batches lay it out."""

    dense: tuple[float, ...]
    label: float
    ids: tuple[tuple[int, ...], ...]  # per feature
    weights: tuple[tuple[float, ...], ...] | None


def make_job(format: str, tables: list[dict[str, Any]] | None = None, **data: Any) -> Job:
    """Tables over cat_3, cat_0 and cat_25, so that the job's order is not the file's."""
    defaults = {"format": format, "batch_size": BATCH_SIZE, "eval_fraction": EVAL_FRACTION}
    return jobs.job(
        job={"seed": 5},
        data=defaults | data,
        tables=tables or [table("late", 40, "cat_3", "cat_0"), table("last", 7, "cat_25")],
        model={"kind": "dlrm", "bottom_mlp": [4], "top_mlp": [1]},
    )


def table(name: str, num_embeddings: int, *features: str) -> dict[str, Any]:
    return {"name": name, "num_embeddings": num_embeddings, "embedding_dim": 4, "features": list(features)}


def long_job(job: Job) -> Job:
    """The same over two epochs, with an evaluation after every fourth train step."""
    return replace(job, data=replace(job.data, epochs=2), eval=replace(job.eval, every=4))


def with_workers(job: Job, num_workers: int) -> Job:
    return replace(job, prefetcher=replace(job.prefetcher, workers=num_workers))


def samples_of(batch: Batch) -> list[Row]:
    offsets = np.arange(len(batch.ids) + 1) if batch.offsets is None else batch.offsets
    num_features = (len(offsets) - 1) // batch.size
    rows = []
    for sample in range(batch.size):
        spans = [
            slice(offsets[f * batch.size + sample], offsets[f * batch.size + sample + 1]) for f in range(num_features)
        ]
        weights = None if batch.weights is None else tuple(tuple(batch.weights[span].tolist()) for span in spans)
        ids = tuple(tuple(batch.ids[span].tolist()) for span in spans)
        rows.append(Row(tuple(batch.dense[sample].tolist()), float(batch.labels[sample]), ids, weights))
    return rows


def all_samples(batches: Iterable[Batch]) -> list[Row]:
    return [row for batch in batches for row in samples_of(batch)]


def same_batch(a: Part, b: Part) -> bool:
    """Bit for bit, whole batches or the same part of two."""
    assert type(a) is type(b), f"{type(a).__name__} and {type(b).__name__} were compared"
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(a) if field.name != "extra"]
    return all(same_array(x, y) if isinstance(x, np.ndarray) else type(x) is type(y) and x == y for x, y in pairs)


def same_array(a: npt.NDArray[Any], b: Any) -> bool:
    return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def click_log(num_rows: int = NUM_ROWS, seed: int = 1) -> pd.DataFrame:
    """label, int_0 to int_12 (some missing, some negative), cat_0 to cat_25 (uint32 hashes, some missing)."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"label": rng.integers(0, 2, num_rows)})
    for name in INTS:
        frame[name] = (
            pd.Series(rng.integers(-3, 10 ** int(rng.integers(1, 12)), num_rows))
            .astype("Int64")
            .mask(rng.random(num_rows) < 0.2)
        )
    for name in CATS:
        frame[name] = pd.Series(rng.integers(0, 2**32, num_rows)).astype("Int64").mask(rng.random(num_rows) < 0.2)
    return frame


def write_tsv(frame: pd.DataFrame, path: Path) -> None:
    shown = frame.copy()
    for name in CATS:
        shown[name] = ["" if pd.isna(value) else f"{value:08x}" for value in frame[name]]
    text = shown.to_csv(sep="\t", header=False, index=False).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def good(**changed: str) -> list[str]:
    """One good line of Criteo TSV: label 1, integers 0 to 12, hashes 0000000a."""
    values = dict(zip(["label", *INTS, *CATS], ["1", *map(str, range(13)), *["0000000a"] * 26], strict=True))
    return list((values | changed).values())


def decode_tsv(paths: list[Path], job: Job) -> list[Row]:
    columns = ["label", *INTS, *CATS]
    frames = [pd.read_csv(path, sep="\t", names=columns, dtype=dict.fromkeys(CATS, str)) for path in paths]
    frame = pd.concat(frames, ignore_index=True)
    dense = np.log(frame[INTS].astype(float).fillna(0).clip(lower=0).to_numpy() + 1).astype(np.float32)
    sizes = {feature: table.num_embeddings for table in job.tables for feature in table.features}
    ids = {name: [int(text, 16) % size for text in frame[name].fillna("0")] for name, size in sizes.items()}
    return single_hot_rows(dense, frame["label"].tolist(), [ids[name] for name in job.features])


def single_hot_rows(dense: npt.NDArray[Any], labels: list[Any], ids: list[list[int]]) -> list[Row]:
    return [
        Row(tuple(dense[i].tolist()), float(label), tuple((int(column[i]),) for column in ids), None)
        for i, label in enumerate(labels)
    ]


def write_day(folder: Path, name: str, num_rows: int, num_ids: int = 7, dtype: str = "int32", seed: int = 2) -> None:
    rng = np.random.default_rng(seed)
    np.save(folder / f"{name}_dense.npy", rng.normal(size=(num_rows, 5)).astype(np.float32))
    np.save(folder / f"{name}_sparse.npy", rng.integers(0, num_ids, (num_rows, 26)).astype(dtype))
    np.save(folder / f"{name}_labels.npy", rng.integers(0, 2, (num_rows, 1)).astype(np.int32))


def decode_days(folder: Path, names: list[str], job: Job) -> list[Row]:
    dense, sparse, labels = (
        np.concatenate([np.load(folder / f"{name}_{part}.npy") for name in names])
        for part in ("dense", "sparse", "labels")
    )
    return single_hot_rows(
        dense, labels.ravel().tolist(), [sparse[:, CATS.index(name)].tolist() for name in job.features]
    )


def write_bags(path: Path, **changed: Any) -> None:
    """Four rows: a is scalar, b a list, w the weights of b. `changed`: other columns; None leaves one out."""
    columns = {
        "label": pa.array([0, 1, 1, 0]),
        "int_0": pa.array([0.5, 1.5, 2.5, 3.5], pa.float32()),
        "a": pa.array([1, 2, 0, 9], pa.int64()),
        "b": pa.array([[3, 4], None, [], [5]], pa.list_(pa.int64())),
        "w": pa.array([[0.5, 2.0], None, [], [1.5]], pa.list_(pa.float32())),
    }
    own = {name: column for name, column in (columns | changed).items() if column is not None}
    pq.write_table(pa.table(own), path)


def write_parquet(path: Path, num_rows: int, seed: int = 3, missing: float = 0.0) -> None:
    """Columns click, int_2, int_10, cat_0 list<int64> with list weights, both with nulls, cat_3 int32 with a share
    `missing`, and cat_25 list<int32>."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 5, num_rows)
    bags = [None if rng.random() < 0.1 else rng.integers(0, 40, n).tolist() for n in sizes]
    columns = {
        "int_10": pa.array(rng.normal(size=num_rows)),
        "int_2": pa.array(rng.integers(-5, 5, num_rows)),
        "click": pa.array(rng.integers(0, 2, num_rows).astype(bool)),
        "cat_0": pa.array(bags, pa.list_(pa.int64())),
        "cat_0_weights": pa.array(
            [None if bag is None else rng.random(len(bag)).tolist() for bag in bags], pa.list_(pa.float32())
        ),
        "cat_3": pa.array(
            [None if rng.random() < missing else int(rng.integers(0, 40)) for _ in range(num_rows)], pa.int32()
        ),
        "cat_25": pa.array(
            [rng.integers(0, 7, int(n)).tolist() for n in rng.integers(1, 3, num_rows)], pa.list_(pa.int32())
        ),
    }
    pq.write_table(pa.table(columns), path, row_group_size=13)


PARQUET_LISTS = ("cat_0", "cat_0_weights", "cat_25")
PARQUET_COLUMNS = {"label": "click", "weights": {"cat_0": "cat_0_weights"}}


def decode_parquet(paths: list[Path], job: Job) -> list[Row]:
    frame = pd.concat([pd.read_parquet(path, dtype_backend="pyarrow") for path in paths], ignore_index=True)
    rows = []
    for record in frame.astype(object).to_dict("records"):
        bags = [bag_of(record, name) for name in job.features]
        own = bag_of(record, "cat_0_weights")
        weights = tuple(
            own if name == "cat_0" else (1.0,) * len(bag) for name, bag in zip(job.features, bags, strict=True)
        )
        dense = tuple(float(np.float32(record[name])) for name in ("int_2", "int_10"))
        rows.append(Row(dense, float(record["click"]), tuple(bags), weights))
    return rows


def bag_of(record: dict[Hashable, Any], column: str) -> tuple[Any, ...]:
    """A list's items, nothing for a null list; one number, 0 for null."""
    value = record[column]
    if column in PARQUET_LISTS:
        return () if value is None or value is pd.NA else tuple(np.asarray(value).tolist())
    return (0,) if value is None or value is pd.NA else (int(value),)


def write_csv(path: Path, num_rows: int, seed: int = 3) -> None:
    """As `write_parquet`, but cat_3 is text with commas and quotes, some of it missing, and click is True or False."""
    rng = np.random.default_rng(seed)
    words = ["plain", "with, comma", 'with "quotes"', "ünïcode", "7", ""]
    rows: list[dict[str, Any]] = []
    for _ in range(num_rows):
        bag = rng.integers(0, 40, rng.integers(0, 5)).tolist()
        rows.append(
            {
                "int_10": rng.normal(),
                "unused": "x,y",
                "int_2": rng.integers(-5, 5),
                "click": bool(rng.integers(0, 2)),
                "cat_0": "|".join(map(str, bag)),
                "cat_0_weights": "|".join(map(str, rng.random(len(bag)).tolist())),
                "cat_3": words[rng.integers(0, len(words))],
                "cat_25": rng.integers(0, 7),
            }
        )
    text = pd.DataFrame(rows).to_csv(index=False, lineterminator="\r\n" if seed % 2 else "\n").encode()
    text = text if seed % 3 else text.removesuffix(b"\n")
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def write_jsonl(path: Path, source: Path) -> None:
    """The rows of a file that `write_csv` wrote, typed, with some keys left out where a cell is empty."""
    with gzip.open(source, "rt", newline="") if source.suffix == ".gz" else source.open(newline="") as file:
        rows = [typed_row(record) for record in csv.DictReader(file)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def typed_row(record: dict[str, str]) -> dict[str, Any]:
    lists = {name: [float(item) for item in record[name].split("|") if item] for name in ("cat_0", "cat_0_weights")}
    numbers = {"int_10": float(record["int_10"]), "int_2": int(record["int_2"]), "cat_25": int(record["cat_25"])}
    row = {"click": record["click"] == "True", **numbers, **lists, "cat_0": [int(item) for item in lists["cat_0"]]}
    return row | ({"cat_3": record["cat_3"]} if record["cat_3"] else {})


CSV_COLUMNS = {"label": "click", "weights": {"cat_0": "cat_0_weights"}, "lists": {"cat_0": "|"}, "hash": ["cat_3"]}


def decode_csv(paths: list[Path], job: Job) -> list[Row]:
    rows = []
    for path in paths:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            for record in csv.DictReader(file):
                word, bag = record["cat_3"], tuple(int(item) for item in record["cat_0"].split("|") if item)
                ids = {"cat_0": bag, "cat_25": (int(record["cat_25"]),)}
                ids["cat_3"] = (1 + xxhash.xxh3_64_intdigest(word.encode()) % 39 if word else 0,)
                own = tuple(float(np.float32(item)) for item in record["cat_0_weights"].split("|") if item)
                weights = tuple(own if name == "cat_0" else (1.0,) for name in job.features)
                dense = tuple(float(np.float32(record[name])) for name in ("int_2", "int_10"))
                rows.append(
                    Row(dense, float(record["click"] == "True"), tuple(ids[name] for name in job.features), weights)
                )
    return rows


class Listed:
    """A custom factory's Reader: batches of random samples, made at once."""

    num_dense = 3

    def __init__(self, job: Job) -> None:
        rng = np.random.default_rng(4)
        sizes = [table.num_embeddings for table in job.tables for _ in table.features]
        starts = range(0, NUM_TRAIN, BATCH_SIZE)
        self.made: dict[Kind, list[Batch]] = {
            "train": [random_batch(rng, sizes, min(BATCH_SIZE, NUM_TRAIN - start)) for start in starts],
            "eval": [random_batch(rng, sizes, size) for size in (8, 8, 4)],
        }

    def num_samples(self, split: Kind) -> int:
        return sum(batch.size for batch in self.made[split])

    def batches(self, split: Kind, epoch: int, start: int = 0) -> Iterable[Batch]:
        return self.made[split][start:]


def random_batch(rng: np.random.Generator, sizes: list[int], num_samples: int) -> Batch:
    return Batch(
        dense=rng.normal(size=(num_samples, 3)).astype(np.float32),
        labels=rng.integers(0, 2, num_samples).astype(np.float32),
        ids=np.concatenate([rng.integers(0, size, num_samples) for size in sizes]),
    )


def listed(job: Job) -> Listed:
    return Listed(job)


def hashed_row(content: bytes, num_embeddings: int) -> int:
    return 1 + xxhash.xxh3_64_intdigest(content) % (num_embeddings - 1)
