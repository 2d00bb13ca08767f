"""Counts the rows that the planner of training moves over a scan, without tables, a trainer or bytes.

An untrained row is stored nowhere, so bringing it into a memory tier reads nothing. Once a step has trained it, it is
in memory or in the cold tier, as every trained row is home before it leaves memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from rowcast.analysis.scan import Scan
from rowcast.analysis.show import Tick
from rowcast.prefetcher.planner.group_planner import GroupMoves
from rowcast.prefetcher.planner.horizon import NeededRows
from rowcast.prefetcher.planner.planner import PlanMoves, RowPlanner, Slots
from rowcast.prefetcher.stores.store import ABSENT
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.protocol.batch import Lookups, Scheduled
from rowcast.protocol.plan import BarrierPlan
from rowcast.runtime.arrays import I64

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
