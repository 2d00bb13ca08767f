"""Counts the rows that the planner of training moves over a recording, without tables, a trainer or bytes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rowcast.analysis.progress import Tick
from rowcast.analysis.simulate.grid import Setting
from rowcast.analysis.simulate.recording import RecordedStep, RunRecording
from rowcast.analysis.simulate.tier_moves import TierCounter, TierMoves
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.group_planner import GroupMoves
from rowcast.prefetcher.planner.job_planner import job_planner
from rowcast.prefetcher.planner.level import Slots
from rowcast.prefetcher.planner.planner import RowPlanner, StepMoves
from rowcast.prefetcher.readers.pin_files import load_pins
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import BarrierPlan
from rowcast.runtime.arrays import I64


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
    pin = setting.job.cache.pin
    pinned = None if pin is None else load_pins(Path(pin), groups)
    return job_planner(setting.job, groups, slots, first_batches, pinned=pinned)


def bound_planner(recording: RunRecording, slots: Sequence[Slots]) -> RowPlanner:
    return RowPlanner(recording.groups, slots, depth=1, horizon=len(recording))


def planned_moves(recording: RunRecording, planner: RowPlanner, tick: Tick) -> Moves:
    """Counts the moves of a new planner. Calls `tick` for each step. Raises ConfigError if a step does not fit."""
    moves = new_moves(len(recording), len(recording.groups))
    counter: TierCounter | None = None
    for entry in entries(recording.steps, planner):
        if isinstance(entry, BarrierPlan):
            moves.flushed[:] += [len(move) for move in entry.dirty]
            continue
        position = entry.step - recording.steps[0].scheduled.step
        note(moves, position, entry)
        for tier in entry.levels[1:]:
            counter = counter or tier_counter(recording)
            note_tier(counter, position, tier, recording.steps[position])
        tick()
    return replace(moves, tier=None if counter is None else counter.moves)


def tier_counter(recording: RunRecording) -> TierCounter:
    most = [sum(len(step.keys(g)) for step in recording.steps) for g in range(len(recording.groups))]
    return TierCounter(recording.groups, len(recording), most)


def note_tier(counter: TierCounter, position: int, tier: Sequence[GroupMoves], step: RecordedStep) -> list[I64]:
    """Returns the rows of each group that come from the cold tier."""
    from_cold = counter.note(position, tier)
    if step.trains:
        counter.train([grouping.keys for grouping in step.groupings])
    return from_cold


def entries(steps: Iterable[RecordedStep], planner: RowPlanner) -> Iterator[StepMoves | BarrierPlan]:
    """Yields all plans and barriers of a new planner for these steps, in order, the last barrier included."""

    def ready() -> Iterator[StepMoves | BarrierPlan]:
        while planner.ready():
            if planner.checkpoint_due:
                yield planner.barrier("checkpoint", finished=False)
            yield planner.move()

    for step in steps:
        planner.add(step.scheduled, step.groupings)
        yield from ready()
    planner.end()
    yield from ready()
    yield planner.barrier("end of data", finished=True)


def note(moves: Moves, position: int, moved: StepMoves) -> None:
    for index, group in enumerate(moved.levels[0]):
        moves.fetched[position, index] = len(group.fetch_keys)
        moves.evicted[position, index] = len(group.evict_keys)
        moves.written_back[position, index] = group.num_dirty
