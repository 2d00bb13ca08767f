"""What the planner moves over a recording: the same planner as in training, without tables, trainer or bytes.

A recorded step is given to it as a batch of one sample that looks up each distinct row once; the planner moves the same rows for it as
for the batch itself, since a row's duplicates move nothing.
"""

from dataclasses import dataclass

import numpy as np

from prefetcher.analysis.grid import BOUND, Setting
from prefetcher.analysis.progress import Tick
from prefetcher.analysis.recording import RecordedStep, Recording
from prefetcher.planner.grouping import I64
from prefetcher.planner.planner import RowPlanner
from protocol.batch import Batch, ScheduledBatch
from protocol.errors import ConfigError
from protocol.plan import StepPlan
from protocol.tables import KEY_SHIFT, ROW_MASK, GroupSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """Rows that moved, by step and group."""

    fetched: I64  # [P, G]
    evicted: I64  # [P, G]
    written_back: I64  # [P, G] dirty victims
    flushed: I64  # [G] by the barrier behind the last step


def new_moves(num_steps: int, num_groups: int) -> Moves:
    fetched, evicted, written_back = (np.zeros((num_steps, num_groups), np.int64) for _ in range(3))
    return Moves(fetched=fetched, evicted=evicted, written_back=written_back, flushed=np.zeros(num_groups, np.int64))


def new_planner(setting: Setting, groups: tuple[GroupSpec, ...], slots: tuple[int, ...], num_steps: int = 0) -> RowPlanner:
    """As a run of the setting has it; for the bound, which no run can have, one that knows all of `num_steps` at once."""
    depth = setting.job.lookahead.depth
    if setting.policy == BOUND:
        return RowPlanner(groups, slots, depth, num_steps)
    if setting.policy not in ("lookahead", "lru"):
        raise ConfigError(f"policy {setting.policy} is not supported yet")
    return RowPlanner(groups, slots, depth, 0 if setting.policy == "lru" else setting.horizon_batches)


def planned_moves(recording: Recording, planner: RowPlanner, tick: Tick) -> Moves:
    """What a fresh planner moves. `tick` is called for each step. Raises ConfigError where a step does not fit."""
    moves = new_moves(len(recording), len(recording.groups))

    def plan_ready() -> None:
        while planner.ready():
            note(moves, planner.plan()[1], recording.steps[0].step)
            tick()

    for step in recording.steps:
        planner.add(distinct_rows_batch(recording.groups, step))
        plan_ready()
    planner.end()
    plan_ready()
    moves.flushed[:] = [len(move) for move in planner.barrier("end of data", finished=True).dirty]
    return moves


def note(moves: Moves, plan: StepPlan, first_step: int) -> None:
    at = plan.step - first_step
    for index, group in enumerate(plan.groups):
        moves.fetched[at, index] = len(group.fetch)
        moves.evicted[at, index] = len(group.evict)
        moves.written_back[at, index] = group.num_dirty


def distinct_rows_batch(groups: tuple[GroupSpec, ...], step: RecordedStep) -> ScheduledBatch:
    """All rows of a table are the first of its features'; its other bags are empty."""
    bags = [np.zeros(0, np.int64)] * sum(group.num_features for group in groups)
    for group, keys in zip(groups, step.keys, strict=True):
        positions = iter(group.feature_positions)
        for table in group.tables:
            start, end = np.searchsorted(keys, [table.index << KEY_SHIFT, (table.index + 1) << KEY_SHIFT])
            firsts = [next(positions) for _ in table.features]
            bags[firsts[0]] = keys[start:end] & ROW_MASK
    batch = Batch(
        dense=np.zeros((1, 0), np.float32),
        labels=np.zeros(1, np.float32),
        ids=np.concatenate(bags),
        offsets=np.cumsum([0, *map(len, bags)]),
    )
    return ScheduledBatch(step=step.step, kind=step.kind, train_step=step.train_step, epoch=step.epoch, batch=batch)
