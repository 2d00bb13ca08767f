"""One group's part of the planner: its slots, its directory, its queues, and the future of its rows."""

from dataclasses import dataclass

import numpy as np

from prefetcher.compiled import compiled
from prefetcher.planner.directory import NONE, NUM_TRACKED, Records, check_directory, new_directory, resident_entries, with_room
from prefetcher.planner.eviction import Queues, check_queues, clear, drop_victims, new_queues, push, queue_of, sort_by_key, take_victims
from prefetcher.planner.grouping import I32, Grouper, bags_of, order_by_row
from prefetcher.planner.horizon import EnteredLookups, Occurrences, enter, new_occurrences, with_places
from protocol.batch import Batch
from protocol.plan import GroupPlan, RowMove
from protocol.tables import GroupSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """A group's slots after the last plan."""

    num_slots: int
    num_resident: int
    num_dirty: int

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_resident


class GroupPlanner:
    """Batches `enter`, then are planned, both in step order. An evicted row's slot is filled at once, so slots 0 to n - 1 are in use."""

    def __init__(self, group: GroupSpec, num_slots: int, horizon: int, num_features: int) -> None:
        self.group = group
        self.num_slots = num_slots
        self._grouper = Grouper(group, num_features)
        self._directory = new_directory()
        self._ring = new_occurrences()
        self._queues = new_queues(horizon)
        self._head = 0  # place of the next batch to be planned
        self._tail = 0
        self._num_resident = 0
        self._num_dirty = 0

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(num_slots=self.num_slots, num_resident=self._num_resident, num_dirty=self._num_dirty)

    def enter(self, batch: Batch, step: int) -> EnteredLookups:
        lookups = self._grouper.lookups(batch)
        grouping = self._grouper.group(lookups)
        num_unique = len(grouping.keys)
        self._directory = with_room(self._directory, num_unique)
        self._ring = with_places(self._ring, self._head, self._tail, num_unique)
        place, self._tail = self._tail, self._tail + num_unique
        enter(step, grouping.keys, self._directory, self._ring, self._head, place, self._queues)
        return EnteredLookups(
            place=place,
            num_unique=num_unique,
            inverse=grouping.inverse,
            segment_offsets=grouping.segment_offsets,
            offsets=lookups.offsets,
            weights=lookups.weights,
        )

    def plan(self, lookups: EnteredLookups, step: int, last_step: int, train: bool) -> GroupPlan:
        """Plans the oldest entered batch; `last_step` is the last one entered. The batch fits the slots: the caller made sure."""
        assert lookups.place == self._head, f"the batch at place {lookups.place} was planned where {self._head} is next"
        assert lookups.num_unique <= self.num_slots, f"{lookups.num_unique} distinct rows for {self.num_slots} slots"
        batch, missing = self._batch_entries(lookups)
        self._head += lookups.num_unique
        evict, num_dirty, fill_after = self._evict(max(0, len(missing) - self.occupancy.num_free), step, last_step)
        fetch = self._fetch(missing, evict)
        clear(self._queues, queue_of(self._queues, step))
        unique_slots = np.empty(lookups.num_unique, np.int32)
        self._num_dirty += use_rows(step, train, batch, lookups.place, self._ring, self._directory.entries, self._queues, unique_slots)
        slots, bag_order, lookup_order = arrange(lookups, unique_slots)
        return GroupPlan(
            slots=slots,
            unique_slots=unique_slots,
            segment_offsets=lookups.segment_offsets,
            bag_order=bag_order,
            lookup_order=lookup_order,
            offsets=lookups.offsets,
            weights=lookups.weights,
            fetch=fetch,
            evict=evict,
            num_dirty=num_dirty,
            fill_after=fill_after,
        )

    def clean(self) -> RowMove:
        """The dirty rows, by ascending key; they stay resident and are clean from now on."""
        entries = self._directory.entries
        resident = resident_entries(self._directory)
        dirty = resident[entries["dirty"][resident] == 1]
        assert len(dirty) == self._num_dirty, f"{len(dirty)} dirty rows, but {self._num_dirty} were counted"
        sort_by_key(entries, dirty)
        entries["dirty"][dirty] = 0
        self._num_dirty = 0
        return RowMove(keys=entries["key"][dirty], slots=entries["slot"][dirty])

    def check_integrity(self, known: list[tuple[int, EnteredLookups]]) -> None:
        """`known`: step and look-ups of every batch in the horizon. Raises AssertionError with both numbers."""
        entries, state = self._directory.entries, self._directory.state
        check_directory(self._directory, self.num_slots, self._num_resident)
        resident = resident_entries(self._directory)
        num_dirty = int(entries["dirty"][resident].sum())
        assert num_dirty == self._num_dirty, f"{num_dirty} dirty rows, but {self._num_dirty} were counted"
        next_use = self._next_uses(known)
        num_tracked = len(next_use.keys() | set(resident.tolist()))
        assert num_tracked == state[NUM_TRACKED], f"{state[NUM_TRACKED]} rows are tracked, but {num_tracked} are resident or in the horizon"
        expected = np.array([next_use.get(entry, NONE) for entry in resident.tolist()], np.int64)
        check_queues(self._queues, entries, resident, expected)

    def _next_uses(self, known: list[tuple[int, EnteredLookups]]) -> dict[int, int]:
        """Entry -> next use, from the horizon's batches alone; checks what the ring says about them on the way."""
        next_use: dict[int, int] = {}
        place = self._tail
        for step, lookups in reversed(known):
            place -= lookups.num_unique
            assert lookups.place == place, f"step {step} is at place {lookups.place} where {place} is left for it"
            for place_of_row in range(place, place + lookups.num_unique):
                cell = place_of_row % len(self._ring.entries)
                entry, said = int(self._ring.entries[cell]), int(self._ring.queues[cell])
                right = queue_of(self._queues, next_use.get(entry, NONE))
                assert said == right, f"after step {step} entry {entry} is to join queue {said}, but its next use is that of queue {right}"
                next_use[entry] = step
        assert place == self._head, f"the horizon begins at place {self._head}, its batches at {place}"
        return next_use

    def _batch_entries(self, lookups: EnteredLookups) -> tuple[I32, I32]:
        """The entries of the batch's distinct rows and of those that are not resident, both by ascending key."""
        batch = np.empty(lookups.num_unique, np.int32)
        missing = np.empty(lookups.num_unique, np.int32)
        num_missing = read_batch(self._ring, lookups.place, self._directory.entries, batch, missing)
        return batch, missing[:num_missing]

    def _evict(self, num_victims: int, step: int, last_step: int) -> tuple[RowMove, int, int | None]:
        """The victims, how many are dirty, and the last step that used one of them. Their slots are to be filled at once."""
        victims = np.empty(num_victims, np.int32)
        evict = RowMove(keys=np.empty(num_victims, np.int64), slots=np.empty(num_victims, np.int32))
        num_dirty = take_victims(self._queues, step, last_step, self._directory.entries, victims)
        last_use = drop_victims(self._directory, victims, self._head, evict.keys, evict.slots)
        self._num_dirty -= num_dirty
        return evict, num_dirty, last_use if num_victims else None

    def _fetch(self, missing: I32, evict: RowMove) -> RowMove:
        """Missing rows take the victims' slots in the victims' order, then free slots, lowest first."""
        num_resident = self._num_resident + len(missing) - len(evict)
        slots = np.concatenate([evict.slots, np.arange(self._num_resident, num_resident, dtype=np.int32)])
        self._num_resident = num_resident
        entries = self._directory.entries
        entries["slot"][missing] = slots
        return RowMove(keys=entries["key"][missing], slots=slots)


def arrange(lookups: EnteredLookups, unique_slots: I32) -> tuple[I32, I32, I32 | None]:
    """Slots by look-up; bags and, where weights are given, look-ups by row."""
    num_lookups = len(lookups.inverse)
    slots, order = np.empty(num_lookups, np.int32), np.empty(num_lookups, np.int32)
    order_by_row(lookups.inverse, lookups.segment_offsets, unique_slots, slots, order)
    bags = order
    if lookups.offsets is not None:
        bags = np.empty(num_lookups, np.int32)
        bags_of(order, lookups.offsets, bags)
    return slots, bags, None if lookups.weights is None else order


@compiled
def read_batch(ring: Occurrences, place: int, entries: Records, batch: I32, missing: I32) -> int:
    """Fills `batch` and `missing`; returns how many are missing."""
    last = len(ring.entries) - 1
    num_missing = 0
    for u in range(len(batch)):
        entry = ring.entries[(place + u) & last]
        batch[u] = entry
        if entries[entry]["slot"] == NONE:
            missing[num_missing] = entry
            num_missing += 1
    return num_missing


@compiled
def use_rows(step: int, train: bool, batch: I32, place: int, ring: Occurrences, entries: Records, queues: Queues, unique_slots: I32) -> int:
    """Puts the batch's rows, all resident now, into the queues of their next uses; returns how many became dirty."""
    last = len(ring.entries) - 1
    num_dirtied = 0
    for u in range(len(batch)):
        entry = batch[u]
        unique_slots[u] = entries[entry]["slot"]
        entries[entry]["last_use"] = step
        if train and not entries[entry]["dirty"]:
            entries[entry]["dirty"] = 1
            num_dirtied += 1
        push(queues, ring.queues[(place + u) & last], entries, entry)
    return num_dirtied
