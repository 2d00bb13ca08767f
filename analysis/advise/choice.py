"""Round capacities, and where the curve of rows fetched bends.

knee    the smallest capacity from which on doubling it saves less than a tenth of the bytes fetched
"""

from collections.abc import Sequence
from itertools import count
from math import ceil

KNEE_SAVING = 0.1
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def round_capacities(low: float, high: float) -> list[int]:
    """1 or 1.5 times a power of two: those above `low`, up to the first that is no less than `high`."""
    sizes = (size for power in count(1) for size in (2**power, 3 * 2 ** (power - 1)))
    found: list[int] = []
    for size in sizes:
        if size > low:
            found.append(size)
            if size >= high:
                break
    return found


def rounded_up(nbytes: float) -> int:
    """The next capacity of the kind."""
    return round_capacities(ceil(nbytes) - 1, 0)[0]


def size_text(nbytes: int) -> str:
    """`"12MiB"`, as the job file takes it."""
    for unit, name in UNITS:
        if nbytes >= unit and nbytes % (unit // 2) == 0:
            return f"{nbytes / unit:g}{name}"
    return f"{nbytes}B"


def knee(savings: Sequence[float]) -> int:
    """The index of its capacity; `savings`: what doubling each capacity saves, by ascending capacity."""
    worth = [index for index, saving in enumerate(savings) if saving >= KNEE_SAVING]
    return min(len(savings) - 1, max(worth, default=-1) + 1)


def first_without(stalls: Sequence[bool]) -> int:
    """The index of the smallest capacity from which on none stalls; the last one does not."""
    assert not stalls[-1], "the largest capacity stalls for what it would have kept"
    return max((index for index, stall in enumerate(stalls) if stall), default=-1) + 1
