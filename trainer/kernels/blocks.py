"""Chooses the block shapes of the Triton kernels from one table, by the width of a row and the bytes of a weight.

A warp moves 16 bytes per lane, so its 32 lanes hold 128 fp32 values: eight rows of dimension 16, or a quarter of a row
of dimension 512. There is no tuning at run time: a kernel that writes in place cannot run twice, and a run must not
depend on timings. No entry changes the bits of a result.

Sums of a row's look-ups wait for memory, so a thread should have many loads under way. The compiler gives a block of
one warp the registers for that; larger blocks it makes smaller, and their loads wait for each other.
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
    chunk: BlockShape  # sums of chunks of long rows: few rows, with many look-ups in sequence
    update: BlockShape  # sums of other rows, most of one look-up, and the row optimizer; as many warps as `chunk`
    join: BlockShape  # sums of a long row's chunks: most threads per row


# by columns: rows and warps of `lookup` with weights of 4 bytes, the same with 2; rows of `chunk`, rows of `update`,
# warps of both; rows and warps of `join`
TABLE = {
    4: ((128, 2), (128, 2), (32, 128, 1), (8, 1)),
    8: ((128, 4), (128, 2), (16, 64, 1), (4, 1)),
    16: ((64, 4), (64, 2), (8, 32, 1), (2, 1)),
    32: ((32, 4), (64, 4), (4, 16, 1), (1, 1)),
    64: ((16, 4), (32, 4), (2, 8, 1), (1, 2)),
    128: ((8, 4), (16, 4), (1, 4, 1), (1, 4)),
    256: ((4, 4), (8, 4), (1, 4, 2), (1, 8)),
    512: ((2, 4), (4, 4), (1, 4, 4), (1, 8)),
    1024: ((1, 4), (2, 4), (1, 4, 8), (1, 8)),
}
UNROLL_LOOKUP, UNROLL_CHUNK, UNROLL_UPDATE, UNROLL_JOIN = 4, 8, 2, 16


@lru_cache
def blocks_for(dim: int, weight_bytes: int) -> Blocks:
    assert 0 < dim <= LARGEST, f"rows of {dim} columns; at most {LARGEST} are cut into blocks"
    columns = max(SMALLEST, 1 << (dim - 1).bit_length())
    wide, narrow, (chunk_rows, update_rows, warps), join = TABLE[columns]
    lookup = wide if weight_bytes == 4 else narrow
    return Blocks(
        columns=columns,
        lookup=BlockShape(rows=lookup[0], warps=lookup[1], unroll=UNROLL_LOOKUP),
        chunk=BlockShape(rows=chunk_rows, warps=warps, unroll=UNROLL_CHUNK),
        update=BlockShape(rows=update_rows, warps=warps, unroll=UNROLL_UPDATE),
        join=BlockShape(rows=join[0], warps=join[1], unroll=UNROLL_JOIN),
    )
