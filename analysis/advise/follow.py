"""Chooses the rows to follow if not all can be: those whose hashed key is in the first part of the hash's range.

    hash of a key    0 ............ share * 2^64 ................................. 2^64
                     | followed     | not followed                                 |

A row is followed everywhere or nowhere, so the distances between its uses are kept, and a cache scaled by the same
share moves that share of the rows: spatial sampling, as in Waldspurger et al., Efficient MRC Construction with
SHARDS (FAST 2015). Batches remain batches, each with its followed rows only.

A cache holds whole batches, and by chance a sample has more or less of them than its share. So its slots are the share
of the real ones plus that difference, which leaves the same room besides the batch. (SHARDS adds the difference of the
reference counts where hits are certain.)
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rowcast.analysis.scan.steps import StepRows
from rowcast.prefetcher.planner.horizon import OCCURRENCE_BYTES
from rowcast.runtime.arrays import GOLDEN, I64, U64, mix

LEAST_ROWS = 5000  # followed rows of a group that has this many, judging by its first batches
NUM_PARTS = 64  # the followed rows are split into this many parts by hash, to estimate how much the parts differ


def hashes(keys: I64) -> U64:
    return mix(keys.astype(np.uint64) + GOLDEN)


def followed(keys: I64, share: float) -> I64:
    return keys if share >= 1 else keys[hashes(keys) < np.uint64(share * 2.0**64)]


def part_counts(keys: I64) -> I64:
    """Counts the keys of each part, [NUM_PARTS]. The hash's low bits choose a key's part, its high bits whether it is
    followed."""
    return np.bincount((hashes(keys) & np.uint64(NUM_PARTS - 1)).astype(np.int64), minlength=NUM_PARTS)


def group_shares(share: float, distinct_rows: Sequence[int]) -> tuple[float, ...]:
    """Returns the share of each group's rows to follow. `distinct_rows`: of each group, in the first batches."""
    return tuple(min(1.0, max(share, LEAST_ROWS / rows)) for rows in distinct_rows)


def thinned(rows: StepRows, share: float) -> StepRows:
    """Keeps the followed rows. The counted bytes stay the same, so an automatic horizon grows as in a run."""
    keys = followed(rows.keys, share)
    return replace(rows, keys=keys, nbytes=rows.nbytes + (rows.num_unique - len(keys)) * OCCURRENCE_BYTES)


def scaled_slots(slots: int, num_rows: int, share: float, rows_a_step: float, followed_a_step: float) -> int:
    """Slots for the followed rows of a group with `num_rows` rows and `slots` slots; the means are over all steps."""
    if share >= 1 or slots >= num_rows:
        return slots
    return round(share * slots + followed_a_step - share * rows_a_step)
