"""One group's part of the planner: its slots, its directory, its rows, and their future."""

from dataclasses import dataclass

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.directory import forget_before, new_directory, with_room
from rowcast.prefetcher.planner.eviction import EvictionPolicy, Residents, in_order, leave, new_victims
from rowcast.prefetcher.planner.grouping import sort_pairs
from rowcast.prefetcher.planner.horizon import (
    DIRTY,
    NONE,
    Occurrences,
    Woken,
    close_gaps,
    enter,
    new_ring,
    queue_woken,
    use_rows,
    with_places,
    with_steps,
)
from rowcast.protocol.plan import RowMove
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled_loop

MOST_GAPS = 3  # in the line of idle rows, times the rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """A group's slots after the last plan."""

    num_slots: int
    num_resident: int
    num_dirty: int

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_resident


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMoves:
    """What a step changes in a group's slots; the fields are those of `GroupPlan`."""

    unique_slots: I32
    fetch: RowMove
    evict: RowMove
    num_dirty: int
    fill_after: int | None
    last_evicted: int | None  # the last step, as far as is known, that evicted one of the fetched rows dirty


class GroupPlanner:
    """Batches `enter`, then are planned, both in step order. An evicted row's slot is filled at once, so slots 0 to n - 1 are in use.

    pinned: keys that never leave once they are there, ascending.
    """

    def __init__(self, group: GroupSpec, num_slots: int, policy: EvictionPolicy, pinned: I64) -> None:
        self.group = group
        self.num_slots = num_slots
        self.directory = new_directory()
        self._policy = policy
        self._pinned = pinned
        self.ring = new_ring()
        self._first_step = 0  # the next one to be planned
        self._oldest = 0  # place where the line of idle rows begins
        self._head = 0  # place of the next batch to be planned
        self._tail = 0
        self._num_idle = 0
        self._num_resident = 0
        self._num_dirty = 0
        self.guessed = False  # the last plan evicted rows and kept others whose next use is as unknown

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(num_slots=self.num_slots, num_resident=self._num_resident, num_dirty=self._num_dirty)

    @property
    def places(self) -> tuple[int, int, int]:
        """Where the line of idle rows begins, of the first known occurrence, after the last one."""
        return self._oldest, self._head, self._tail

    @property
    def num_idle(self) -> int:
        return self._num_idle

    def enter(self, keys: I64, step: int) -> int:
        """A batch with these distinct rows, ascending. Returns the slots that it needs: its rows and the pinned ones."""
        if self._head == self._tail:
            self._first_step = step
        if self._head - self._oldest > (1 + MOST_GAPS) * self._num_idle + len(keys):
            self._oldest = close_gaps(self.ring.rows, self.directory.cells, self._oldest, self._head)
        self.directory = with_room(self.directory, len(keys))
        self.ring = with_places(with_steps(self.ring, self._first_step, step), self._oldest, self._tail, len(keys))
        woken = Woken(np.empty(len(keys), np.int64), np.empty(len(keys), np.int32))
        num_pinned, num_woken = enter(
            step, keys, self._head, self._tail, self._pinned, *self.directory, self.ring, woken
        )
        queue_woken(step, self.ring, woken)
        self._num_idle -= num_woken
        self._tail += len(keys)
        return len(keys) + self.num_pinned - num_pinned

    def move(self, num_unique: int, step: int, last_step: int, train: bool) -> GroupMoves:
        """Plans the oldest entered batch; `last_step` is the last one entered. The batch fits the slots: the caller made sure."""
        missing = np.empty(num_unique, np.int32)
        missing = missing[: find_missing(self.ring, self._head, num_unique, missing)]
        rows = Residents(self.ring, self._oldest, self._head, self._head + num_unique, self._tail, step, last_step)
        evict, num_dirty, fill_after = self._evict(max(0, len(missing) - self.occupancy.num_free), rows)
        self.guessed = len(evict) > 0 and self._num_idle > 0
        fetch, last_evicted = self._fetch(missing, evict)
        unique_slots = np.empty(num_unique, np.int32)
        num_dirtied, num_idle = use_rows(step, train, self._policy.per_use, self._head, self.ring, unique_slots)
        self._num_dirty += num_dirtied
        self._num_idle += num_idle
        self._head += num_unique
        self._first_step = step + 1
        return GroupMoves(
            unique_slots=unique_slots,
            fetch=fetch,
            evict=evict,
            num_dirty=num_dirty,
            fill_after=fill_after,
            last_evicted=None if last_evicted == NONE else last_evicted,
        )

    def clean(self) -> RowMove:
        """The dirty rows, by ascending key; they stay resident and are clean from now on."""
        rows = self.ring.rows[np.arange(self._oldest, self._tail) % len(self.ring.rows)]
        dirty = rows[(rows["slot"] != NONE) & (rows["flags"] & DIRTY != 0)]
        keys, slots = dirty["key"].copy(), dirty["slot"].copy()
        assert len(keys) == self._num_dirty, f"{len(keys)} dirty rows, but {self._num_dirty} were counted"
        self.ring.rows["flags"] &= ~DIRTY
        self._num_dirty = 0
        sort_pairs(keys, slots)
        return RowMove(keys=keys, slots=slots)

    def _evict(self, num_victims: int, rows: Residents) -> tuple[RowMove, int, int | None]:
        """The victims, how many are dirty, and the last step that used one of them. Their slots are to be filled at once."""
        evict = RowMove(keys=np.empty(num_victims, np.int64), slots=np.empty(num_victims, np.int32))
        if not num_victims:
            return evict, 0, None
        victims = new_victims(num_victims)
        chosen = self._policy.choose(rows, victims)
        assert chosen == num_victims, f"{chosen} rows could leave where {num_victims} have to"
        num_idle, self._oldest = leave(rows, victims.places)
        forget_before(self._head, *self.directory, victims.keys, victims.places)
        self._num_idle -= num_idle
        num_dirty = in_order(victims, evict.keys, evict.slots)
        self._num_dirty -= num_dirty
        return evict, num_dirty, int(victims.last_uses.max())

    def _fetch(self, missing: I32, evict: RowMove) -> tuple[RowMove, int]:
        """Missing rows take the victims' slots in the victims' order, then free slots, lowest first."""
        num_resident = self._num_resident + len(missing) - len(evict)
        slots = np.concatenate([evict.slots, np.arange(self._num_resident, num_resident, dtype=np.int32)])
        self._num_resident = num_resident
        keys = np.empty(len(missing), np.int64)
        last_evicted = fill(self.ring, self._head, missing, slots, keys)
        scores = self._policy.first_scores(keys)
        if scores is not None:
            self.ring.rows["score"][(self._head + missing) % len(self.ring.rows)] = scores
        return RowMove(keys=keys, slots=slots), last_evicted


@compiled_loop
def find_missing(ring: Occurrences, place: int, count: int, missing: I32) -> int:
    """Fills `missing` with the rows of a batch that are not resident, counted from its first; returns how many."""
    last = len(ring.rows) - 1
    found = 0
    for u in range(count):
        missing[found] = u
        found += ring.rows[(place + u) & last]["slot"] == NONE
    return found


@compiled_loop
def fill(ring: Occurrences, place: int, missing: I32, slots: I32, keys: I64) -> int:
    """The missing rows get `slots`; fills their `keys`, and returns the last step that is known to have evicted one of them dirty."""
    last_evicted = NONE
    for i in range(len(missing)):
        row = ring.rows[(place + missing[i]) & (len(ring.rows) - 1)]
        last_evicted = max(last_evicted, row["last_use"])
        row["slot"], row["score"] = slots[i], 0
        keys[i] = row["key"]
    return last_evicted
