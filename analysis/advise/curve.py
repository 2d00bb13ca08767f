"""What a run would move at a capacity, from what was observed of it: the planner of training over the followed rows.

    real        rows of each step      slots
    followed    their share of them    the same share of the slots (see `following`)

Every count of followed rows, divided by their share, stands for all rows.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rowcast.analysis.advise.following import NUM_PARTS, part_counts, scaled_slots
from rowcast.analysis.advise.observed import Observed
from rowcast.analysis.progress import Tick
from rowcast.analysis.simulate.grid import with_values
from rowcast.analysis.simulate.moves import Moves, entries, new_moves, note
from rowcast.job.schema import Job
from rowcast.prefetcher.planner.capacity import divide_capacity
from rowcast.prefetcher.planner.grouping import I64
from rowcast.prefetcher.planner.job_planner import job_planner
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.protocol.plan import BarrierPlan
from rowcast.runtime.errors import ConfigError

F64 = npt.NDArray[np.float64]
Compared = Literal["lookahead", "lru"]
Slots = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Estimated rows, all of them and not the followed ones, by step and group."""

    fetched: F64  # [P, G]
    written_back: F64  # [P, G] dirty victims
    flushed: F64  # [G] by the barrier at the end
    fetched_error: F64  # [G] standard error of all rows fetched, from how much parts of the followed rows differ
    horizon: int  # batches known ahead at the end


def capacity_slots(observed: Observed, capacity_bytes: int) -> Slots:
    """Slots per group, as a run has them. Raises ConfigError."""
    return divide_capacity(observed.groups, observed.touched, capacity_bytes=capacity_bytes)


def followed_slots(observed: Observed, slots: Slots) -> Slots:
    """Slots per group for the followed rows only."""
    rows, followed = observed.unique_rows.mean(axis=0), observed.followed_rows.mean(axis=0)
    return tuple(
        scaled_slots(n, group.num_rows, share, mean_rows, mean_followed)
        for n, group, share, mean_rows, mean_followed in zip(
            slots, observed.groups, observed.shares, rows.tolist(), followed.tolist(), strict=True
        )
    )


def holds_every_batch(observed: Observed, capacity_bytes: int) -> bool:
    """Of the run, and of the followed rows, which by chance may be a larger share of a batch than of the run."""
    try:
        slots = capacity_slots(observed, capacity_bytes)
    except ConfigError:
        return False
    largest_followed = observed.followed_rows.max(axis=0).tolist()
    return all(have >= need for have, need in zip(slots, observed.largest_batch_rows, strict=True)) and all(
        have >= need for have, need in zip(followed_slots(observed, slots), largest_followed, strict=True)
    )


def smallest_capacity(observed: Observed) -> int:
    """Bytes that hold every batch that was seen, and the smallest that this sample can tell of."""
    low, high = 0, sum(group.num_rows * group.record_bytes for group in observed.groups)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds_every_batch(observed, middle) else (middle, high)
    return high


def moved(observed: Observed, job: Job, capacity_bytes: int, policy: Compared, tick: Tick) -> Moved:
    """What a run of the job would move with this capacity, policy and an automatic horizon. The capacity holds every batch."""
    own = with_values(job, {"cache": {"policy": policy, "pin": None, "groups": {}}, "lookahead": {"horizon": "auto"}})
    slots = followed_slots(observed, capacity_slots(observed, capacity_bytes))
    planner = job_planner(own, observed.groups, slots, observed.measured)
    counts, parts = count(observed, planner, tick)
    shares = np.array(observed.shares)
    return Moved(
        fetched=counts.fetched / shares,
        written_back=counts.written_back / shares,
        flushed=counts.flushed / shares,
        fetched_error=np.sqrt(NUM_PARTS * parts.var(axis=1, ddof=1) * (1 - shares)) / shares,
        horizon=planner.horizon,
    )


def count(observed: Observed, planner: RowPlanner, tick: Tick) -> tuple[Moves, I64]:
    """Followed rows that move, and of those fetched in steps that count how many are in each part, [G, NUM_PARTS]."""
    moves, first = new_moves(len(observed), len(observed.groups)), observed.recording.steps[0].scheduled.step
    parts = np.zeros((len(observed.groups), NUM_PARTS), np.int64)

    for entry in entries(observed.recording.steps, planner):
        if isinstance(entry, BarrierPlan):
            moves.flushed[:] += [len(move) for move in entry.dirty]
            continue
        scheduled, step = entry
        position = scheduled.step - first
        note(moves, position, step)
        if position >= len(observed) - observed.num_counted:
            parts[:] += [part_counts(group.fetch.keys) for group in step.groups]
        tick()
    return moves, parts
