"""Counts the rows that the planner of training moves over a scan, without tables, a trainer or bytes.

An untrained row is stored nowhere, so bringing it into a memory tier reads nothing. Once a step has trained it, it is
in memory or in the cold tier, as every trained row is home before it leaves memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rowcast.analysis.progress import Tick
from rowcast.analysis.scan.steps import Scan, ScannedStep
from rowcast.analysis.simulate.grid import Setting
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.group_planner import GroupMoves
from rowcast.prefetcher.planner.planner import PlanMoves, RowPlanner, Slots, job_planner
from rowcast.prefetcher.stores.store import ABSENT
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import BarrierPlan
from rowcast.runtime.arrays import I64

# called with each step's position, and the rows of each group that come to the device and to memory
Watch = Callable[[int, Sequence[Sequence[I64]]], None]


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


def new_moves(num_steps: int, num_groups: int) -> Moves:
    fetched, evicted, written_back = (np.zeros((num_steps, num_groups), np.int64) for _ in range(3))
    return Moves(fetched=fetched, evicted=evicted, written_back=written_back, flushed=np.zeros(num_groups, np.int64))


def new_planner(
    setting: Setting,
    groups: tuple[GroupSpec, ...],
    slots: Sequence[Slots],
    first_batches: Sequence[ScheduledBatch],
) -> RowPlanner:
    return job_planner(setting.job, groups, slots, first_batches)


def bound_planner(scan: Scan, slots: Sequence[Slots]) -> RowPlanner:
    return RowPlanner(scan.groups, slots, depth=1, horizon=len(scan))


def planned_moves(scan: Scan, planner: RowPlanner, tick: Tick, watch: Watch = lambda position, entered: None) -> Moves:
    """Counts the moves of a new planner. Calls `tick` for each step. Raises ConfigError if a step does not fit."""
    moves = new_moves(len(scan), len(scan.groups))
    memory: MemoryTier | None = None
    for entry in entries(scan.steps, planner):
        if isinstance(entry, BarrierPlan):
            moves.flushed[:] += [len(move) for move in entry.dirty]
            continue
        position, device = entry.bundle.first.step - scan.steps[0].scheduled.step, entry.levels[0]
        moves.fetched[position] = [len(group.fetch_keys) for group in device]
        moves.evicted[position] = [len(group.evict_keys) for group in device]
        moves.written_back[position] = [group.num_dirty for group in device]
        entered = [[group.fetch_keys for group in device]]
        for tier in entry.levels[1:]:
            memory = memory or MemoryTier(scan)
            entered.append(memory.note(position, len(entry.bundle.steps), tier))
        watch(position, entered)
        for _ in entry.bundle.steps:
            tick()
    return replace(moves, tier=None if memory is None else memory.moves)


class MemoryTier:
    """Counts what moves between the memory tier and the cold one. It takes memory only for rows that are touched."""

    def __init__(self, scan: Scan) -> None:
        entered, from_cold, left = (np.zeros((len(scan), len(scan.groups)), np.int64) for _ in range(3))
        self.moves = TierMoves(entered=entered, from_cold=from_cold, left=left)
        self._steps = scan.steps
        self._trained = [TouchedRows(group, sum(map(len, scan.keys(g)))) for g, group in enumerate(scan.groups)]

    def note(self, position: int, num_steps: int, tier: Sequence[GroupMoves]) -> list[I64]:
        """Applies a plan, and then what its steps train. Returns the rows of each group from the cold tier."""
        keys = [group.fetch_keys for group in tier]
        came = [own[trained.of(own) != ABSENT] for own, trained in zip(keys, self._trained, strict=True)]
        self.moves.entered[position] = list(map(len, keys))
        self.moves.from_cold[position] = list(map(len, came))
        self.moves.left[position] = [len(group.evict_keys) for group in tier]
        for step in self._steps[position : position + num_steps]:
            if step.trains:
                for trained, rows in zip(self._trained, step.rows, strict=True):
                    trained.added(rows.keys)
        return came


def entries(steps: Iterable[ScannedStep], planner: RowPlanner) -> Iterator[PlanMoves | BarrierPlan]:
    """Yields all plans and barriers of a new planner for these steps, in order, the last barrier included."""

    def ready() -> Iterator[PlanMoves | BarrierPlan]:
        while planner.ready():
            if planner.checkpoint_due:
                yield planner.barrier("checkpoint", finished=False)
            yield planner.move()

    for step in steps:
        planner.add(step.scheduled, step.rows)
        yield from ready()
    planner.end()
    yield from ready()
    yield planner.barrier("end of data", finished=True)
