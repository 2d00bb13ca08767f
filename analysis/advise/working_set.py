"""How many rows a batch touches, how many `depth` batches do, and how many all of them."""

import numpy as np

from rowcast.analysis.advise.advice import Rows, WorkingSet
from rowcast.analysis.advise.observed import Observed
from rowcast.prefetcher.planner.grouping import I64

MOST_WINDOWS = 256  # of `depth` batches, spread evenly


def working_sets(observed: Observed, depth: int) -> tuple[WorkingSet, ...]:
    return tuple(
        WorkingSet(
            group=group.name,
            record_bytes=group.record_bytes,
            table_rows=group.num_rows,
            batch=median_and_largest(observed.unique_rows[:, g], 1.0),
            depth=depth,
            flight=median_and_largest(window_rows(observed.keys(g), depth), observed.shares[g]),
            touched=round(observed.distinct_rows[g]),
        )
        for g, group in enumerate(observed.groups)
    )


def window_rows(keys: list[I64], length: int) -> I64:
    """Distinct rows of windows of `length` steps."""
    last = max(0, len(keys) - length)
    starts = np.unique(np.linspace(0, last, min(last + 1, MOST_WINDOWS)).astype(np.int64))
    return np.array(
        [len(np.unique(np.concatenate(keys[start : start + length]))) for start in starts.tolist()], np.int64
    )


def median_and_largest(rows: I64, share: float) -> Rows:
    """Of followed rows, whose share of all rows is given."""
    return Rows(median=round(float(np.median(rows)) / share), largest=round(int(rows.max()) / share))
