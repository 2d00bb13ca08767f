"""Counts the rows that the planner of training moves over a scan, without tables, a trainer or bytes.

An untrained row is stored nowhere, so bringing it into a memory tier reads nothing. Once a step has trained it, it is
in memory or in the cold tier, as every trained row is home before it leaves memory.

Simulates policies of published systems over the same steps. They only count rows.

`window` (cDLRM)   Rows come in windows: when one begins, all missing rows that its steps need are fetched together, and
                   victims are chosen at random among the resident rows that the window does not need. A window is the
                   current step and the next `horizon` steps; if their rows do not fit every group's slots, as many of
                   these steps as do.
`ttl` (BagPipe)    A row stays while it is used again within the next `horizon` steps, and otherwise leaves with the
                   next step's plan. If the rows that stay leave too little room for a step, those needed last leave,
                   ties by oldest last use, then smallest key, as in look-ahead.

A row that leaves is written back if it was trained since its fill, as in the planner. Rows left at the end are flushed.

    steps           0 1 2 3 4 5 6 7
    a row's uses    x     x       x
    ttl, horizon 3  [- - - -]     [-   resident: after step 3 its next use is 4 steps away; it leaves with plan 4
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rowcast.analysis.scan import NEVER, NumberedUses, Scan
from rowcast.analysis.show import Tick
from rowcast.prefetcher.planner.group_planner import GroupMoves
from rowcast.prefetcher.planner.horizon import NeededRows
from rowcast.prefetcher.planner.planner import PlanMoves, RowPlanner, Slots
from rowcast.prefetcher.stores.store import ABSENT
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.protocol.batch import Lookups, Scheduled
from rowcast.protocol.plan import BarrierPlan
from rowcast.runtime.arrays import I32, I64

Watch = Callable[[Sequence[I64]], None]  # called with the rows of each group that a plan brings to the device
P = TypeVar("P")


@dataclass(frozen=True, kw_only=True, slots=True)
class TierMoves:
    entered: I64  # [P, G] rows that enter memory
    from_cold: I64  # [P, G] of these, from the cold tier; the others were never trained
    left: I64  # [P, G]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    fetched: I64  # [P, G]
    evicted: I64  # [P, G]
    written_back: I64  # [P, G] dirty victims
    flushed: I64  # [G] by barriers: those of checkpoints, and the one after the last step
    tier: TierMoves | None = None  # None: the store has no memory tier


def moves_of_all(ranks: Sequence[Moves]) -> Moves:
    names = ("fetched", "evicted", "written_back", "flushed")
    return Moves(**{name: np.sum([getattr(own, name) for own in ranks], axis=0) for name in names})


def new_moves(num_steps: int, num_groups: int) -> Moves:
    fetched, evicted, written_back = (np.zeros((num_steps, num_groups), np.int64) for _ in range(3))
    return Moves(fetched=fetched, evicted=evicted, written_back=written_back, flushed=np.zeros(num_groups, np.int64))


def bound_planner(scan: Scan, slots: Sequence[Slots]) -> RowPlanner:
    return RowPlanner(scan.groups, slots, depth=1, horizon=len(scan))


class CountedMoves:
    """Counts the moves of one planner, entry by entry."""

    def __init__(self, num_groups: int) -> None:
        self._moved: list[I64] = []  # [3, G] for each step: the rows that it fetches, evicts and writes back
        self._flushed = np.zeros(num_groups, np.int64)

    def note(self, entry: PlanMoves | BarrierPlan) -> None:
        if isinstance(entry, BarrierPlan):
            self._flushed += [len(keys) for keys in entry.dirty]
            return
        device, num_steps = entry.levels[0], len(entry.bundle.steps)
        moved = np.array([[len(own.fetch_keys), len(own.evict_keys), own.num_dirty] for own in device]).T
        self._moved += [moved, *[np.zeros_like(moved)] * (num_steps - 1)]  # all rows of a plan move in its first step

    def moves(self) -> Moves:
        moved = np.array(self._moved, np.int64).reshape(-1, 3, len(self._flushed))
        fetched, evicted, written_back = moved.transpose(1, 0, 2)
        return Moves(fetched=fetched, evicted=evicted, written_back=written_back, flushed=self._flushed)


def planned_moves(scan: Scan, planner: RowPlanner, tick: Tick, watch: Watch = lambda entered: None) -> Moves:
    """Counts the moves of a new planner. Calls `tick` for each step. Raises ConfigError if a step does not fit."""
    counted, memory = CountedMoves(len(scan.groups)), MemoryTier(scan) if len(planner.levels) > 1 else None
    for entry in entries(planner, ((step.scheduled, step.rows) for step in scan.steps), planner.move):
        counted.note(entry)
        if isinstance(entry, BarrierPlan):
            continue
        watch([group.fetch_keys for group in entry.levels[0]])
        if memory is not None:
            position = entry.bundle.first.step - scan.steps[0].scheduled.step
            memory.note(position, len(entry.bundle.steps), entry.levels[1])
        for _ in entry.bundle.steps:
            tick()
    return replace(counted.moves(), tier=None if memory is None else memory.moves)


class MemoryTier:
    """Counts what moves between the memory tier and the cold one. It takes memory only for rows that are touched."""

    def __init__(self, scan: Scan) -> None:
        entered, from_cold, left = (np.zeros((len(scan), len(scan.groups)), np.int64) for _ in range(3))
        self.moves = TierMoves(entered=entered, from_cold=from_cold, left=left)
        self._steps = scan.steps
        self._trained = [TouchedRows(group, sum(map(len, scan.keys(g)))) for g, group in enumerate(scan.groups)]

    def note(self, position: int, num_steps: int, tier: Sequence[GroupMoves]) -> None:
        """Applies a plan, and then what its steps train."""
        keys = [group.fetch_keys for group in tier]
        self.moves.entered[position] = list(map(len, keys))
        self.moves.from_cold[position] = [
            np.count_nonzero(trained.of(own) != ABSENT) for own, trained in zip(keys, self._trained, strict=True)
        ]
        self.moves.left[position] = [len(group.evict_keys) for group in tier]
        for step in self._steps[position : position + num_steps]:
            if step.trains:
                for trained, rows in zip(self._trained, step.rows, strict=True):
                    trained.added(rows.keys)


def entries(
    planner: RowPlanner,
    batches: Iterable[tuple[Scheduled[Lookups], tuple[NeededRows, ...] | None]],
    plan: Callable[[], P],
) -> Iterator[P | BarrierPlan]:
    """Yields all plans and barriers of a new planner in a run's order, the last barrier included.

    `batches`: each with its rows of each group, or None. `plan`: the planner's `plan` or `move`."""
    for scheduled, rows in batches:
        planner.add(scheduled, rows)
        yield from ready(planner, plan)
    yield from last_entries(planner, plan)


def ready(planner: RowPlanner, plan: Callable[[], P]) -> Iterator[P | BarrierPlan]:
    """Yields what can be planned without another batch."""
    while planner.ready():
        if planner.checkpoint_due:
            yield planner.barrier("checkpoint", finished=False)
        yield plan()


def last_entries(planner: RowPlanner, plan: Callable[[], P]) -> Iterator[P | BarrierPlan]:
    planner.end()
    yield from ready(planner, plan)
    yield planner.barrier("end of data", finished=True)


class ResidentRows:
    """One group's cache: its resident rows and which of them were trained since their fill. Counts into one column of
    `Moves`."""

    def __init__(self, numbered: NumberedUses, num_slots: int, moves: Moves, group: int) -> None:
        self.numbered = numbered
        self.num_slots = num_slots
        self.resident = np.zeros(numbered.num_rows, np.bool_)
        self.num_resident = 0
        self._dirty = np.zeros(numbered.num_rows, np.bool_)
        self._moves, self._group = moves, group

    def missing(self, rows: I32) -> I32:
        return rows[~self.resident[rows]]

    def fetch(self, position: int, rows: I32) -> None:
        """The rows are not resident, and there is room for them."""
        self.resident[rows] = True
        self.num_resident += len(rows)
        assert self.num_resident <= self.num_slots, f"{self.num_resident} resident rows in {self.num_slots} slots"
        self._moves.fetched[position, self._group] += len(rows)

    def evict(self, position: int, rows: I32) -> None:
        """The rows are resident."""
        self._moves.evicted[position, self._group] += len(rows)
        self._moves.written_back[position, self._group] += np.count_nonzero(self._dirty[rows])
        self.resident[rows] = self._dirty[rows] = False
        self.num_resident -= len(rows)

    def train(self, rows: I32) -> None:
        self._dirty[rows] = True

    def flush(self) -> None:
        self._moves.flushed[self._group] = np.count_nonzero(self._dirty)


def window_moves(scan: Scan, slots: tuple[int, ...], horizon: int, seed: int, tick: Tick) -> Moves:
    """The caller guarantees that every step fits the slots."""
    moves = new_moves(len(scan), len(slots))
    caches = [ResidentRows(rows, n, moves, g) for g, (rows, n) in enumerate(zip(scan.numbered, slots, strict=True))]
    random = np.random.default_rng(seed)
    begin = 0
    while begin < len(scan):
        end = min(window_end(cache, begin, min(begin + horizon + 1, len(scan))) for cache in caches)
        for cache in caches:
            bring_window(cache, begin, end, random)
        for position in range(begin, end):
            if scan.steps[position].trains:
                for cache in caches:
                    cache.train(cache.numbered.rows[position])
            tick()
        begin = end
    for cache in caches:
        cache.flush()
    return moves


def window_end(cache: ResidentRows, begin: int, latest: int) -> int:
    """The end of the longest window from `begin` whose rows fit the slots, at most `latest`."""
    needed = np.zeros(cache.numbered.num_rows, np.bool_)
    num_needed = 0
    for position in range(begin, latest):
        rows = cache.numbered.rows[position]
        num_needed += len(rows) - int(np.count_nonzero(needed[rows]))
        if num_needed > cache.num_slots:
            assert position > begin, f"{num_needed} rows of one step for {cache.num_slots} slots"
            return position
        needed[rows] = True
    return latest


def bring_window(cache: ResidentRows, begin: int, end: int, random: np.random.Generator) -> None:
    """Fetches what steps `begin` to `end` (exclusive) need. Victims are drawn from the other rows, by ascending key."""
    needed: npt.NDArray[np.bool_] = np.zeros(cache.numbered.num_rows, np.bool_)
    for position in range(begin, end):
        needed[cache.numbered.rows[position]] = True
    missing = np.flatnonzero(needed & ~cache.resident).astype(np.int32)
    num_victims = cache.num_resident + len(missing) - cache.num_slots
    if num_victims > 0:
        others = np.flatnonzero(cache.resident & ~needed).astype(np.int32)
        cache.evict(begin, random.choice(others, num_victims, replace=False, shuffle=False))
    cache.fetch(begin, missing)


def ttl_moves(scan: Scan, slots: tuple[int, ...], horizon: int, tick: Tick) -> Moves:
    """The caller guarantees that every step fits the slots."""
    moves = new_moves(len(scan), len(slots))
    caches = [
        ExpiringRows(rows, n, moves, g, horizon) for g, (rows, n) in enumerate(zip(scan.numbered, slots, strict=True))
    ]
    for position, step in enumerate(scan.steps):
        for cache in caches:
            cache.use(position, step.trains)
        tick()
    for cache in caches:
        cache.flush()
    return moves


class ExpiringRows(ResidentRows):
    """Keeps the rows of the last step, and earlier ones that are used again within the horizon of their last use."""

    def __init__(self, numbered: NumberedUses, num_slots: int, moves: Moves, group: int, horizon: int) -> None:
        super().__init__(numbered, num_slots, moves, group)
        self._horizon = horizon
        self._next_use = np.full(numbered.num_rows, NEVER, np.int32)
        self._last_use = np.zeros(numbered.num_rows, np.int32)
        self._num_waiting = np.zeros(len(numbered.rows), np.int64)  # by step: resident rows whose next use it is

    def use(self, position: int, train: bool) -> None:
        rows = self.numbered.rows[position]
        if position:
            used = self.numbered.rows[position - 1]
            self.evict(position, used[~self._stays(used, position - 1)])
        missing = self.missing(rows)
        self._make_room(position, len(missing))
        self.fetch(position, missing)
        self._next_use[rows] = self.numbered.next_uses[position]
        self._last_use[rows] = position
        staying = rows[self._stays(rows, position)]
        np.add.at(self._num_waiting, self._next_use[staying], 1)
        if train:
            self.train(rows)

    def _stays(self, used: I32, position: int) -> npt.NDArray[np.bool_]:
        """For each row of the step just planned: whether it is used again within the step's horizon."""
        return self._next_use[used] <= position + self._horizon

    def _make_room(self, position: int, num_missing: int) -> None:
        num_victims = self.num_resident + num_missing - self.num_slots
        # rows of earlier steps do not wait longer
        farthest = min(position + self._horizon, len(self.numbered.rows)) - 1
        for use in range(farthest, position, -1):
            if num_victims <= 0:
                return
            if self._num_waiting[use]:
                num_victims -= self._evict_waiting(position, use, num_victims)
        assert num_victims <= 0, f"{num_victims} victims are missing for step {position} in {self.num_slots} slots"

    def _evict_waiting(self, position: int, use: int, most: int) -> int:
        """Evicts up to `most` of the rows whose next use is step `use`; returns how many."""
        rows = self.numbered.rows[use]
        waiting = rows[self.resident[rows] & (self._next_use[rows] == use)]
        victims = waiting[np.argsort(self._last_use[waiting], kind="stable")[:most]]
        self.evict(position, victims)
        self._num_waiting[use] -= len(victims)
        return len(victims)
