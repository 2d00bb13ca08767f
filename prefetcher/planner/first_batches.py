"""Decides by the run's first batches, once at the start: the slots of each group, and what travels between ranks.

    rows       each distinct row that a rank looks up and does not own, in the table's dtype; its gradient goes back
    table      a vector for each sample and feature, from the one owner to the other ranks; its gradient goes back
    columns    as many bytes: a piece of each vector from each of several owners

Every rank reads the first batches whole, so all choose the same. Only bytes that travel count: what a rank keeps for
itself is copied. A link carries both directions at once, so a rank is as busy as the larger of what it sends and
receives, once forward and once backward."""

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache

import msgspec
import numpy as np

from rowcast.job.embedding_tables import Placement, placement_of
from rowcast.job.schema import Job, Lookahead
from rowcast.job.tables import (
    ITEM_BYTES,
    KEY_SHIFT,
    GroupSpec,
    batch_features,
    cuts,
    num_features,
    points_of,
    record_parts,
    rows_in,
    whole_groups,
)
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.planner.directory import MOST_ROWS
from rowcast.prefetcher.planner.group_planner import NO_ROWS
from rowcast.prefetcher.planner.grouping import Grouper
from rowcast.prefetcher.planner.horizon import OCCURRENCE_BYTES
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.protocol.batch import Lookups, Scheduled
from rowcast.protocol.parts import UNDIVIDED, Rank, Shards, part_bounds, parts_of
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError, listed
from rowcast.runtime.telemetry.format_numbers import human_bytes

MEASURED_BATCHES = 32
TOUCHES = f"a batch among the first {MEASURED_BATCHES} touches"


@dataclass(frozen=True, kw_only=True, slots=True)
class Touched:
    """The rows that the first batches touch, by group."""

    num_batches: int
    largest_batch_rows: tuple[int, ...]  # distinct rows of the largest batch
    distinct_rows: tuple[int, ...]  # distinct rows of all these batches together


def measure(groups: tuple[GroupSpec, ...], batches: Sequence[Scheduled[Lookups]], rank: Rank = UNDIVIDED) -> Touched:
    """Counts the rows that `rank` owns over the first 32 of `batches`. `groups` are all groups of the job."""
    keys_of_groups = []
    for group in groups:
        grouper, shards = Grouper(group, num_features(groups)), Shards(group.tables, rank.count)
        keys = [grouper.group(grouper.lookups(scheduled.batch)).keys for scheduled in batches[:MEASURED_BATCHES]]
        keys_of_groups.append([shards.rows_of(rank.number, of_batch) for of_batch in keys])
    return touched_by(groups, keys_of_groups, batches, rank.count)


def touched_by(
    groups: tuple[GroupSpec, ...],
    keys_of_groups: Sequence[Sequence[I64]],
    batches: Sequence[Scheduled[Lookups]],
    num_shards: int = 1,
) -> Touched:
    """`keys_of_groups`: of each group, the distinct rows of each batch that are in one of `num_shards` shards."""
    largest, counts = [], []
    for group, keys in zip(groups, keys_of_groups, strict=True):
        # not 0, because later batches may touch a group that these do not
        largest.append(max((len(batch_keys) for batch_keys in keys), default=0) or 1)
        every = np.sort(np.concatenate(keys or [NO_ROWS]), kind="stable")  # merges; numpy's unique is slower
        num_distinct = int(np.count_nonzero(np.diff(every, prepend=-1)))
        most_bags = group.num_features * max((scheduled.batch.size for scheduled in batches), default=1)
        # of a group that these batches do not touch: one row for each bag, or all rows
        counts.append(num_distinct or -(-min(group.num_rows, most_bags) // num_shards))
    return Touched(
        num_batches=min(len(batches), MEASURED_BATCHES), largest_batch_rows=tuple(largest), distinct_rows=tuple(counts)
    )


def slots_of(job: Job, groups: tuple[GroupSpec, ...], touched: Touched) -> tuple[int, ...]:
    """Computes the slots of each group in a run of the job. `groups` are all groups of the job; `touched`: by the first
    batches, on a rank. Raises ConfigError."""
    rows = job.cache.capacity_rows
    nbytes = None if rows is not None else parse_bytes(job.cache.capacity)
    fixed = {
        group.name: rows_in(group, job.cache.groups[group.name]) for group in groups if group.name in job.cache.groups
    }
    slots = divide_capacity(groups, touched, capacity_bytes=nbytes, capacity_rows=rows, fixed_rows=fixed)
    for group, n, largest_batch_rows in zip(groups, slots, touched.largest_batch_rows, strict=True):
        check_trackable(group, n, known_rows(job.lookahead, largest_batch_rows), alone=len(groups) == 1)
    return slots


def known_rows(lookahead: Lookahead, largest_batch_rows: int) -> int:
    """Returns the most rows of a group in the known batches and one more."""
    rows = (lookahead.horizon_batches + 2) * largest_batch_rows
    return rows if lookahead.horizon != "auto" else max(rows, parse_bytes(lookahead.id_bytes) // OCCURRENCE_BYTES)


def check_trackable(group: GroupSpec, num_slots: int, num_known: int, *, alone: bool) -> None:
    """Raises ConfigError if the planner cannot keep track of all resident and all known rows. `alone`: the job has only
    this group."""
    if min(group.num_rows, num_slots + num_known) <= MOST_ROWS:
        return
    most = MOST_ROWS - num_known
    key = "cache.capacity" if alone else f"cache.groups.{group.name}"
    change = f'set {key} = "{most} rows" or less' if most > 0 else "lower lookahead.horizon or lookahead.id_bytes"
    raise ConfigError(
        f"the capacity gives group {group.name} {num_slots} slots, and batches known ahead touch up to {num_known} "
        f"rows, but the planner keeps track of at most {MOST_ROWS} rows of a group; {change}"
    )


def divide_capacity(
    groups: tuple[GroupSpec, ...],
    touched: Touched,
    *,
    capacity_bytes: int | None = None,
    capacity_rows: int | None = None,
    fixed_rows: Mapping[str, int] | None = None,
) -> tuple[int, ...]:
    """Returns the slots of each group, from one of the two capacities; one in rows is for a single group.

    Groups in `fixed_rows` (the job file's cache.groups) get that number. Every other group gets the rows of its largest
    batch. The rest is divided in proportion to the distinct bytes that each touches, up to a group's rows; the other
    groups get what a full group cannot use. Raises ConfigError if the largest batches do not fit.
    """
    assert (capacity_bytes is None) != (capacity_rows is None), "one capacity, in bytes or in rows"
    if capacity_rows is not None:
        assert len(groups) == 1, f"a capacity in rows for {len(groups)} groups"
        capacity_bytes = capacity_rows * groups[0].record_bytes
    assert capacity_bytes is not None
    limits = [group.num_rows for group in groups]
    record_bytes = [group.record_bytes for group in groups]
    shares = [rows * nbytes for rows, nbytes in zip(touched.distinct_rows, record_bytes, strict=True)]
    slots = list(touched.largest_batch_rows)
    fixed = fixed_rows or {}
    for g, group in enumerate(groups):
        if group.name in fixed:
            slots[g] = limits[g] = fixed_slots(group, fixed[group.name], limits[g], slots[g])
    rest_bytes = capacity_bytes - sum(map(operator.mul, slots, record_bytes))
    if rest_bytes < 0:
        others = [g for g in range(len(groups)) if groups[g].name not in fixed]
        assert others, (
            f"cache.groups takes {capacity_bytes - rest_bytes} of {capacity_bytes} bytes; the job file must refuse that"
        )
        least = [(slots[g], slots[g] * record_bytes[g]) for g in others]
        raise ConfigError(too_small(capacity_bytes, capacity_rows, rest_bytes, least, shared=len(others) < len(groups)))
    hand_out(slots, limits, shares, record_bytes, rest_bytes)
    return tuple(slots)


def fixed_slots(group: GroupSpec, rows: int, limit: int, largest_batch_rows: int) -> int:
    """Returns the slots of a group in cache.groups. Raises ConfigError if a measured batch does not fit."""
    if rows < largest_batch_rows:
        needed = f'"{largest_batch_rows} rows" ({largest_batch_rows * group.record_bytes} bytes)'
        raise ConfigError(
            f"cache.groups.{group.name} is too small: it holds {rows} rows, and {TOUCHES} {largest_batch_rows}; "
            f"set {needed} or more"
        )
    return min(rows, limit)


def too_small(
    capacity_bytes: int, capacity_rows: int | None, rest_bytes: int, least: list[tuple[int, int]], *, shared: bool
) -> str:
    """`least`: rows and bytes of the largest batch of each group that cache.groups does not name. `shared`: it names
    some."""
    rows = " + ".join(str(rows) for rows, _ in least)
    if capacity_rows is not None:
        return f'cache.capacity = "{capacity_rows} rows" is too small: {TOUCHES} {rows} rows; set "{rows} rows" or more'
    whose = " of the groups that cache.groups does not name" if shared else ""
    needed = f"{rows} rows{whose}, {sum(nbytes for _, nbytes in least)} bytes"
    taken = " beside what cache.groups takes" if shared else ""
    return (
        f"cache.capacity = {capacity_bytes} bytes is too small{taken}: {TOUCHES} {needed}; "
        f"set {capacity_bytes - rest_bytes} or more"
    )


def hand_out(slots: list[int], limits: list[int], shares: list[int], record_bytes: list[int], rest_bytes: int) -> None:
    """Adds `rest_bytes` to `slots` in proportion to `shares`. A group that reaches its limit drops out, and the others
    divide its rest."""
    open_groups = [g for g in range(len(slots)) if slots[g] < limits[g]]
    while open_groups:
        total = sum(shares[g] for g in open_groups)
        weight = {g: shares[g] if total else 1 for g in open_groups}
        added = {g: rest_bytes * weight[g] // (total or len(open_groups)) // record_bytes[g] for g in open_groups}
        full = [g for g in open_groups if slots[g] + added[g] >= limits[g]]
        for g in full or open_groups:
            gained = min(added[g], limits[g] - slots[g])
            slots[g] += gained
            rest_bytes -= gained * record_bytes[g]
        if not full:
            break
        open_groups = [g for g in open_groups if g not in full]
    for g in open_groups:  # the rest of rounding
        gained = min(rest_bytes // record_bytes[g], limits[g] - slots[g])
        slots[g] += gained
        rest_bytes -= gained * record_bytes[g]


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
        self._record_bytes = cache(
            lambda t, pieces: record_parts(job.optimizer.sparse, job.tables[t].dtype, job.tables[t].width // pieces)[1]
        )
        self._shards = [
            Shards([replace(table, point=None) for table in group.tables], self._count) for group in whole_groups(job)
        ]
        self.steps = 0
        self.samples = np.zeros(self._count, np.int64)  # of each rank, over all steps
        self.distinct = np.zeros(len(job.tables), np.int64)  # rows that ranks look up, of each table, added over ranks
        self.rows = np.zeros((len(job.tables), 2, self._count), np.int64)  # of these sent and received, by rank
        self._row_bytes = np.array([table.width * ITEM_BYTES[table.dtype] for table in job.tables])
        # vectors and their gradients have them too
        self._gradient_bytes = np.array([table.width * ITEM_BYTES[job.ranks.gradients] for table in job.tables])
        features_each = np.array([len(table.features) for table in job.tables])
        self._vector_bytes = features_each * self._gradient_bytes  # of a sample

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
        """`placements`: of each table, which is only reported."""
        rows = self.rows[:, RECEIVED].sum(axis=1) * (self._row_bytes + self._gradient_bytes) / self._times
        vectors = 2 * self._vector_bytes * (self.samples.sum() * (self._count - 1) / self._count) / self._times
        each = zip(self.job.tables, rows.tolist(), vectors.tolist(), placements, self.owners(placements), strict=True)
        return [
            TableBytes(table=table.name, rows=row_bytes, vectors=pooled, placement=placement, owners=owners)
            for table, row_bytes, pooled, placement, owners in each
        ]

    def gains(self) -> I64:
        """Returns the bytes that each table saves as vectors, [T], over ranks and steps. Counts what ranks keep for
        themselves too, because which rows these are is luck. A table of single look-ups gains only if gradients are
        narrower than rows."""
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
        return [tuple(point * self._count >> 32 for point in table_points) for table_points in points]

    def row_memory(self, placements: Sequence[Placement]) -> I64:
        """Returns the bytes of each rank's rows once all are trained, with their state but without an index, [N]."""
        nbytes = np.zeros(self._count, np.int64)
        for t, owners in enumerate(self.owners(placements)):
            of_table = self.job.tables[t].num_embeddings * self._record_bytes(t, max(1, len(owners)))
            nbytes += 0 if owners else -(-of_table // self._count)
            np.add.at(nbytes, list(owners), of_table)
        return nbytes

    @property
    def _times(self) -> int:
        return max(self.steps, 1) * self._count

    def _exchanged(self, placements: Sequence[Placement]) -> tuple[I64, I64]:
        """Returns the bytes forward and backward, each [2, N]."""
        owners = self.owners(placements)
        is_placed, owned = np.array([len(ranks) > 0 for ranks in owners]), np.zeros(self._count, np.int64)
        for own, nbytes in zip(owners, self._vector_bytes.tolist(), strict=True):
            np.add.at(owned, list(own), nbytes // max(1, len(own)))  # bytes of a sample's vectors, by owner
        rows = self.rows[~is_placed]
        sent = owned * (self.samples.sum() - self.samples)
        vectors = np.stack([sent, (owned.sum() - owned) * self.samples])
        forward, back = (
            np.tensordot(nbytes[~is_placed], rows, 1) for nbytes in (self._row_bytes, self._gradient_bytes)
        )
        return forward + vectors, (back + vectors)[::-1]


def everywhere(job: Job, way: Placement) -> list[Placement]:
    """Returns each table's placement if all that are pooled have this one; "columns": in the smallest pieces."""
    placed = [placement_of(cuts(job, table)[-1]) if way == "columns" else way for table in job.tables]
    return [
        "rows" if table.pooling == "none" else placement for table, placement in zip(job.tables, placed, strict=True)
    ]


def counted(job: Job, measured: Sequence[Scheduled[Lookups]]) -> Traffic:
    """Counts the train steps among the first 32 of `measured`, or these if there are none, whatever the placements.

    `measured`: the batches that the run begins with, whole, as all ranks read them, so that all count the same."""
    first = measured[:MEASURED_BATCHES]
    groups = whole_groups(job)
    traffic, whole = Traffic(job), batch_features(groups)
    groupers = groupers_of(groups)
    for scheduled in [scheduled for scheduled in first if scheduled.kind == "train"] or first:
        parts = parts_of(scheduled.batch, job.ranks.count, whole)
        keys = [[grouper.group(grouper.lookups(part)).keys for grouper in groupers] for part in parts]
        traffic.add(scheduled.batch.size, keys)
    return traffic


def chosen(job: Job, traffic: Traffic) -> list[Placement]:
    """Returns the placement of each table, in the job's order, none of them "auto". Where the job says "auto", a table
    is pooled if that sends fewer bytes, lowers those of the busiest rank, and brings no rank further beyond
    `ranks.memory`; with one rank none is. Ties go by the order of tables."""
    unlimited = cheapest(job, traffic, None)
    return cheapest(job, traffic, job.ranks.memory) if beyond(job.ranks.memory, traffic, unlimited) else unlimited


def cheapest(job: Job, traffic: Traffic, memory: str | int | None) -> list[Placement]:
    """As `chosen`, with this memory of a rank."""
    gains = traffic.gains()
    auto = [t for t, table in enumerate(job.tables) if table.placement == "auto" and gains[t] > 0]
    gaining = sorted(auto, key=lambda t: (-gains[t], t))

    @cache
    def price(pooled: frozenset[int]) -> tuple[int, int]:
        placements = with_pooled(job, pooled)
        return beyond(memory, traffic, placements), traffic.busiest(placements)

    # each of many equal tables alone makes its owner the busiest rank, so tables are first added without looking
    added = [frozenset[int]()]
    for t in gaining:
        if price(added[-1] | {t})[0] <= price(added[-1])[0]:
            added.append(added[-1] | {t})
    best = min(added, key=price)
    for t in gaining:
        best = min(best, best ^ {t}, key=price)
    return with_pooled(job, best)


def beyond(memory: str | int | None, traffic: Traffic, placements: Sequence[Placement]) -> int:
    """Returns by how many bytes the rows of the fullest rank exceed `memory`; 0 if none does."""
    return 0 if memory is None else max(0, int(traffic.row_memory(placements).max()) - parse_bytes(memory))


def short_of_memory(asked: Job, placed: Job, count: Callable[[], Traffic]) -> str:
    """Returns a sentence about what does not fit into `ranks.memory`; "" if all fits. `asked`: the job as its file has
    it. `placed`: with every table placed. `count`: counts the run's first batches."""
    memory = asked.ranks.memory
    if memory is None:
        return ""
    traffic, placements = count(), [table.placement for table in placed.tables]
    of_ranks = traffic.row_memory(placements)
    if beyond(memory, traffic, placements):
        rows = f"the rows of rank {of_ranks.argmax()} take up to {human_bytes(int(of_ranks.max()))}"
        return f"ranks.memory = {memory}: {rows} once all are trained; raise it, make tables smaller or use more ranks"
    unlimited = cheapest(asked, traffic, None)
    left = [table.name for table, way in zip(placed.tables, unlimited, strict=True) if way != table.placement == "rows"]
    most = human_bytes(int(traffic.row_memory(unlimited).max()))
    rows_travel = f"the rows of {listed(left)} travel; if they were pooled, a rank would hold up to {most} of rows"
    return f"ranks.memory = {memory}: {rows_travel}; raise it to send fewer bytes" if left else ""


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
