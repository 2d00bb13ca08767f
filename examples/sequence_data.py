"""Generates click histories for `examples/tbsm.toml`, `din.toml` and `two_tower.toml`.

    python -m examples.sequence_data data/sequences.parquet

A row is a user who saw an item. The user clicks it if its category occurred often before. The data has two forms. The
lists `items` and `categories` have the user's earlier items, oldest first, then the item seen last. `item` and
`category` have only that item, and the lists `past_items` and `past_categories` only the earlier ones.
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

NUM_USERS, NUM_ITEMS, NUM_CATEGORIES = 20_000, 100_000, 50
LONGEST = 30  # entries of a history


def lists(values: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths)), pa.int32()), pa.array(values))


def make_sequences(num_samples: int, seed: int = 0) -> pa.Table:
    """Columns label, int_0 (the history's length), user, items and categories, and these divided into item and past.

    log_frequency: f32, the logarithm of how many rows have the row's item.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, LONGEST + 1, num_samples) + 1
    sample = np.repeat(np.arange(num_samples), lengths)
    taste = rng.integers(0, NUM_CATEGORIES, num_samples)
    of_taste = rng.random(len(sample)) < 0.6
    is_target = np.arange(len(sample)) + 1 == np.cumsum(lengths)[sample]
    items = (rng.random(len(sample)) ** 2 * NUM_ITEMS).astype(np.int64)
    items[of_taste] += (taste[sample] - items)[of_taste] % NUM_CATEGORIES  # the next item of that category
    items %= NUM_ITEMS
    clicks = of_taste[is_target] & (lengths > 3)
    item, past = items[is_target], items[~is_target]
    return pa.table(
        {
            "label": np.where(rng.random(num_samples) < 0.9, clicks, ~clicks).astype(np.float32),
            "int_0": np.log(lengths).astype(np.float32),
            "user": rng.integers(0, NUM_USERS, num_samples),
            "items": lists(items, lengths),
            "categories": lists(items % NUM_CATEGORIES, lengths),
            "item": item,
            "category": item % NUM_CATEGORIES,
            "past_items": lists(past, lengths - 1),
            "past_categories": lists(past % NUM_CATEGORIES, lengths - 1),
            "log_frequency": np.log(np.bincount(item)[item]).astype(np.float32),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--samples", type=int, default=200_000)
    options = parser.parse_args()
    options.path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(make_sequences(options.samples), options.path)


if __name__ == "__main__":
    main()
