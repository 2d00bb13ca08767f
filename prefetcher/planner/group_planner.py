"""Plans one group: its slots, its directory, its resident rows and their next uses.

A large group has several *parts*, each a range of keys with its own directory and its own queues, so that several
threads plan it. A row's occurrences all belong to one part, so no thread writes what another one reads:

    keys        0 ... a             | a ... b             | b ... 2^63
    directory   cells               | cells               | cells
    batch p     3 4 8               | 20 21               | 40 44        positions of one ring (horizon.py)
    queue       in the part's own positions of the batch

Each plan takes turns: all parts find their missing rows; one thread chooses the victims by the line of idle rows and
the lengths of the queues; all parts remove theirs; one thread joins them; all parts fill and use their rows. The plans
are the same for any number of parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.directory import (
    CELL_BYTES,
    MOST_ROWS,
    Directory,
    forget_before,
    most_cells,
    new_directory,
    with_room,
)
from rowcast.prefetcher.planner.eviction import (
    EvictionPolicy,
    FarthestNextUse,
    Left,
    Residents,
    in_order,
    leave,
    new_victims,
    oldest_idle,
    take_queued,
)
from rowcast.prefetcher.planner.grouping import sort_distinct
from rowcast.prefetcher.planner.horizon import (
    FLAG_BITS,
    NONE,
    Occurrences,
    Revived,
    close_gaps,
    correct_cells,
    enter,
    make_room,
    new_occurrences,
    occurrences_bytes,
    queue_revived,
    should_close,
    take_dirty,
    use_rows,
    with_own_queues,
    with_steps,
)
from rowcast.protocol.plan import RowMove
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled_loop
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.stages import ThreadPool

MOST_GAPS = 3  # in the line of idle rows, as a multiple of its rows
ROWS_A_PART = 16_384  # distinct rows of a batch, at least: with fewer, waking threads takes longer than they save
ARRAYS = ("cells", "tracked", "rows", "scores", "next_in", "queued", "first", "heads", "tails")
NUMBERS = (
    *("num_slots", "num_idle", "num_resident", "num_dirty"),
    "first_step",  # the next step to be planned
    *("oldest", "head", "tail"),  # positions: where the line of idle rows starts, the next batch's, and the end
    "guessed",  # the last plan evicted rows and kept others whose next use is also unknown
    "is_whole",  # it has one part and looks ahead, so the loops over all groups plan it
    *(name for array in ARRAYS for name in (array, f"num_{array}")),  # addresses and lengths of that part's arrays
)
GROUP_STATE = np.dtype([(name, np.int64) for name in NUMBERS])
ALL_KEYS = np.array([0, np.iinfo(np.int64).max])
NO_ROWS = np.zeros(0, np.int64)
NO_SLOTS = np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """Counts a group's slots after the last plan."""

    num_slots: int
    num_resident: int
    num_dirty: int

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_resident


@dataclass(kw_only=True, slots=True)  # frozen, it would take twice as long to make: one a group and step
class GroupMoves:
    """A step's changes in a group's slots; fields as in `GroupPlan`."""

    unique_slots: I32
    fetch_slots: I32
    fetch_keys: I64
    evict_keys: I64
    num_dirty: int
    fill_after: int | None
    last_evicted: int | None  # the last known step that evicted one of the fetched rows while dirty


def plan_fields(moves: Sequence[GroupMoves]) -> dict[str, Any]:
    """Returns the fields of `GroupPlan` that fill and empty slots. `moves`: of each level, from the device down."""
    device, *below = moves
    return {
        "fetch_slots": device.fetch_slots,
        "fetch_keys": device.fetch_keys,
        "evict_keys": device.evict_keys,
        "num_dirty": device.num_dirty,
        "fill_after": device.fill_after,
        "load_keys": below[0].fetch_keys if below else NO_ROWS,
        "spill_keys": below[0].evict_keys if below else NO_ROWS,
    }


@dataclass(slots=True)
class GroupPart:
    """A range of keys."""

    number: int
    directory: Directory
    occurrences: Occurrences  # the group's, with the part's queues


class LeftInOrder(NamedTuple):
    """The rows that left a part, dirty ones first, each by ascending key."""

    keys: I64
    slots: I32
    num_dirty: int
    num_idle: int
    last_use: int  # NONE if nothing left


class GroupPlanner:
    """Batches `enter` and are planned later, both in step order. An evicted row's slot is filled at once, so slots 0 to
    n - 1 are in use.

    capacity_key: the job's key that sets its slots. pool: its threads share a large group's parts; they change no plan.
    """

    def __init__(
        self,
        group: GroupSpec,
        num_slots: int,
        policy: EvictionPolicy,
        capacity_key: str,
        pool: ThreadPool,
    ) -> None:
        self.group = group
        self.capacity_key = capacity_key
        self.num_slots = num_slots
        self.state = np.zeros(1, GROUP_STATE)[0]  # a view of all groups' once a level has them
        self.state["num_slots"] = num_slots
        self._pool = pool
        self._policy = policy
        self.bounds = ALL_KEYS  # part k's keys are from bounds[k] to below bounds[k + 1]
        self.parts = [GroupPart(0, new_directory(), new_occurrences(scored=policy.scored))]

    @property
    def occupancy(self) -> Occupancy:
        state = self.state
        return Occupancy(
            num_slots=self.num_slots, num_resident=int(state["num_resident"]), num_dirty=int(state["num_dirty"])
        )

    @property
    def num_free(self) -> int:
        return self.num_slots - int(self.state["num_resident"])

    @property
    def positions(self) -> tuple[int, int, int]:
        """The positions of the oldest idle row, of the first known occurrence, and after the last one."""
        return int(self.state["oldest"]), int(self.state["head"]), int(self.state["tail"])

    @property
    def num_idle(self) -> int:
        return int(self.state["num_idle"])

    @property
    def guessed(self) -> bool:
        return bool(self.state["guessed"])

    @property
    def nbytes(self) -> int:
        """Returns the bytes of everything that grows with slots and horizon."""
        of_parts = sum(part.directory.cells.nbytes + part.occurrences.queue_bytes for part in self.parts)
        return of_parts + self.occurrences.nbytes - self.occurrences.queue_bytes

    @property
    def occurrences(self) -> Occurrences:
        """The ring, with the first part's queues."""
        return self.parts[0].occurrences

    @property
    def num_tracked(self) -> int:
        return sum(int(part.directory.num_tracked[0]) for part in self.parts)

    def enter(self, keys: I64, step: int) -> None:
        """Adds a batch with these distinct ascending keys.

        Raises ConfigError, with nothing changed, if that may be more rows than can be tracked.
        """
        self.prepare(keys, step)
        head, tail = self.positions[1:]
        cuts = [0, *np.searchsorted(keys, self.bounds[1:-1]).tolist(), len(keys)]

        def enter_part(part: GroupPart) -> int:
            first = cuts[part.number]
            part_keys = keys[first : cuts[part.number + 1]]
            revived = Revived(np.empty(len(part_keys), np.int64), np.empty(len(part_keys), np.int32))
            num_revived = enter(step, part_keys, head, tail + first, *part.directory, part.occurrences, revived)
            queue_revived(step, part.occurrences, revived)
            return num_revived

        self.state["num_idle"] -= sum(self._pool.over(self.parts, enter_part))
        self.state["tail"] += len(keys)

    def prepare(self, keys: I64, step: int) -> None:
        """Makes room for this batch. Raises ConfigError as `enter`."""
        num_tracked = self.num_tracked
        if num_tracked + len(keys) > MOST_ROWS:
            raise ConfigError(
                f"step {step} touches {len(keys)} distinct rows of group {self.group.name} while {num_tracked} are "
                f"tracked, of at most {MOST_ROWS}; lower {self.capacity_key}, lookahead.horizon or data.batch_size"
            )
        if self.state["head"] == self.state["tail"]:
            self.state["first_step"] = step
        if self.state["tail"] == 0:
            self._divide(keys)
        oldest, head, tail = self.positions
        if head - oldest > (1 + MOST_GAPS) * self.state["num_idle"] + len(keys) or should_close(
            len(self.occurrences.rows), oldest, head, self.state["num_idle"], tail, len(keys)
        ):
            self._close_gaps()
        for part in self.parts:
            part.occurrences = with_steps(part.occurrences, int(self.state["first_step"]), step)
        make_room(self.occurrences, self.positions[0], head, tail, len(keys))
        cuts = [0, *np.searchsorted(keys, self.bounds[1:-1]).tolist(), len(keys)]
        for part, (first, end) in zip(self.parts, pairwise(cuts), strict=True):
            part.directory = with_room(part.directory, end - first)
        whole, *others = self.parts
        self.state["is_whole"] = not others and isinstance(self._policy, FarthestNextUse)
        if self.state["is_whole"]:
            arrays: tuple[npt.NDArray[Any], ...] = (*whole.directory, *whole.occurrences)
            for name, array in zip(ARRAYS, arrays, strict=True):
                self.state[name], self.state[f"num_{name}"] = array.ctypes.data, len(array)

    def _divide(self, keys: I64) -> None:
        """Makes the parts, before any row is tracked, with equally many of the first batch's rows."""
        count = num_parts(len(keys), self._pool.num_threads)
        cuts = [keys[len(keys) * k // count] for k in range(1, count)]
        self.bounds = np.array([ALL_KEYS[0], *cuts, ALL_KEYS[1]])
        whole = self.parts[0]
        others = [GroupPart(k, new_directory(), with_own_queues(whole.occurrences)) for k in range(1, count)]
        self.parts = [whole, *others]

    def _close_gaps(self) -> None:
        rows, scores, *_ = self.occurrences

        def correct(part: GroupPart) -> None:
            bounds = self.bounds[part.number : part.number + 2]
            correct_cells(rows, part.directory.cells, self.state["oldest"], self.state["head"], *bounds)

        self._pool.over(self.parts, correct)
        self.state["oldest"] = close_gaps(rows, scores, self.state["oldest"], self.state["head"])

    def move(self, num_unique: int, step: int, last_step: int, train: bool) -> GroupMoves:
        """Plans the oldest entered batch. `last_step` is the last one entered. The batch must fit the slots."""
        oldest, head, _ = self.positions
        cuts = [*(int(part.occurrences.first[step % len(part.occurrences.first)]) - head for part in self.parts)]
        cuts.append(num_unique)

        def find_part(part: GroupPart) -> I32:
            first, end = cuts[part.number : part.number + 2]
            missing = np.empty(end - first, np.int32)
            return missing[: find_missing(part.occurrences, head + first, end - first, missing)]

        missing = self._pool.over(self.parts, find_part)
        starts = [0, *accumulate(map(len, missing))]
        num_victims = max(0, starts[-1] - self.occupancy.num_free)
        residents = [Residents(part.occurrences, oldest, head, step, last_step) for part in self.parts]
        evict_keys, evict_slots, num_dirty, fill_after = self._evict(num_victims, residents)
        self.state["guessed"] = num_victims > 0 and self.state["num_idle"] > 0
        num_resident = self.state["num_resident"] + starts[-1] - num_victims
        # the victims' slots in the victims' order, then free slots, lowest first
        fetch_slots = np.concatenate([evict_slots, np.arange(self.state["num_resident"], num_resident, dtype=np.int32)])
        self.state["num_resident"] = num_resident
        fetch_keys = np.empty(starts[-1], np.int64)
        unique_slots = np.empty(num_unique, np.int32)

        def use_part(part: GroupPart) -> tuple[int, int, int]:
            first, end = cuts[part.number : part.number + 2]
            part_rows = slice(*starts[part.number : part.number + 2])
            position, rows = head + first, part.occurrences
            last_evicted = fill(rows, position, missing[part.number], fetch_slots[part_rows], fetch_keys[part_rows])
            first_scores = self._policy.first_scores(fetch_keys[part_rows])
            if first_scores is not None:
                rows.scores[(position + missing[part.number]) % len(rows.scores)] = first_scores
            return last_evicted, *use_rows(step, train, self._policy.per_use, position, rows, unique_slots[first:end])

        last_evicted, num_dirtied, num_idle = zip(*self._pool.over(self.parts, use_part), strict=True)
        self.state["num_dirty"] += sum(num_dirtied)
        self.state["num_idle"] += sum(num_idle)
        self.state["head"] += num_unique
        self.state["first_step"] = step + 1
        return GroupMoves(
            unique_slots=unique_slots,
            fetch_slots=fetch_slots,
            fetch_keys=fetch_keys,
            evict_keys=evict_keys,
            num_dirty=num_dirty,
            fill_after=fill_after,
            last_evicted=None if max(last_evicted) == NONE else max(last_evicted),
        )

    def clean(self) -> RowMove:
        """Marks the dirty rows as clean and returns them by ascending key; they stay resident."""
        keys, slots = np.empty(self.state["num_dirty"], np.int64), np.empty(self.state["num_dirty"], np.int32)
        num_dirty = take_dirty(self.occurrences.rows, self.state["oldest"], self.state["tail"], keys, slots)
        assert num_dirty == len(keys), f"{num_dirty} dirty rows, but {len(keys)} were counted"
        self.state["num_dirty"] = 0
        sort_distinct(keys, slots)
        return RowMove(keys=keys, slots=slots)

    def _evict(self, num_victims: int, residents: Sequence[Residents]) -> tuple[I64, I32, int, int | None]:
        """Returns the victims and their slots, which must be filled, how many are dirty, and the last step that used
        one."""
        if not num_victims:
            return NO_ROWS, NO_SLOTS, 0, None
        victims = new_victims(self.bounds, num_victims)
        choice = self._policy.choose(residents, victims, num_victims)
        chosen = int(victims.counts.sum() + choice.queued.sum())
        assert chosen == num_victims, f"{chosen} rows can leave, but {num_victims} must"

        def leave_part(part: GroupPart) -> LeftInOrder:
            k, rows = part.number, residents[part.number]
            count = take_queued(rows, choice.queued[k], victims.positions[k], victims.counts[k])
            positions = victims.positions[k, :count]
            left = Left(np.empty(count, np.int64), *(np.empty(count, np.int32) for _ in range(3)))
            num_idle = leave(rows, positions, left)
            forget_before(self.state["head"], *part.directory, left.keys, positions)
            keys, slots = np.empty(count, np.int64), np.empty(count, np.int32)
            num_dirty = in_order(left, keys, slots)
            return LeftInOrder(keys, slots, num_dirty, num_idle, int(left.last_uses.max(initial=NONE)))

        left = self._pool.over(self.parts, leave_part)
        self.state["oldest"] = oldest_idle(residents[0], choice.oldest)
        self.state["num_idle"] -= sum(part.num_idle for part in left)
        num_dirty = sum(part.num_dirty for part in left)
        self.state["num_dirty"] -= num_dirty
        keys = [part.keys[: part.num_dirty] for part in left] + [part.keys[part.num_dirty :] for part in left]
        slots = [part.slots[: part.num_dirty] for part in left] + [part.slots[part.num_dirty :] for part in left]
        return np.concatenate(keys), np.concatenate(slots), num_dirty, max(part.last_use for part in left)


def num_parts(num_rows: int, num_threads: int) -> int:
    """Returns the parts of a group with this many distinct rows in a batch."""
    return max(1, min(num_threads, num_rows // ROWS_A_PART))


def planner_bytes(num_slots: int, num_known: int, num_parts: int, *, scored: bool = False) -> int:
    """Returns the most host memory for planning a group with full slots. `num_known`: distinct rows of the known
    batches, each counted in every batch that touches it. `scored`: the policy has scores."""
    num_tracked = min(num_slots + num_known, MOST_ROWS)
    return occurrences_bytes(num_slots, num_known, scored=scored) + CELL_BYTES * most_cells(num_tracked, num_parts)


@compiled_loop
def find_missing(occurrences: Occurrences, position: int, count: int, missing: I32) -> int:
    last = len(occurrences.rows) - 1
    num_missing = 0
    for u in range(count):
        missing[num_missing] = u
        num_missing += occurrences.rows[(position + u) & last]["slot"] < 0
    return num_missing


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
