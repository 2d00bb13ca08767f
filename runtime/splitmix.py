"""Implements SplitMix64 (Steele, Lea, Flood 2014), which maps a counter to a pseudo-random 64-bit number.

mix(counter * GOLDEN)    with a seed: mix(seed + counter * GOLDEN)
"""

import numpy as np

from rowcast.runtime.arrays import U64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: its multiples are far apart
FACTOR_1, FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(x: U64) -> U64:
    """A bijection of 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * FACTOR_1
    x = (x ^ (x >> np.uint64(27))) * FACTOR_2
    return x ^ (x >> np.uint64(31))
