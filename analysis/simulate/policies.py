"""Simulates policies of published systems over the same steps. They only count rows.

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

import numpy as np
import numpy.typing as npt

from rowcast.analysis.progress import Tick
from rowcast.analysis.scan.steps import NEVER, NumberedRows, Scan
from rowcast.analysis.simulate.moves import Moves, new_moves
from rowcast.runtime.arrays import I32


class ResidentRows:
    """One group's cache: its resident rows and which of them were trained since their fill. Counts into one column of
    `Moves`."""

    def __init__(self, numbered: NumberedRows, num_slots: int, moves: Moves, group: int) -> None:
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

    def __init__(self, numbered: NumberedRows, num_slots: int, moves: Moves, group: int, horizon: int) -> None:
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
