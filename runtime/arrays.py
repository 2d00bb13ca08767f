"""Names the types of numpy arrays by their element type, and hashes their elements."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

Word = TypeVar("Word", U64, np.uint64)

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: its multiples are spread out
FACTOR_1, FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(x: Word) -> Word:
    """A bijection of 64 bits: SplitMix64 (Steele, Lea, Flood 2014) maps a counter to a pseudo-random number.

    mix(counter * GOLDEN)    with a seed: mix(seed + counter * GOLDEN)"""
    x = (x ^ (x >> np.uint64(30))) * FACTOR_1
    x = (x ^ (x >> np.uint64(27))) * FACTOR_2
    return x ^ (x >> np.uint64(31))
