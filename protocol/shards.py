"""Divides the rows of every table among ranks: each row has one owner.

Neighbouring rows stay together in blocks of 8. Each block has a point on a line. The shards divide the line evenly, in
order, and the shard around the point owns the block:

    point      0                                                      2**32
    2 shards   |            0              |            1              |
    4 shards   |     0      |      1       |     2      |      3       |

A table that is placed whole is one block (`TableSpec.point`).

So doubling the number of shards halves each one, and halving it joins neighbours; a modulo would mix all rows.

The points of 256 neighbouring blocks are multiples of the golden ratio along the line, which spread as evenly as
possible: if ids are sorted by frequency, no owner gets many more of the hot blocks. The first block's point is a hash
of its table's name and its number, which also spreads ids with a pattern, such as multiples of a number.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rowcast.job.tables import KEY_SHIFT, ROW_MASK, TableSpec
from rowcast.runtime.arrays import GOLDEN, I32, I64, mix
from rowcast.runtime.compiled import compiled_loop, compiled_part

BLOCK_BITS = 3  # a block has 2**3 rows
ONE_BLOCK = 63  # of a table that is placed whole
RUN_BITS = 8  # a run has 2**8 blocks
MOST_SHARDS = 2**16
HALF = np.uint64(32)
# of a table: its block's point if it is one, or the number from which those of its blocks of 2**block_bits rows follow
LINE = np.dtype([("block_bits", np.uint8), ("point", np.uint64)])
Lines = npt.NDArray[np.void]
mixed = compiled_loop(mix)


class Shards:
    """Maps rows of some tables to their owners. Immutable, so any thread may use it."""

    def __init__(self, tables: Sequence[TableSpec], count: int, block_bits: int = BLOCK_BITS) -> None:
        """`count`: shards, 1 to MOST_SHARDS. `block_bits`: others than these stand in checkpoints."""
        assert 1 <= count <= MOST_SHARDS, f"{count} shards"
        self.count = count
        self.lines = np.zeros(1 + max(table.index for table in tables), LINE)  # by table.index
        for table in tables:
            seed = xxhash.xxh3_64_intdigest(table.name.encode())
            self.lines[table.index] = (block_bits, seed) if table.point is None else (ONE_BLOCK, table.point)

    def owners(self, keys: I64) -> I32:
        """Returns the shard of each row, i32 [n]. `keys`: row keys of these tables, in any order."""
        keys = keys.view()
        keys.flags.writeable = False  # some are, and loops are compiled for one kind
        owners = np.empty(len(keys), np.int32)
        find_owners(keys, self.lines, self.count, owners)
        return owners

    def rows_of(self, number: int, keys: I64) -> I64:
        """Returns the `keys` that shard `number` owns, in their order."""
        own: I64 = keys[self.owners(keys) == number]
        return own


@compiled_loop
def find_owners(keys: I64, lines: Lines, count: int, owners: I32) -> None:
    for i in range(len(keys)):
        owners[i] = owner(lines[keys[i] >> KEY_SHIFT], keys[i], count)


@compiled_part
def owner(line: Any, key: int, count: int) -> np.int64:
    """Returns the shard of a row, of `count`. `line`: of its table."""
    point = np.uint64(line["point"])
    if line["block_bits"] != ONE_BLOCK:
        block = np.uint64(key & ROW_MASK) >> np.uint64(line["block_bits"])
        point = mixed(point + (block >> np.uint64(RUN_BITS)) * GOLDEN) + block * GOLDEN >> HALF
    return np.int64(point * np.uint64(count) >> HALF)


def owner_of(table: TableSpec, count: int) -> int | None:
    """Returns the rank that owns all rows of a table; None if each block of rows has its own."""
    return None if table.point is None else table.point * count >> 32
