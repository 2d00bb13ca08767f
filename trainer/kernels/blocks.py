"""Chooses the block shapes of the Triton kernels from one table, by the width of a row and the bytes of a weight.

A warp moves 16 bytes per lane, so its 32 lanes hold 128 fp32 values: eight rows of dimension 16, or a quarter of a row
of dimension 512. There is no tuning at run time: a kernel that writes in place cannot run twice, and a run must not
depend on timings. No entry changes the bits of a result.
"""

from dataclasses import dataclass
from functools import lru_cache

SMALLEST, LARGEST = 4, 1024  # columns


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    rows: int  # bags or rows per program; a power of two
    warps: int  # per program
    unroll: int  # look-ups of a row loaded at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    columns: int  # the dimension, rounded up to a power of two
    lookup: BlockShape
    update: BlockShape  # sums by row and the row optimizer; few rows, because their numbers of look-ups differ
    join: BlockShape  # sums of a long row's chunks: few rows, and many chunks in sequence


# by columns: rows and warps of `lookup` with weights of 4 bytes, the same with 2, and rows and warps of `update`
TABLE = {
    4: ((128, 2), (128, 2), (64, 2)),
    8: ((128, 4), (128, 2), (32, 2)),
    16: ((64, 4), (64, 2), (16, 2)),
    32: ((32, 4), (64, 4), (8, 2)),
    64: ((16, 4), (32, 4), (4, 2)),
    128: ((8, 4), (16, 4), (2, 2)),
    256: ((4, 4), (8, 4), (1, 2)),
    512: ((2, 4), (4, 4), (1, 4)),
    1024: ((1, 4), (2, 4), (1, 8)),
}
UNROLL_LOOKUP, UNROLL_UPDATE, UNROLL_JOIN = 4, 8, 16


@lru_cache
def blocks_for(dim: int, weight_bytes: int) -> Blocks:
    assert 0 < dim <= LARGEST, f"rows of {dim} columns; at most {LARGEST} are cut into blocks"
    columns = max(SMALLEST, 1 << (dim - 1).bit_length())
    wide, narrow, update = TABLE[columns]
    rows, warps = wide if weight_bytes == 4 else narrow
    return Blocks(
        columns=columns,
        lookup=BlockShape(rows=rows, warps=warps, unroll=UNROLL_LOOKUP),
        update=BlockShape(rows=update[0], warps=update[1], unroll=UNROLL_UPDATE),
        join=BlockShape(rows=update[0], warps=update[1], unroll=UNROLL_JOIN),
    )
