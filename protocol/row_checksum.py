"""Defines the checksum of a row's record, bit-equal in numba and torch, and the arrays that list rows to check.

    record      | w0 | w1 | w2 | ...        32-bit words, signed
    checksum    w0 * c0 + w1 * c1 + ...     modulo 2^64, as int64; c0, c1, ... are odd

Any change of one word changes it: the words differ by d, 0 < |d| < 2^32, and an odd number times d is never a multiple
of 2^64. A swap of two different words also changes it, because the constants of records of up to `CHECKED_WORDS` words
differ in their low halves. It misses one in 2^64 of all other changes. It uses no secret: it detects accidents, not
attacks.

A sum modulo 2^64 does not depend on its order, so a device may add in any order.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rowcast.protocol.messages import RowChecksums
from rowcast.runtime.arrays import GOLDEN, I64, mix

CHECKED_WORDS = 8192  # a test compares every pair of constants up to here
MESSAGE_BYTES = 2**19  # most bytes of checksums in one message
CHECKSUM_BYTES = 8


def column_constants(num_words: int) -> I64:
    """Returns the odd constant of each word of a record, i64 [num_words]: SplitMix64 with the lowest bit set."""
    index = np.arange(1, num_words + 1, dtype=np.uint64)
    return (mix(index * GOLDEN) | np.uint64(1)).view(np.int64)


def fetched_name(group: int) -> str:
    """Names the array of a plan's block with the slots (i32) of the fetched rows to check after the fill."""
    return f"{group}.verify_fetch"


def victims_name(group: int) -> str:
    """Names the array of a plan's block with the slots (i32) of the victims to check before the fill, dirty first."""
    return f"{group}.verify_evict"


def barrier_name(group: int) -> str:
    """Names the array of a barrier's block with the slots (i32) of the dirty rows to check."""
    return f"{group}.verify"


def checksum_messages(step: int | None, barrier: int | None, checksums: npt.NDArray[Any]) -> Iterator[RowChecksums]:
    """`checksums` i64 [n]: all that a plan or barrier requests, in the order of its arrays."""
    content = checksums.astype("<i8").tobytes()
    for start in range(0, len(content), MESSAGE_BYTES):
        part = content[start : start + MESSAGE_BYTES]
        yield RowChecksums(step=step, barrier=barrier, start=start // CHECKSUM_BYTES, checksums=part)


def checksums_of(message: RowChecksums) -> I64:
    return np.frombuffer(message.checksums, "<i8").astype(np.int64)
