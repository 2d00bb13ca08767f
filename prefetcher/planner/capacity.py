"""Divides the cache's capacity among the groups once, at the start, by the first batches."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rowcast.job.schema import Job, Lookahead
from rowcast.job.tables import GroupSpec, num_features, rows_in
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.planner.directory import MOST_ROWS
from rowcast.prefetcher.planner.group_planner import NO_ROWS
from rowcast.prefetcher.planner.grouping import Grouper
from rowcast.prefetcher.planner.horizon import OCCURRENCE_BYTES
from rowcast.protocol.batch import Lookups, Scheduled
from rowcast.protocol.parts import UNDIVIDED, Rank, Shards
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError

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
        # not 0: later batches may touch a group that these do not
        largest.append(max((len(batch_keys) for batch_keys in keys), default=0) or 1)
        every = np.sort(np.concatenate(keys or [NO_ROWS]), kind="stable")  # merges; numpy's unique is slower
        num_distinct = int(np.count_nonzero(np.diff(every, prepend=-1)))
        counts.append(num_distinct or -(-untouched_share(group, batches) // num_shards))
    return Touched(
        num_batches=min(len(batches), MEASURED_BATCHES), largest_batch_rows=tuple(largest), distinct_rows=tuple(counts)
    )


def untouched_share(group: GroupSpec, batches: Sequence[Scheduled[Lookups]]) -> int:
    """Estimates the distinct rows of a group that the first batches do not touch: one per bag, or all rows."""
    largest = max((scheduled.batch.size for scheduled in batches), default=1)
    return min(group.num_rows, group.num_features * largest)


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
    """Slots of each group, from one of the two capacities; rows are for a single group.

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
