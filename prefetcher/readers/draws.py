"""Draws ids as a function of their place in the data: seed, split, epoch, batch.

Every reader, decoder, rank and restart that draws for a batch draws the same ids. Numbers are SplitMix64's and ids
follow from them by integers alone, so that no version of NumPy and no math library changes them:

    below         x mod n
    log_uniform   an octave [2**j, 2**(j + 1)), all equally likely; a point y in it, uniform in fixed point, accepted
                  with probability 2**j / y; the id is floor(y) - 1, drawn again if it is not below n
    by            the first cumulative count above x mod total

log q is the logarithm of an id's probability in one draw, computed in f64 and rounded once.
"""

from typing import NamedTuple

import numpy as np

from rowcast.protocol.batch import Kind
from rowcast.runtime.arrays import F32, GOLDEN, I64, U64, mix

DOMAIN = np.uint64(0x6E65676174697665)  # "negative": other uses of the seed have other numbers
MOST_LOG_UNIFORM = 2**31 - 1


class Drawn(NamedTuple):
    ids: I64  # [count], drawn with replacement
    log_q: F32  # [count], the natural logarithm of each id's probability


def draws(seed: int, split: Kind, epoch: int, batch: int) -> "Draws":
    """Begins the draws of one batch. All evaluations draw the same: those of epoch 0.

    seed: job.seed, at least 0. batch: its index in the epoch.
    """
    is_eval = split == "eval"
    key = DOMAIN
    for value in (seed, int(is_eval), 0 if is_eval else epoch, batch):
        key = mixed(key, value)
    return Draws(key)


def mixed(key: np.uint64, value: int) -> np.uint64:
    return np.uint64(mix(np.array([key], np.uint64) + np.array([value], np.uint64) * GOLDEN)[0])


class Draws:
    """A stream of draws. Each call continues where the one before has ended, so their order decides the ids."""

    def __init__(self, key: np.uint64) -> None:
        self._key, self._next = key, 0

    def below(self, n: int, count: int) -> Drawn:
        """Draws ids from 0 to n - 1, all equally likely. Raises ValueError unless n is at least 1."""
        if n < 1:
            raise ValueError(f"below({n}, ...): there is no id to draw; give at least 1")
        ids = (self._numbers(count) % np.uint64(n)).astype(np.int64)
        return Drawn(ids, np.full(count, -np.log(np.float64(n)), np.float32))

    def log_uniform(self, n: int, count: int) -> Drawn:
        """Draws ids below n with probability log((id + 2) / (id + 1)) / log(n + 1): for ids sorted by frequency.

        Raises ValueError unless n is from 1 to 2**31 - 1.
        """
        if not 1 <= n <= MOST_LOG_UNIFORM:
            raise ValueError(f"log_uniform({n}, ...): give from 1 to {MOST_LOG_UNIFORM} ids")
        found = [np.zeros(0, np.int64)]
        while (missing := count - sum(map(len, found))) > 0:
            found.append(self._log_uniform_proposals(n, missing))
        ids = np.concatenate(found)
        log_q = np.log(np.log1p(1 / (ids + 1.0)) / np.log(n + 1.0))
        return Drawn(ids, log_q.astype(np.float32))

    def by(self, counts: I64, count: int) -> Drawn:
        """Draws each id with a probability in proportion to its count, i64 [n]. Raises ValueError for a negative count
        or none above 0."""
        return self.by_cumulative(cumulative(counts), count)

    def by_cumulative(self, totals: I64, count: int) -> Drawn:
        """Draws as `by`, with `totals` from `cumulative`."""
        x = (self._numbers(count) % np.uint64(totals[-1])).astype(np.int64)
        ids = np.searchsorted(totals, x, side="right").astype(np.int64)
        counts = totals[ids] - np.where(ids > 0, totals[ids - 1], 0)
        return Drawn(ids, np.log(counts / np.float64(totals[-1])).astype(np.float32))

    def _log_uniform_proposals(self, n: int, count: int) -> I64:
        """Returns the accepted ones of `count` proposals."""
        octaves = self._numbers(count) % np.uint64(n.bit_length())
        numbers = self._numbers(count)
        point = (np.uint64(1) << np.uint64(32)) + (numbers >> np.uint64(32))  # in units of 2**-32 of the octave's start
        chance = numbers & np.uint64(2**31 - 1)
        ids = ((point << octaves) >> np.uint64(32)).astype(np.int64) - 1
        return ids[(chance * point < np.uint64(2**63)) & (ids < n)]

    def _numbers(self, count: int) -> U64:
        first, self._next = self._next, self._next + count
        return mix(self._key + np.arange(first + 1, first + count + 1, dtype=np.uint64) * GOLDEN)


def cumulative(counts: I64) -> I64:
    """Returns the running sums of `counts`, i64 [n]. Raises ValueError for a negative count or none above 0."""
    totals = np.cumsum(counts, dtype=np.int64)
    if len(counts) == 0 or counts.min() < 0 or totals[-1] < 1:
        least = counts.min() if len(counts) else "none"
        raise ValueError(
            f"{len(counts)} counts, the least is {least}: no id can be drawn; give counts of at least 0, some above 0"
        )
    return totals
