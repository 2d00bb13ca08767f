"""Counts look-ups per row in a sample, and picks hot rows: those looked up most that fit a budget of bytes.

Follows Adnan et al., Accelerating Recommendation System Training by Leveraging Popular Choices (VLDB 2022): a row is
hot above a threshold of accesses set by a memory budget, which a small sample of the inputs suffices to find.

Memory grows with the distinct rows of the sample: 16 bytes per row, and several times that while they are sorted.

What hot rows cover is measured on some of many batches, with a confidence interval.

Samples within a batch are alike (an hour, a campaign, one customer's basket), so n samples of m batches say less than n
samples drawn one by one. The batches were drawn at random, so they are what is counted:

    share      p = hits / totals, summed over the m judged batches
    variance   m / (m - 1) * sum (hits_i - p * totals_i)^2 / totals^2, the linearized ratio estimator for m batches
               drawn at random
    effective  n = p (1 - p) / variance, samples drawn one by one that would vary as much; at most the actual number;
               m if p is 0 or 1, as if every batch had been of one kind
    interval   Wilson's for p and n, which never leaves [0, 1], with Student's t for m - 1 degrees of freedom in place
               of the normal's z

Batches spread evenly over the data vary less than batches drawn at random, and none is drawn twice; both make the
interval only safer. It knows nothing about kinds of batches that were not judged; `unseen_share` says how much of the
data they may be.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import sqrt, tan

import numpy as np

from rowcast.job.tables import KEY_SHIFT, GroupSpec
from rowcast.prefetcher.planner.grouping import Grouper, GroupLookups
from rowcast.protocol.batch import Batch
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError

BYTES_PER_ROW = 128  # peak, while counts are merged or hot rows are picked
LEAST_PENDING_ROWS = 2**18
METHOD = "Wilson's interval for the effective number of samples, batches as clusters, Student's t"


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatedShare:
    estimate: float
    low: float
    high: float


def clustered_share(hits: I64, totals: I64, confidence: float) -> EstimatedShare | None:
    """The share of `hits` in `totals`, both [m], one per batch; None if nothing was counted."""
    assert len(hits) == len(totals) >= 2, f"{len(hits)} hits and {len(totals)} totals of at least 2 batches"
    total = float(totals.sum())
    if total == 0:
        return None
    share = float(hits.sum()) / total
    return wilson(share, effective_samples(share, hits, totals), student_t(confidence, len(totals) - 1))


def effective_samples(share: float, hits: I64, totals: I64) -> float:
    """Number of independent samples that would vary as much."""
    num_batches, total = len(totals), float(totals.sum())
    spread = share * (1 - share)
    if spread == 0:
        return min(num_batches, total)
    variance = num_batches / (num_batches - 1) * float(((hits - share * totals) ** 2).sum()) / total**2
    return min(spread / variance, total) if variance > 0 else total


def wilson(share: float, num_samples: float, deviations: float) -> EstimatedShare:
    """The shares from which `share` of `num_samples` samples is at most `deviations` standard deviations away."""
    weight = deviations**2 / num_samples
    centre = (share + weight / 2) / (1 + weight)
    half = deviations / (1 + weight) * sqrt(share * (1 - share) / num_samples + weight / (4 * num_samples))
    return EstimatedShare(
        estimate=share, low=max(0.0, min(share, centre - half)), high=min(1.0, max(share, centre + half))
    )


def unseen_share(num_batches: int, confidence: float) -> float:
    """The share above which a kind of batch is, with this confidence, among `num_batches` batches drawn at random."""
    return 1.0 - float((1 - confidence) ** (1 / num_batches))


@lru_cache(maxsize=16)
def student_t(confidence: float, freedom: int) -> float:
    """The t for which |T| < t has this probability.

    With T = sqrt(freedom) * tan(angle), the angle's density is cos(angle)^(freedom - 1), which is summed until the
    probability is reached. Steps are small near 0, where all of it is when there are many degrees of freedom."""
    angles = np.pi / 2 * np.linspace(0, 1, 20001) ** 2
    density = np.cos(angles) ** (freedom - 1)
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(angles))])
    return sqrt(freedom) * tan(float(np.interp(confidence * cumulative[-1], cumulative, angles)))


class AccessCounts:
    def __init__(self, group: GroupSpec, num_features: int) -> None:
        self._grouper = Grouper(group, num_features)
        self._keys, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._pending: list[tuple[I64, I64]] = []
        self._num_pending = 0
        self.largest_batch_rows = 0  # distinct rows of the batch that touches most rows

    def add(self, batch: Batch) -> I64:
        """Returns the batch's distinct rows."""
        grouping = self._grouper.group(self._grouper.lookups(batch))
        self._pending.append((grouping.keys, np.diff(grouping.segment_offsets).astype(np.int64)))
        self._num_pending += len(grouping.keys)
        self.largest_batch_rows = max(self.largest_batch_rows, len(grouping.keys))
        if self._num_pending > max(LEAST_PENDING_ROWS, len(self._keys)):
            self._merge()
        return grouping.keys

    @property
    def max_rows(self) -> int:
        return len(self._keys) + self._num_pending

    def totals(self) -> tuple[I64, I64]:
        """Returns (distinct keys, ascending; look-ups of each)."""
        self._merge()
        return self._keys, self._counts

    def _merge(self) -> None:
        if not self._pending:
            return
        keys = np.concatenate([self._keys, *(own for own, _ in self._pending)])
        counts = np.concatenate([self._counts, *(own for _, own in self._pending)])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        firsts = np.flatnonzero(np.diff(keys, prepend=-1))
        self._keys, self._counts = keys[firsts], np.add.reduceat(counts[order], firsts) if len(keys) else counts
        self._pending, self._num_pending = [], 0


class Popularity:
    def __init__(self, groups: tuple[GroupSpec, ...], limit_bytes: float) -> None:
        num_features = sum(group.num_features for group in groups)
        self.groups = groups
        self.counts = [AccessCounts(group, num_features) for group in groups]
        self.num_batches = self.num_samples = 0
        self._limit_bytes = limit_bytes

    def add(self, batch: Batch) -> list[I64]:
        """Returns each group's distinct rows. Raises ConfigError if the sample touches more rows than memory can
        count."""
        keys = [counts.add(batch) for counts in self.counts]
        self.num_batches += 1
        self.num_samples += batch.size
        needed = sum(counts.max_rows for counts in self.counts) * BYTES_PER_ROW
        if needed > self._limit_bytes:
            raise ConfigError(
                f"--sample: the first {self.num_samples} samples touch {needed // BYTES_PER_ROW} distinct rows; "
                "counting them takes "
                f"about {needed} bytes, and {int(self._limit_bytes)} may be used; give a smaller --sample"
            )
        return keys

    @property
    def num_rows(self) -> int:
        return sum(len(counts.totals()[0]) for counts in self.counts)

    @property
    def largest_batch_rows(self) -> tuple[int, ...]:
        return tuple(counts.largest_batch_rows for counts in self.counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class HotSet:
    keys: tuple[I64, ...]  # ascending, one array per group
    # per group, look-ups in the sample of its least looked-up hot row; None without a hot row
    threshold: tuple[int | None, ...]
    nbytes: int  # of the rows' records


def hot_set(popularity: Popularity, budget_bytes: int, room: tuple[int, ...] | None = None) -> HotSet:
    """The rows with the most look-ups per record byte within the budget, ties by key; at most `room` rows per group."""
    groups = popularity.groups
    totals = [counts.totals() for counts in popularity.counts]
    orders = [
        np.argsort(-counts, kind="stable")[: None if room is None else room[g]] for g, (_, counts) in enumerate(totals)
    ]
    owners = np.repeat(np.arange(len(groups)), [len(order) for order in orders])
    nbytes = np.array([group.record_bytes for group in groups], np.int64)[owners]
    lookups = np.concatenate([counts[order] for (_, counts), order in zip(totals, orders, strict=True)])
    by_density = np.argsort(-(lookups / nbytes), kind="stable")
    num_taken = int(np.searchsorted(np.cumsum(nbytes[by_density]), budget_bytes, side="right"))
    taken = np.bincount(owners[by_density[:num_taken]], minlength=len(groups)).tolist()
    return HotSet(
        keys=tuple(np.sort(keys[order[:n]]) for (keys, _), order, n in zip(totals, orders, taken, strict=True)),
        threshold=tuple(
            int(counts[order[n - 1]]) if n else None
            for (_, counts), order, n in zip(totals, orders, taken, strict=True)
        ),
        nbytes=sum(n * group.record_bytes for n, group in zip(taken, groups, strict=True)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShares:
    table: str
    num_rows: int
    hot_rows: int
    hot_bytes: int
    accesses: EstimatedShare | None  # None: the judged batches look up nothing
    inputs: EstimatedShare | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CoverageShares:
    accesses: EstimatedShare | None
    inputs: EstimatedShare | None
    tables: tuple[TableShares, ...]  # in the job's order


class Coverage:
    """Counts for one hot set. Tables are in the job's order: entry t of an array is the table with index t."""

    def __init__(self, groups: tuple[GroupSpec, ...], hot: HotSet) -> None:
        self._groups, self._hot = groups, hot
        self._groupers = [Grouper(group, sum(group.num_features for group in groups)) for group in groups]
        self._num_tables = sum(len(group.tables) for group in groups)
        self._hits: list[I64] = []  # [T] look-ups of hot rows, one array per batch
        self._lookups: list[I64] = []  # [T]
        self._inputs: list[I64] = []  # [T + 1] samples covered in each table, and in all
        self._sizes: list[int] = []  # samples
        self.num_samples = 0
        self._single_hot = True  # so far every sample looked up a row of every table
        self.largest_batch_rows = [0] * len(groups)  # distinct rows of the batch that touches most rows

    def add(self, batch: Batch) -> None:
        self._single_hot &= batch.offsets is None
        hits, lookups = np.zeros((2, self._num_tables), np.int64)
        cold = np.zeros((self._num_tables, batch.size), np.bool_)
        for g, (group, grouper, hot) in enumerate(zip(self._groups, self._groupers, self._hot.keys, strict=True)):
            tables = np.array([table.index for table in group.tables])
            own = grouper.lookups(batch)
            grouping = grouper.group(own)
            self.largest_batch_rows[g] = max(self.largest_batch_rows[g], len(grouping.keys))
            is_hot = np.isin(grouping.keys, hot, assume_unique=True)
            per_row = np.diff(grouping.segment_offsets)
            owner = grouping.keys >> KEY_SHIFT
            lookups += np.bincount(owner, per_row, self._num_tables).astype(np.int64)
            hits += np.bincount(owner, per_row * is_hot, self._num_tables).astype(np.int64)
            is_cold = grouper.arrange(grouping, (~is_hot).astype(np.int32))[0] != 0
            table_of = np.repeat(tables, np.diff(own.table_starts))
            cold[table_of[is_cold], sample_of(own, batch.size)[is_cold]] = True
        self._hits.append(hits)
        self._lookups.append(lookups)
        self._inputs.append(batch.size - np.append(cold.sum(axis=1), cold.any(axis=0).sum()))
        self._sizes.append(batch.size)
        self.num_samples += batch.size

    @property
    def num_batches(self) -> int:
        return len(self._sizes)

    @property
    def input_share(self) -> float:
        """Of the samples: those of which every look-up is of a hot row."""
        return float(sum(inputs[-1] for inputs in self._inputs) / self.num_samples)

    def shares(self, confidence: float) -> CoverageShares:
        hits, lookups, inputs, sizes = (
            np.array(rows) for rows in (self._hits, self._lookups, self._inputs, self._sizes)
        )
        tables: dict[int, TableShares] = {}
        for group, hot in zip(self._groups, self._hot.keys, strict=True):
            for table in group.tables:
                num_hot, t = int(np.count_nonzero(hot >> KEY_SHIFT == table.index)), table.index
                known = known_share(num_hot, table.num_embeddings)
                tables[t] = TableShares(
                    table=table.name,
                    num_rows=table.num_embeddings,
                    hot_rows=num_hot,
                    hot_bytes=num_hot * group.record_bytes,
                    accesses=share_of(hits[:, t], lookups[:, t], confidence, known),
                    inputs=share_of(inputs[:, t], sizes, confidence, known if known or self._single_hot else None),
                )
        in_order = tuple(tables[index] for index in sorted(tables))
        known = known_share(sum(map(len, self._hot.keys)), sum(group.num_rows for group in self._groups))
        # every sample looks up a row there
        blocked = self._single_hot and any(table.hot_rows == 0 for table in in_order)
        return CoverageShares(
            accesses=share_of(hits.sum(axis=1), lookups.sum(axis=1), confidence, known),
            inputs=share_of(inputs[:, -1], sizes, confidence, 0.0 if blocked else known or None),
            tables=in_order,
        )


def known_share(num_hot: int, num_rows: int) -> float | None:
    """The share of look-ups if it is certain: no row is hot, or every row is."""
    if num_hot == 0:
        return 0.0
    return 1.0 if num_hot == num_rows else None


def share_of(hits: I64, totals: I64, confidence: float, known: float | None) -> EstimatedShare | None:
    if known is not None and totals.sum():
        return EstimatedShare(estimate=known, low=known, high=known)
    return clustered_share(hits, totals, confidence)


def sample_of(lookups: GroupLookups, num_samples: int) -> I64:
    """The sample of each look-up; bags are ordered by feature."""
    if lookups.offsets is None:
        return np.arange(len(lookups.ids)) % num_samples
    return np.repeat(np.arange(len(lookups.offsets) - 1), np.diff(lookups.offsets)) % num_samples
