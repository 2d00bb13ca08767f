"""Plans one group: its slots, its directory, its resident rows and their next uses."""

from dataclasses import dataclass

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.directory import (
    CELL_BYTES,
    MOST_ROWS,
    cells_for,
    forget_before,
    new_directory,
    with_room,
)
from rowcast.prefetcher.planner.eviction import EvictionPolicy, Residents, in_order, leave, new_victims
from rowcast.prefetcher.planner.grouping import sort_distinct
from rowcast.prefetcher.planner.horizon import (
    FLAG_BITS,
    NONE,
    Occurrences,
    Revived,
    close_gaps,
    enter,
    make_room,
    new_occurrences,
    occurrences_bytes,
    queue_revived,
    should_close,
    take_dirty,
    use_rows,
    with_steps,
)
from rowcast.protocol.plan import RowMove
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled_loop
from rowcast.runtime.errors import ConfigError

MOST_GAPS = 3  # in the line of idle rows, as a multiple of its rows
NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """Counts a group's slots after the last plan."""

    num_slots: int
    num_resident: int
    num_dirty: int

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_resident


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMoves:
    """A step's changes in a group's slots; fields as in `GroupPlan`."""

    unique_slots: I32
    fetch: RowMove
    evict: RowMove
    num_dirty: int
    fill_after: int | None
    last_evicted: int | None  # the last known step that evicted one of the fetched rows while dirty


class GroupPlanner:
    """Batches `enter` and are planned later, both in step order. An evicted row's slot is filled at once, so slots 0 to
    n - 1 are in use.

    pinned: ascending keys of rows that never leave once resident. capacity_key: the job's key that sets its slots.
    """

    def __init__(
        self,
        group: GroupSpec,
        num_slots: int,
        policy: EvictionPolicy,
        pinned: I64,
        capacity_key: str,
    ) -> None:
        self.group = group
        self.capacity_key = capacity_key
        self.num_slots = num_slots
        self.directory = new_directory()
        self._policy = policy
        self._pinned = pinned
        self.occurrences = new_occurrences(scored=policy.scored)
        self._first_step = 0  # the next step to be planned
        self._oldest = 0  # position where the line of idle rows starts
        self._head = 0  # position of the next batch to be planned
        self._tail = 0
        self._num_idle = 0
        self._num_resident = 0
        self._num_dirty = 0
        self.guessed = False  # the last plan evicted rows and kept others whose next use is also unknown

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(num_slots=self.num_slots, num_resident=self._num_resident, num_dirty=self._num_dirty)

    @property
    def positions(self) -> tuple[int, int, int]:
        """The positions of the oldest idle row, of the first known occurrence, and after the last one."""
        return self._oldest, self._head, self._tail

    @property
    def num_idle(self) -> int:
        return self._num_idle

    @property
    def nbytes(self) -> int:
        """Bytes of everything that grows with slots and horizon."""
        return self.occurrences.nbytes + self.directory.cells.nbytes

    def enter(self, keys: I64, step: int) -> int:
        """Adds a batch with these distinct ascending keys. Returns the slots it needs: its rows and the pinned ones.

        Raises ConfigError, with nothing changed, if that may be more rows than can be tracked.
        """
        num_tracked = int(self.directory.num_tracked[0])
        if num_tracked + len(keys) > MOST_ROWS:
            raise ConfigError(
                f"step {step} touches {len(keys)} distinct rows of group {self.group.name} while {num_tracked} are "
                f"tracked, of at most {MOST_ROWS}; lower {self.capacity_key}, lookahead.horizon or data.batch_size"
            )
        if self._head == self._tail:
            self._first_step = step
        oldest, head, tail = self.positions
        rows, scores, *_ = self.occurrences
        if head - oldest > (1 + MOST_GAPS) * self._num_idle + len(keys) or should_close(
            len(rows), oldest, head, self._num_idle, tail, len(keys)
        ):
            self._oldest = close_gaps(rows, scores, self.directory.cells, oldest, head)
        self.directory = with_room(self.directory, len(keys))
        self.occurrences = with_steps(self.occurrences, self._first_step, step)
        make_room(self.occurrences, self._oldest, head, tail, len(keys))
        revived = Revived(np.empty(len(keys), np.int64), np.empty(len(keys), np.int32))
        num_pinned, num_revived = enter(
            step, keys, head, tail, self._pinned, *self.directory, self.occurrences, revived
        )
        queue_revived(step, self.occurrences, revived)
        self._num_idle -= num_revived
        self._tail += len(keys)
        return len(keys) + self.num_pinned - num_pinned

    def move(self, num_unique: int, step: int, last_step: int, train: bool) -> GroupMoves:
        """Plans the oldest entered batch. `last_step` is the last one entered. The batch must fit the slots."""
        missing = np.empty(num_unique, np.int32)
        missing = missing[: find_missing(self.occurrences, self._head, num_unique, missing)]
        rows = Residents(
            self.occurrences, self._oldest, self._head, self._head + num_unique, self._tail, step, last_step
        )
        evict, num_dirty, fill_after = self._evict(max(0, len(missing) - self.occupancy.num_free), rows)
        self.guessed = len(evict) > 0 and self._num_idle > 0
        fetch, last_evicted = self._fetch(missing, evict)
        unique_slots = np.empty(num_unique, np.int32)
        num_dirtied, num_idle = use_rows(step, train, self._policy.per_use, self._head, self.occurrences, unique_slots)
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
        """Marks the dirty rows as clean and returns them by ascending key; they stay resident."""
        keys, slots = np.empty(self._num_dirty, np.int64), np.empty(self._num_dirty, np.int32)
        found = take_dirty(self.occurrences.rows, self._oldest, self._tail, keys, slots)
        assert found == self._num_dirty, f"{found} dirty rows, but {self._num_dirty} were counted"
        self._num_dirty = 0
        sort_distinct(keys, slots)
        return RowMove(keys=keys, slots=slots)

    def _evict(self, num_victims: int, rows: Residents) -> tuple[RowMove, int, int | None]:
        """Returns the victims, how many are dirty, and the last step that used one. Their slots must be filled."""
        evict = RowMove(keys=np.empty(num_victims, np.int64), slots=np.empty(num_victims, np.int32))
        if not num_victims:
            return evict, 0, None
        victims = new_victims(num_victims)
        chosen = self._policy.choose(rows, victims)
        assert chosen == num_victims, f"{chosen} rows can leave, but {num_victims} must"
        num_idle, self._oldest = leave(rows, victims.positions)
        forget_before(self._head, *self.directory, victims.keys, victims.positions)
        self._num_idle -= num_idle
        num_dirty = in_order(victims, evict.keys, evict.slots)
        self._num_dirty -= num_dirty
        return evict, num_dirty, int(victims.last_uses.max())

    def _fetch(self, missing: I32, evict: RowMove) -> tuple[RowMove, int]:
        """Gives missing rows the victims' slots in the victims' order, then free slots, lowest first."""
        num_resident = self._num_resident + len(missing) - len(evict)
        slots = np.concatenate([evict.slots, np.arange(self._num_resident, num_resident, dtype=np.int32)])
        self._num_resident = num_resident
        keys = np.empty(len(missing), np.int64)
        last_evicted = fill(self.occurrences, self._head, missing, slots, keys)
        first_scores, scores = self._policy.first_scores(keys), self.occurrences.scores
        if first_scores is not None:
            scores[(self._head + missing) % len(scores)] = first_scores
        return RowMove(keys=keys, slots=slots), last_evicted


def planner_bytes(num_slots: int, num_known: int, *, scored: bool = False) -> int:
    """Returns the host memory for planning a group with full slots. `num_known`: distinct rows of the known batches,
    each counted in every batch that touches it. `scored`: the policy has scores."""
    num_tracked = min(num_slots + num_known, MOST_ROWS)
    return occurrences_bytes(num_slots, num_known, scored=scored) + CELL_BYTES * cells_for(num_tracked)


@compiled_loop
def find_missing(occurrences: Occurrences, position: int, count: int, missing: I32) -> int:
    last = len(occurrences.rows) - 1
    found = 0
    for u in range(count):
        missing[found] = u
        found += occurrences.rows[(position + u) & last]["slot"] < 0
    return found


@compiled_loop
def fill(occurrences: Occurrences, position: int, missing: I32, slots: I32, keys: I64) -> int:
    """Gives the missing rows `slots` and fills `keys`. Returns the last known step that evicted one while dirty."""
    scores, last_evicted = occurrences.scores, NONE
    for i in range(len(missing)):
        row = occurrences.rows[(position + missing[i]) & (len(occurrences.rows) - 1)]
        last_evicted = max(last_evicted, row["use"] >> FLAG_BITS)
        row["slot"], scores[(position + missing[i]) & (len(scores) - 1)] = slots[i], 0
        keys[i] = row["key"]
    return last_evicted
