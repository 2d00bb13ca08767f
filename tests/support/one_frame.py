"""A frame written in every format that keeps it, with the keys of data.columns by which it is read again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from tests.support.data_files import table

NUM_ROWS = 700
TABLES = [
    table("users", 900, "user"),
    table("genres", 50, "genre"),
    table("ages", 6, "age"),
    table("items", 40, "item"),
]
COLUMNS: dict[str, Any] = {
    "label": "rating",
    "dense": ["price", "count"],
    "weights": {"genre": "weight"},
    "hash": ["user", "genre"],
    "hash_by_value": True,
    "prepare": {
        "rating": {"at_least": 4},
        "price": {"fill": 2.5, "standardize": [3, 1.5]},
        "count": {"fill": 0, "least": 0, "log1p": True},
        "age": {"buckets": [18, 30, 45]},
    },
}


def frame() -> pd.DataFrame:
    rng = np.random.default_rng(11)
    lengths = rng.integers(1, 4, NUM_ROWS)
    own = pd.DataFrame(
        {
            "rating": rng.integers(1, 6, NUM_ROWS),
            "user": pd.array(rng.integers(-1, 300, NUM_ROWS), "Int64"),
            "price": rng.normal(3, 1, NUM_ROWS),
            "count": pd.array(rng.geometric(0.05, NUM_ROWS) - 2, "Int64"),
            "age": pd.array(rng.integers(1, 80, NUM_ROWS), "Int64"),
            "item": rng.integers(0, 40, NUM_ROWS),
            "genre": [rng.choice(["drama", "sci-fi", "noir"], n).tolist() for n in lengths],
            "weight": [rng.random(n).round(3).tolist() for n in lengths],
        }
    )
    for name in ("user", "price", "count", "age"):
        own.loc[rng.random(NUM_ROWS) < 0.1, name] = None
    return own


def joined(own: pd.DataFrame, separator: str) -> pd.DataFrame:
    lists = {name: [separator.join(map(str, items)) for items in own[name]] for name in ("genre", "weight")}
    return own.assign(**lists)


def csv(path: Path, own: pd.DataFrame) -> dict[str, Any]:
    joined(own, "|").to_csv(path, index=False)
    return {"lists": {"genre": "|"}}


def gzipped(path: Path, own: pd.DataFrame) -> dict[str, Any]:
    joined(own, ";").to_csv(path, index=False, sep="\t", compression="gzip")
    return {"lists": {"genre": ";"}, "delimiter": "\t"}


def round_trip(path: Path, own: pd.DataFrame) -> dict[str, Any]:
    csv(path, own)
    again = pd.read_csv(path)
    assert again["user"].dtype == float
    again.to_csv(path, index=False)
    return {"lists": {"genre": "|"}}


def without_header(path: Path, own: pd.DataFrame) -> dict[str, Any]:
    cells = joined(own, "|").astype(object).map(lambda cell: "" if pd.isna(cell) else str(cell))
    path.write_text("".join("::".join(row) + "\n" for row in cells.itertuples(index=False)))
    return {"lists": {"genre": "|"}, "delimiter": "::", "names": list(own.columns)}


def bracketed(path: Path, own: pd.DataFrame) -> dict[str, Any]:
    own.to_csv(path, index=False)  # cells such as ['noir', 'drama'] and [0.1, 0.25]
    return {"lists": {"genre": "[]"}}


def jsonl(path: Path, own: pd.DataFrame) -> dict[str, Any]:
    own.to_json(path, orient="records", lines=True, double_precision=15)
    return {}


def parquet(path: Path, own: pd.DataFrame) -> dict[str, Any]:
    own.to_parquet(path, index=False, row_group_size=100)
    return {}


def arrow(path: Path, own: pd.DataFrame) -> dict[str, Any]:
    with pa.ipc.new_file(str(path), (columns := pa.Table.from_pandas(own, preserve_index=False)).schema) as target:
        target.write_table(columns, max_chunksize=150)
    return {}


WAYS: dict[str, Callable[[Path, pd.DataFrame], dict[str, Any]]] = {
    "csv": csv,
    "gzip": gzipped,
    "round trip": round_trip,
    "no header": without_header,
    "brackets": bracketed,
    "jsonl": jsonl,
    "parquet": parquet,
    "arrow": arrow,
}


def written(way: str, folder: Path) -> dict[str, Any]:
    """Returns the keys of [data]."""
    kind = way if way in ("jsonl", "parquet", "arrow") else "csv"
    path = folder / f"{way.replace(' ', '_')}.{kind}"
    columns = COLUMNS | WAYS[way](path, frame().round({"price": 6}))
    return {"format": kind, "path": str(path), "columns": columns}
