"""Counts look-ups per row in a sample, and picks hot rows: those looked up most that fit a budget of bytes.

Follows Adnan et al., Accelerating Recommendation System Training by Leveraging Popular Choices (VLDB 2022): a row is
hot above a threshold of accesses set by a memory budget, which a small sample of the inputs suffices to find.

Memory grows with the distinct rows of the sample: 16 bytes per row, and several times that while they are sorted.

What hot rows cover is counted on other batches than those that chose them.
"""

from dataclasses import dataclass

import numpy as np

from rowcast.job.tables import KEY_SHIFT, GroupSpec
from rowcast.prefetcher.planner.grouping import Grouper, GroupLookups
from rowcast.protocol.batch import Batch
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError

BYTES_PER_ROW = 128  # peak, while counts are merged or hot rows are picked
LEAST_PENDING_ROWS = 2**18


class AccessCounts:
    def __init__(self, group: GroupSpec, num_features: int) -> None:
        self._grouper = Grouper(group, num_features)
        self._keys, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._pending: list[tuple[I64, I64]] = []
        self._num_pending = 0
        self.largest_batch_rows = 0  # distinct rows of the batch that touches most rows

    def add(self, batch: Batch) -> None:
        grouping = self._grouper.group(self._grouper.lookups(batch))
        self._pending.append((grouping.keys, np.diff(grouping.segment_offsets).astype(np.int64)))
        self._num_pending += len(grouping.keys)
        self.largest_batch_rows = max(self.largest_batch_rows, len(grouping.keys))
        if self._num_pending > max(LEAST_PENDING_ROWS, len(self._keys)):
            self._merge()

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

    def add(self, batch: Batch) -> None:
        """Raises ConfigError if the sample touches more rows than memory can count."""
        for counts in self.counts:
            counts.add(batch)
        self.num_batches += 1
        self.num_samples += batch.size
        needed = sum(counts.max_rows for counts in self.counts) * BYTES_PER_ROW
        if needed > self._limit_bytes:
            raise ConfigError(
                f"--sample: the first {self.num_samples} samples touch {needed // BYTES_PER_ROW} distinct rows; "
                "counting them takes "
                f"about {needed} bytes, and {int(self._limit_bytes)} may be used; give a smaller --sample"
            )

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
    accesses: float | None  # of the look-ups, those of hot rows; None: the judged batches look up nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class CoverageShares:
    accesses: float | None
    inputs: float  # of the samples, those of which every look-up is of a hot row
    tables: tuple[TableShares, ...]  # in the job's order


class Coverage:
    """Counts for one hot set. Entry t of an array is the table with index t, in the job's order."""

    def __init__(self, groups: tuple[GroupSpec, ...], hot: HotSet) -> None:
        self._groups, self._hot = groups, hot
        self._groupers = [Grouper(group, sum(group.num_features for group in groups)) for group in groups]
        self._num_tables = sum(len(group.tables) for group in groups)
        self._hits, self._lookups = np.zeros((2, self._num_tables))
        self._num_covered = 0
        self.num_batches = self.num_samples = 0
        self.largest_batch_rows = [0] * len(groups)  # distinct rows of the batch that touches most rows

    def add(self, batch: Batch) -> None:
        cold = np.zeros(batch.size, np.bool_)
        for g, (grouper, hot) in enumerate(zip(self._groupers, self._hot.keys, strict=True)):
            own = grouper.lookups(batch)
            grouping = grouper.group(own)
            self.largest_batch_rows[g] = max(self.largest_batch_rows[g], len(grouping.keys))
            is_hot = np.isin(grouping.keys, hot, assume_unique=True)
            per_row, owner = np.diff(grouping.segment_offsets), grouping.keys >> KEY_SHIFT
            self._lookups += np.bincount(owner, per_row, self._num_tables)
            self._hits += np.bincount(owner, per_row * is_hot, self._num_tables)
            is_cold = grouper.arrange(grouping, (~is_hot).astype(np.int32))[0] != 0
            cold[sample_of(own, batch.size)[is_cold]] = True
        self._num_covered += int(np.count_nonzero(~cold))
        self.num_batches += 1
        self.num_samples += batch.size

    def shares(self) -> CoverageShares:
        found = {
            table.index: TableShares(
                table=table.name,
                num_rows=table.num_embeddings,
                hot_rows=(num_hot := int(np.count_nonzero(hot >> KEY_SHIFT == table.index))),
                hot_bytes=num_hot * group.record_bytes,
                accesses=share_of(self._hits[table.index], self._lookups[table.index]),
            )
            for group, hot in zip(self._groups, self._hot.keys, strict=True)
            for table in group.tables
        }
        return CoverageShares(
            accesses=share_of(self._hits.sum(), self._lookups.sum()),
            inputs=self._num_covered / self.num_samples,
            tables=tuple(found[index] for index in sorted(found)),
        )


def share_of(hits: float, total: float) -> float | None:
    return float(hits / total) if total else None


def sample_of(lookups: GroupLookups, num_samples: int) -> I64:
    """The sample of each look-up; bags are ordered by feature."""
    if lookups.offsets is None:
        return np.arange(len(lookups.ids)) % num_samples
    return np.repeat(np.arange(len(lookups.offsets) - 1), np.diff(lookups.offsets)) % num_samples
