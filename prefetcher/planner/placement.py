"""Chooses what of each table travels between ranks, by the bytes that the first batches send.

    rows       each distinct row that a rank looks up and does not own, in the table's dtype; its gradient goes back
    table      a vector for each sample and feature, from the one owner to the other ranks; its gradient goes back
    columns    as many bytes, a piece of each vector from each of several owners

Every rank reads the first batches whole, so all choose alike. Bytes are those that travel: what a rank keeps for itself
is copied. A link carries both directions at once, so a rank is as busy as the larger of what it sends and receives,
once forward and once backward.
"""

from collections.abc import Sequence, Set
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np

from rowcast.job.embedding_tables import Placement, placement_of
from rowcast.job.schema import Job
from rowcast.job.tables import ITEM_BYTES, KEY_SHIFT, batch_features, cuts, points_of, whole_groups
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.protocol.batch import Lookups, Scheduled
from rowcast.protocol.parts import Shards, part_bounds, parts_of
from rowcast.runtime.arrays import I64

SENT, RECEIVED = 0, 1  # as seen from the rank


class Bytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a train step, forward and backward together."""

    mean: float  # that a rank receives, which is what it sends on average
    most: float  # of the busiest rank


class TableBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a train step that a rank receives, forward and backward, in the mean over ranks and steps."""

    table: str
    rows: float  # if its rows travel
    vectors: float  # if pooled vectors do
    placement: Placement
    owners: tuple[int, ...]  # the ranks that own its pieces; () if rows travel


class Traffic:
    """Counts what T tables would send between N ranks in some steps, by any placement."""

    def __init__(self, job: Job) -> None:
        self.job, self._count = job, job.ranks.count
        self._placed_as = cache(lambda t, placement: msgspec.structs.replace(job.tables[t], placement=placement))
        self._shards = [
            Shards([replace(own, point=None) for own in group.tables], self._count) for group in whole_groups(job)
        ]
        self.steps = 0
        self.samples = np.zeros(self._count, np.int64)  # of each rank, over all steps
        self.distinct = np.zeros(len(job.tables), np.int64)  # rows that ranks look up, of each table, added over ranks
        self.rows = np.zeros((len(job.tables), 2, self._count), np.int64)  # of these sent and received, by rank
        self._row_bytes = np.array([own.width * ITEM_BYTES[own.dtype] for own in job.tables])
        # vectors and their gradients have them too
        self._gradient_bytes = np.array([own.width * ITEM_BYTES[job.ranks.gradients] for own in job.tables])
        self._vector_bytes = np.array([len(own.features) for own in job.tables]) * self._gradient_bytes  # of a sample

    def add(self, batch_size: int, keys: Sequence[Sequence[I64]]) -> None:
        """Adds a train step. `keys`: of each rank and group, the distinct rows that the rank looks up."""
        self.steps += 1
        self.samples += np.diff(part_bounds(batch_size, self._count))
        for rank, of_groups in enumerate(keys):
            for shards, own in zip(self._shards, of_groups, strict=True):
                places = (own >> KEY_SHIFT) * self._count + shards.owners(own)
                wanted = np.bincount(places, minlength=self.rows[:, SENT].size).reshape(-1, self._count)
                self.distinct += wanted.sum(axis=1)
                wanted[:, rank] = 0
                self.rows[:, SENT] += wanted
                self.rows[:, RECEIVED, rank] += wanted.sum(axis=1)

    def of_each(self, placements: Sequence[Placement]) -> list[TableBytes]:
        """`placements`: of each table, which is only said."""
        rows = self.rows[:, RECEIVED].sum(axis=1) * (self._row_bytes + self._gradient_bytes) / self._times
        vectors = 2 * self._vector_bytes * (self.samples.sum() * (self._count - 1) / self._count) / self._times
        each = zip(self.job.tables, rows.tolist(), vectors.tolist(), placements, self.owners(placements), strict=True)
        return [
            TableBytes(table=table.name, rows=own, vectors=pooled, placement=placement, owners=owners)
            for table, own, pooled, placement, owners in each
        ]

    def gains(self) -> I64:
        """Returns the bytes that each table saves as vectors, [T], over ranks and steps. What ranks keep for themselves
        is counted too: which rows these are is luck. A table of single look-ups gains only if gradients are narrower
        than rows."""
        gains: I64 = (
            self.distinct * (self._row_bytes + self._gradient_bytes) - 2 * self._vector_bytes * self.samples.sum()
        )
        return gains

    def of(self, placements: Sequence[Placement]) -> Bytes:
        """Returns the bytes of all tables together. `placements`: of each, none of them "auto"."""
        forward, back = self._exchanged(placements)
        received = int(forward[RECEIVED].sum() + back[RECEIVED].sum())
        return Bytes(mean=received / self._times, most=self.busiest(placements) * self._count / self._times)

    def busiest(self, placements: Sequence[Placement]) -> int:
        """Returns the bytes of the busiest rank over all steps."""
        forward, back = self._exchanged(placements)
        return int((forward.max(axis=0) + back.max(axis=0)).max())

    def owners(self, placements: Sequence[Placement]) -> list[tuple[int, ...]]:
        """Returns the ranks that own the pieces of each table; () if each row has its own."""
        placed = [self._placed_as(t, placement) for t, placement in enumerate(placements)]
        points = points_of(placed, self._count) or [()] * len(placements)
        return [tuple(point * self._count >> 32 for point in own) for own in points]

    @property
    def _times(self) -> int:
        return max(self.steps, 1) * self._count

    def _exchanged(self, placements: Sequence[Placement]) -> tuple[I64, I64]:
        """Returns the bytes forward and backward, each [2, N]."""
        owners = self.owners(placements)
        is_placed, owned = np.array([len(own) > 0 for own in owners]), np.zeros(self._count, np.int64)
        for own, nbytes in zip(owners, self._vector_bytes.tolist(), strict=True):
            np.add.at(owned, list(own), nbytes // max(1, len(own)))  # bytes of a sample's vectors, by owner
        rows = self.rows[~is_placed]
        sent = owned * (self.samples.sum() - self.samples)
        vectors = np.stack([sent, (owned.sum() - owned) * self.samples])
        forward, back = (np.tensordot(own[~is_placed], rows, 1) for own in (self._row_bytes, self._gradient_bytes))
        return forward + vectors, (back + vectors)[::-1]


def everywhere(job: Job, way: Placement) -> list[Placement]:
    """Returns the placement of each table if all that are pooled are placed so; "columns": in the smallest pieces."""
    placed = [placement_of(cuts(job, table)[-1]) if way == "columns" else way for table in job.tables]
    return ["rows" if table.pooling == "none" else own for table, own in zip(job.tables, placed, strict=True)]


def counted(job: Job, measured: Sequence[Scheduled[Lookups]]) -> Traffic:
    """Counts the train steps among the first 32 of `measured`, or these if there are none, whatever the placements.

    `measured`: the batches that the run begins with, whole, as all ranks read them, so that all count the same."""
    first = measured[:MEASURED_BATCHES]
    groups = whole_groups(job)
    traffic, whole = Traffic(job), batch_features(groups)
    groupers = groupers_of(groups)
    for scheduled in [own for own in first if own.kind == "train"] or first:
        parts = parts_of(scheduled.batch, job.ranks.count, whole)
        keys = [[grouper.group(grouper.lookups(part)).keys for grouper in groupers] for part in parts]
        traffic.add(scheduled.batch.size, keys)
    return traffic


def chosen(job: Job, traffic: Traffic) -> list[Placement]:
    """Returns the placement of each table, in the job's order, none of them "auto". Where the job says "auto", a table
    is pooled if that sends fewer bytes and lowers those of the busiest rank; with one rank none is. Ties go by the
    order of tables."""
    gains = traffic.gains()
    auto = [t for t, table in enumerate(job.tables) if table.placement == "auto" and gains[t] > 0]
    gaining = sorted(auto, key=lambda t: (-gains[t], t))

    def busiest(pooled: Set[int]) -> int:
        return traffic.busiest(with_pooled(job, pooled))

    # each of many equal tables alone makes its owner the busiest rank, so tables are first added without looking
    best = min((frozenset(gaining[:end]) for end in range(len(gaining) + 1)), key=busiest)
    least = busiest(best)
    for t in gaining:
        if (most := busiest(other := best ^ {t})) < least:
            best, least = other, most
    return with_pooled(job, best)


def with_pooled(job: Job, pooled: Set[int]) -> list[Placement]:
    """Returns the placement of each table if these of "auto" are pooled, in as few pieces as send no more each than a
    rank sends on average."""
    widths = [table.width * len(table.features) for table in job.tables]
    mean = sum(width for t, width in enumerate(widths) if job.tables[t].pieces or t in pooled) / job.ranks.count
    placed = ["rows" if table.placement == "auto" else table.placement for table in job.tables]
    for t in pooled:
        *fewer, most = cuts(job, job.tables[t])
        placed[t] = placement_of(next((pieces for pieces in fewer if widths[t] / pieces <= mean), most))
    return placed
