"""Makes the stream of a next-item model over 10^6 items: how many rows does a step fetch?

    python -m benchmarks.sequences.stream data/next-item-stream.parquet
    prefetcher simulate --config benchmarks/sequences/own_negatives.toml
    prefetcher simulate --config benchmarks/sequences/shared_negatives.toml

Items follow Zipf's law, lengths Pareto's, cut at 1,024. A row is a window of one owner; rows are in the order of time,
so owners are mixed. No item follows from those before: counts and bits only, never a quality.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples.next_item import I64, lists

ITEMS, LONGEST = 1_000_000, 1024
ZIPF, PARETO, LEAST = 0.7, 1.0, 144  # exponents, and the shortest length


def make_stream(samples: int, seed: int) -> pa.Table:
    """A row is a window: history and positive are the same items, one apart."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(LEAST * (1 + rng.pareto(PARETO, samples)), LONGEST).astype(np.int64)
    shares = np.arange(1, ITEMS + 1) ** -ZIPF
    totals = np.cumsum(shares / shares.sum())
    items = np.searchsorted(totals, rng.random(int(lengths.sum()) + samples)).clip(max=ITEMS - 1)
    ends = np.cumsum(lengths + 1)
    is_last, is_first = np.zeros(len(items), bool), np.zeros(len(items), bool)
    is_last[ends - 1] = is_first[ends - lengths - 1] = True
    bounds: I64 = np.append(0, np.cumsum(lengths))
    return pa.table({"history": lists(items[~is_last], bounds), "positive": lists(items[~is_first], bounds)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--samples", type=int, default=6400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    table = make_stream(options.samples, options.seed)
    options.path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, options.path)
    print(f"{len(table):,} windows, {len(table['history'].combine_chunks().flatten()):,} items: {options.path}")


if __name__ == "__main__":
    main()
