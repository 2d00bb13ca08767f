"""The look-ups of long rows in chunks, which a device sums side by side. The host cuts them when a plan arrives.

look-ups of a long row    | 0 1 2 ... 127 | 128 ... 255 | 256 257 |      CHUNK_LOOKUPS a chunk
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from rowcast.runtime.arrays import I32

CHUNK_LOOKUPS = 128  # a row that is looked up more often in a step is long

A = TypeVar("A")  # a numpy array on the host, a tensor on the device


class Chunks(NamedTuple, Generic[A]):
    """How the look-ups of K long rows are cut into P chunks; all but a row's last one have CHUNK_LOOKUPS."""

    long_rows: A  # i32 [K] the rows, as positions in unique_slots
    chunk_offsets: A  # i32 [K + 1] where each long row's chunks start
    chunk_rows: A  # i32 [P] the long row that each chunk belongs to, as a position in long_rows


def cut_long_rows(segment_offsets: I32) -> Chunks[I32]:
    """`segment_offsets` i32 [U + 1]: the look-ups of each row lie between them."""
    lengths = np.diff(segment_offsets)
    rows = np.flatnonzero(lengths > CHUNK_LOOKUPS)
    num_chunks = -(-lengths[rows] // CHUNK_LOOKUPS)
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(num_chunks, out=offsets[1:])
    chunk_rows = np.repeat(np.arange(len(rows), dtype=np.int32), num_chunks)
    return Chunks(long_rows=rows.astype(np.int32), chunk_offsets=offsets, chunk_rows=chunk_rows)


def chunk_arrays(segment_offsets: Sequence[I32]) -> dict[str, I32]:
    """Of each group's segments; named as the arrays of a plan are."""
    return {
        f"{group}.{name}": array
        for group, own in enumerate(segment_offsets)
        for name, array in cut_long_rows(own)._asdict().items()
    }


def most_chunk_items(num_lookups: int) -> int:
    """An upper bound of the items of a group's three arrays."""
    long_rows = num_lookups // (CHUNK_LOOKUPS + 1)
    return long_rows + (long_rows + 1) + (num_lookups // CHUNK_LOOKUPS + long_rows)
