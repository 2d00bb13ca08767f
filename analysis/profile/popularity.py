"""How often each row is looked up in a sample, and which rows are hot: the most looked-up ones that a budget of bytes holds.

Following Adnan et al., Accelerating Recommendation System Training by Leveraging Popular Choices (VLDB 2022), who call a row hot above a
threshold of accesses that a memory budget decides, and find it from a small sample of the inputs.

Memory follows the distinct rows of the sample: 16 bytes a row, several times that while they are sorted.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.grouping import Grouper
from rowcast.protocol.batch import Batch
from rowcast.runtime.errors import ConfigError

I64 = npt.NDArray[np.int64]

BYTES_PER_ROW = 128  # at the peak, while counts are merged or hot rows are picked
LEAST_PENDING_ROWS = 2**18


class AccessCounts:
    """Look-ups of each distinct row of a group, from the batches added so far."""

    def __init__(self, group: GroupSpec, num_features: int) -> None:
        self._grouper = Grouper(group, num_features)
        self._keys, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._pending: list[tuple[I64, I64]] = []
        self._num_pending = 0
        self.largest_batch_rows = 0  # distinct rows of the batch that touches most

    def add(self, batch: Batch) -> None:
        grouping = self._grouper.group(self._grouper.lookups(batch))
        self._pending.append((grouping.keys, np.diff(grouping.segment_offsets).astype(np.int64)))
        self._num_pending += len(grouping.keys)
        self.largest_batch_rows = max(self.largest_batch_rows, len(grouping.keys))
        if self._num_pending > max(LEAST_PENDING_ROWS, len(self._keys)):
            self._merge()

    @property
    def max_rows(self) -> int:
        """No fewer than the distinct rows so far."""
        return len(self._keys) + self._num_pending

    def totals(self) -> tuple[I64, I64]:
        """(distinct keys, ascending; look-ups of each)."""
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
    """Look-ups of every row of a job's sample."""

    def __init__(self, groups: tuple[GroupSpec, ...], limit_bytes: float) -> None:
        """`limit_bytes`: host memory that counting may take."""
        num_features = sum(group.num_features for group in groups)
        self.groups = groups
        self.counts = [AccessCounts(group, num_features) for group in groups]
        self.num_batches = self.num_samples = 0
        self._limit_bytes = limit_bytes

    def add(self, batch: Batch) -> None:
        """Raises ConfigError where the sample touches more rows than there is memory to count them."""
        for counts in self.counts:
            counts.add(batch)
        self.num_batches += 1
        self.num_samples += batch.size
        needed = sum(counts.max_rows for counts in self.counts) * BYTES_PER_ROW
        if needed > self._limit_bytes:
            raise ConfigError(
                f"--sample: the first {self.num_samples} samples touch {needed // BYTES_PER_ROW} distinct rows, and counting them takes "
                f"about {needed} bytes of {int(self._limit_bytes)} that may be used; give a smaller --sample"
            )

    @property
    def num_rows(self) -> int:
        return sum(len(counts.totals()[0]) for counts in self.counts)

    @property
    def largest_batch_rows(self) -> tuple[int, ...]:
        return tuple(counts.largest_batch_rows for counts in self.counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class HotSet:
    keys: tuple[I64, ...]  # ascending, one array a group
    # look-ups in the sample of the least looked-up hot row, per group; None without a hot row
    threshold: tuple[int | None, ...]
    nbytes: int  # of their records


def hot_set(popularity: Popularity, budget_bytes: int, room: tuple[int, ...] | None = None) -> HotSet:
    """The rows with the most look-ups per byte of record within the budget, equal ones by key; at most `room` rows of each group."""
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
