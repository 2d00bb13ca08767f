"""Divides the rows of every table among ranks: each row has one owner.

Neighbouring rows stay together in blocks of 64, and a block's owner follows from a hash of its table's name and its
number. A hash is a point of a line that the shards divide evenly, in order:

    hash       0                                                      2**32
    2 shards   |            0              |            1              |
    4 shards   |     0      |      1       |     2      |      3       |

So twice as many shards halve each one, and half as many join each with its neighbour; a modulo would mix all. Ids that
are sorted by how often they occur are spread, and so are ids that are multiples of something.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

from rowcast.job.tables import KEY_SHIFT, ROW_MASK, TableSpec
from rowcast.runtime.arrays import I32, I64, U64
from rowcast.runtime.splitmix import GOLDEN, mix

BLOCK_BITS = 6  # rows of a block: 64, so that the rows of a shard lie in runs of a few pages
MOST_SHARDS = 2**16
HALF = np.uint64(32)


class Shards:
    """Who owns which rows of some tables. Changes nothing and remembers nothing: any thread may ask."""

    def __init__(self, tables: Sequence[TableSpec], count: int) -> None:
        """`count`: shards, 1 to MOST_SHARDS."""
        assert 1 <= count <= MOST_SHARDS, f"{count} shards"
        self.count = count
        self._seeds = np.zeros(1 + max(table.index for table in tables), np.uint64)
        for table in tables:
            self._seeds[table.index] = xxhash.xxh3_64_intdigest(table.name.encode())

    def owners(self, keys: I64) -> I32:
        """The shard of each row, i32 [n], from 0 to count - 1. `keys`: row keys of these tables, in any order."""
        tables, rows = keys >> KEY_SHIFT, keys & ROW_MASK
        points: U64 = mix(self._seeds[tables] + (rows >> BLOCK_BITS).astype(np.uint64) * GOLDEN) >> HALF
        return (points * np.uint64(self.count) >> HALF).astype(np.int32)
