"""What share of look-ups and of whole inputs a hot set covers, counted batch by batch on samples that did not choose it.

An *input* is a sample. It is covered whole where every row that it looks up is hot: such a sample would train without any row moving.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowcast.analysis.profile.interval import Share, clustered_share
from rowcast.analysis.profile.popularity import HotSet
from rowcast.job.tables import KEY_SHIFT, GroupSpec
from rowcast.prefetcher.planner.grouping import Grouper, GroupLookups
from rowcast.protocol.batch import Batch

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShares:
    table: str
    num_rows: int
    hot_rows: int
    hot_bytes: int
    accesses: Share | None  # None: the judged batches look nothing up
    inputs: Share | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CoverageShares:
    accesses: Share | None
    inputs: Share | None
    tables: tuple[TableShares, ...]  # in the job's order


class Coverage:
    """Counts of one hot set. Tables stand in the job's order: row t of an array is the table of index t."""

    def __init__(self, groups: tuple[GroupSpec, ...], hot: HotSet) -> None:
        self._groups, self._hot = groups, hot
        self._groupers = [Grouper(group, sum(group.num_features for group in groups)) for group in groups]
        self._num_tables = sum(len(group.tables) for group in groups)
        self._hits: list[I64] = []  # [T] look-ups of hot rows, one array a batch
        self._lookups: list[I64] = []  # [T]
        self._inputs: list[I64] = []  # [T + 1] samples that are covered in each table, and in all
        self._sizes: list[int] = []  # samples
        self.num_samples = 0
        self._single_hot = True  # so far every sample looked up a row of every table
        self.largest_batch_rows = [0] * len(groups)  # distinct rows of the batch that touches most

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
    """Of look-ups, where there is nothing to be unsure of: no row is hot, or every row is."""
    if num_hot == 0:
        return 0.0
    return 1.0 if num_hot == num_rows else None


def share_of(hits: I64, totals: I64, confidence: float, known: float | None) -> Share | None:
    if known is not None and totals.sum():
        return Share(estimate=known, low=known, high=known)
    return clustered_share(hits, totals, confidence)


def sample_of(lookups: GroupLookups, num_samples: int) -> I64:
    """The sample of each look-up; bags stand feature by feature."""
    if lookups.offsets is None:
        return np.arange(len(lookups.ids)) % num_samples
    return np.repeat(np.arange(len(lookups.offsets) - 1), np.diff(lookups.offsets)) % num_samples
