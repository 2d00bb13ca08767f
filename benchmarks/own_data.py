"""How fast is a user's table read? Samples and look-ups per second of one core, for CSV and Parquet, text and integers.

    python -m benchmarks.own_data

The table has a label, 3 dense columns and 8 columns of ids whose frequencies follow Zipf's law with exponent 1.2; as
text, an id is "user 12345". Only the reader runs: batches of 2,048 are decoded, checked and dropped.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rowcast.job.file import parse_job
from rowcast.prefetcher.readers.reader import open_reader

NUM_ROWS, NUM_IDS, NUM_VALUES, REPEATS = 200_000, 8, 100_000, 3


def table(*, text: bool) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"label": rng.integers(0, 2, NUM_ROWS)} | {
        f"int_{i}": rng.random(NUM_ROWS).round(4) for i in range(3)
    }
    for i in range(NUM_IDS):
        ids = rng.zipf(1.2, NUM_ROWS) % NUM_VALUES
        columns[f"cat_{i}"] = np.char.add("user ", ids.astype(str)) if text else ids
    return pd.DataFrame(columns)


def seconds(path: Path, *, text: bool) -> float:
    """Processor time of one pass over the file: other work on the machine does not count."""
    content = {
        "job": {"run_dir": "unused"},
        "data": {"format": path.suffix[1:], "path": str(path), "columns": {"hash": text}},
        "tables_from": {"cardinalities": [NUM_VALUES + 1] * NUM_IDS, "embedding_dim": 16},
        "model": {"bottom_mlp": [16], "top_mlp": [1]},
        "optimizer": {"sparse": {"kind": "sgd", "lr": 0.1}, "dense": {"kind": "sgd", "lr": 0.1}},
        "cache": {"capacity": "1MiB"},
    }
    reader = open_reader(parse_job(content))
    start_s = time.process_time()
    assert sum(batch.size for batch in reader.batches("train", 0)) == NUM_ROWS
    return time.process_time() - start_s


def main() -> None:
    print("| file | ids | samples/s | look-ups/s |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for text in (False, True):
            frame = table(text=text)
            frame.to_csv(Path(folder, "a.csv"), index=False)
            frame.to_parquet(Path(folder, "a.parquet"))
            for name in ("a.csv", "a.parquet"):
                best_s = min(seconds(Path(folder, name), text=text) for _ in range(REPEATS))
                kind = "text, hashed" if text else "integers"
                print(f"| {name[2:]} | {kind} | {NUM_ROWS / best_s:,.0f} | {NUM_ROWS * NUM_IDS / best_s:,.0f} |")


if __name__ == "__main__":
    main()
