"""Divides the rows of every table among ranks: each row has one owner.

Neighbouring rows stay together in blocks of 64. Each block has a point on a line. The shards divide the line evenly, in
order, and the shard around the point owns the block:

    point      0                                                      2**32
    2 shards   |            0              |            1              |
    4 shards   |     0      |      1       |     2      |      3       |

So doubling the number of shards halves each one, and halving it joins neighbours; a modulo would mix all rows.

The points of 256 neighbouring blocks are multiples of the golden ratio along the line, which spread as evenly as
possible: if ids are sorted by frequency, no owner gets many more of the hot blocks. The first block's point is a hash
of its table's name and its number, which also spreads ids with a pattern, such as multiples of a number.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

from rowcast.job.tables import KEY_SHIFT, ROW_MASK, TableSpec
from rowcast.runtime.arrays import GOLDEN, I32, I64, U64, mix

BLOCK_BITS = 6  # a block has 2**6 rows
RUN_BITS = 8  # a run has 2**8 blocks
MOST_SHARDS = 2**16
HALF = np.uint64(32)


class Shards:
    """Maps rows of some tables to their owners. Immutable, so any thread may use it."""

    def __init__(self, tables: Sequence[TableSpec], count: int) -> None:
        """`count`: shards, 1 to MOST_SHARDS."""
        assert 1 <= count <= MOST_SHARDS, f"{count} shards"
        self.count = count
        self._seeds = np.zeros(1 + max(table.index for table in tables), np.uint64)
        for table in tables:
            self._seeds[table.index] = xxhash.xxh3_64_intdigest(table.name.encode())

    def owners(self, keys: I64) -> I32:
        """Returns the shard of each row, i32 [n]. `keys`: row keys of these tables, in any order."""
        blocks: U64 = (keys & ROW_MASK).astype(np.uint64) >> np.uint64(BLOCK_BITS)
        runs = mix(self._seeds[keys >> KEY_SHIFT] + (blocks >> np.uint64(RUN_BITS)) * GOLDEN)
        points = runs + blocks * GOLDEN >> HALF
        return (points * np.uint64(self.count) >> HALF).astype(np.int32)

    def rows_of(self, number: int, keys: I64) -> I64:
        """Returns the `keys` that shard `number` owns, in their order."""
        own: I64 = keys[self.owners(keys) == number]
        return own
