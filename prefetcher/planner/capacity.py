"""Divides the cache's capacity between groups, once, at start: a function of the first batches and the capacity alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefetcher.planner.grouping import Grouper
from protocol.batch import ScheduledBatch
from protocol.errors import ConfigError
from protocol.tables import GroupSpec

MEASURED_BATCHES = 32
MAX_SLOTS = 2**31 - 1  # a slot is an int32


@dataclass(frozen=True, kw_only=True, slots=True)
class Touched:
    """What the first batches touch, per group."""

    largest_batch_rows: tuple[int, ...]  # distinct rows of the batch that touches most
    distinct_rows: tuple[int, ...]  # of all these batches together


def measure(groups: tuple[GroupSpec, ...], batches: Sequence[ScheduledBatch]) -> Touched:
    """Counts over the first 32 of `batches`. `groups` are all groups of the job."""
    largest, distinct = [], []
    num_features = sum(group.num_features for group in groups)
    for group in groups:
        grouper = Grouper(group, num_features)
        keys = [grouper.group(grouper.lookups(scheduled.batch)).keys for scheduled in batches[:MEASURED_BATCHES]]
        largest.append(max((len(some) for some in keys), default=0) or 1)  # a group may be touched later
        distinct.append(len(np.unique(np.concatenate(keys))) if any(map(len, keys)) else untouched_share(group, batches))
    return Touched(largest_batch_rows=tuple(largest), distinct_rows=tuple(distinct))


def untouched_share(group: GroupSpec, batches: Sequence[ScheduledBatch]) -> int:
    """Distinct rows to expect of a group that the first batches leave alone: one a bag of a batch, or all there are."""
    largest = max((scheduled.batch.size for scheduled in batches), default=1)
    return min(group.num_rows, group.num_features * largest)


def divide_capacity(
    groups: tuple[GroupSpec, ...], touched: Touched, *, capacity_bytes: int | None = None, capacity_rows: int | None = None
) -> tuple[int, ...]:
    """Slots per group from one of the two capacities; rows are for a single group.

    Every group gets the rows of its largest batch, the rest goes by the distinct bytes each touches, never beyond a group's rows; what
    a full group cannot use goes to the others. Raises ConfigError where the largest batches do not fit.
    """
    assert (capacity_bytes is None) != (capacity_rows is None), "one capacity, in bytes or in rows"
    if capacity_rows is not None:
        assert len(groups) == 1, f"a capacity in rows for {len(groups)} groups"
        capacity_bytes = capacity_rows * groups[0].record_bytes
    assert capacity_bytes is not None
    least_bytes = sum(rows * group.record_bytes for rows, group in zip(touched.largest_batch_rows, groups, strict=True))
    if least_bytes > capacity_bytes:
        raise ConfigError(too_small(capacity_bytes, capacity_rows, least_bytes, touched.largest_batch_rows))
    slots = list(touched.largest_batch_rows)
    limits = [min(group.num_rows, MAX_SLOTS) for group in groups]
    shares = [rows * group.record_bytes for rows, group in zip(touched.distinct_rows, groups, strict=True)]
    record_bytes = [group.record_bytes for group in groups]
    hand_out(slots, limits, shares, record_bytes, capacity_bytes - least_bytes)
    return tuple(slots)


def too_small(capacity_bytes: int, capacity_rows: int | None, least_bytes: int, least_rows: tuple[int, ...]) -> str:
    touches = f"a batch among the first {MEASURED_BATCHES} touches"
    if capacity_rows is not None:
        return f'cache.capacity = "{capacity_rows} rows" is too small: {touches} {least_rows[0]} rows; set "{least_rows[0]} rows" or more'
    rows = " + ".join(map(str, least_rows))
    return f"cache.capacity = {capacity_bytes} bytes is too small: {touches} {rows} rows, {least_bytes} bytes; set {least_bytes} or more"


def hand_out(slots: list[int], limits: list[int], shares: list[int], record_bytes: list[int], rest_bytes: int) -> None:
    """Adds `rest_bytes` to `slots` in proportion to `shares`; groups that reach their limit drop out and the others share anew."""
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
    for g in open_groups:  # what rounding left
        gained = min(rest_bytes // record_bytes[g], limits[g] - slots[g])
        slots[g] += gained
        rest_bytes -= gained * record_bytes[g]
