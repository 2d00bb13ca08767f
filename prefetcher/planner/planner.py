"""Makes step plans from batches. A plan depends only on the data, the first step, the slots and the horizon."""

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from rowcast.job.eviction_policies import EVICTION_POLICIES
from rowcast.job.schema import CheckpointInterval, Policy
from rowcast.job.tables import GroupSpec, batch_features
from rowcast.prefetcher.planner.auto_horizon import AutoHorizon
from rowcast.prefetcher.planner.eviction import new_policy
from rowcast.prefetcher.planner.group_planner import GroupMoves, GroupPlanner, Occupancy, plan_fields
from rowcast.prefetcher.planner.grouping import Grouper, Grouping
from rowcast.prefetcher.planner.horizon import MOST_STEPS, Horizon, KnownBatch, NeededRows, ScheduledLookups
from rowcast.prefetcher.planner.level import CAPACITY_KEYS, Level, Slots, check_capacity
from rowcast.prefetcher.planner.rank_share import ShareOfBatch
from rowcast.protocol.batch import Batch, IdsBatch
from rowcast.protocol.parts import UNDIVIDED, Rank, parts_of
from rowcast.protocol.plan import BarrierPlan, GroupPlan, StepPlan
from rowcast.protocol.shards import Shards
from rowcast.runtime.arrays import I64
from rowcast.runtime.compiled import compiled_loop
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.stages import ThreadPool

NO_IDS = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMoves:
    """A step's changes in the slots of each level."""

    step: int
    after_step: int | None  # as in StepPlan
    levels: tuple[tuple[GroupMoves, ...], ...]  # of each level, from the device down, by group


@dataclass(kw_only=True, slots=True)
class PlanCounters:
    """Sums over all plans and groups."""

    lookups: int = 0
    unique_rows: int = 0  # distinct rows of each batch
    hits: int = 0  # unique rows that were resident when planned
    rows_fetched: int = 0
    rows_evicted: int = 0
    rows_written_back: int = 0  # dirty victims
    rows_flushed: int = 0  # dirty rows at barriers

    def count(self, num_lookups: int, moves: GroupMoves) -> None:
        self.lookups += num_lookups
        self.unique_rows += len(moves.unique_slots)
        self.hits += len(moves.unique_slots) - len(moves.fetch_keys)
        self.rows_fetched += len(moves.fetch_keys)
        self.rows_evicted += len(moves.evict_keys)
        self.rows_written_back += moves.num_dirty


class Arranger(Protocol):
    """Finds the rows of a group that a batch needs on this rank. Arranges the look-ups once these rows have slots."""

    def group(self, parts: Sequence[Batch | IdsBatch]) -> NeededRows:
        """`parts`: of all ranks; the batch itself if it is not divided."""

    def plan(self, rows: Any, moves: Sequence[GroupMoves], train: bool) -> GroupPlan:
        """`rows`: the value that `group` returned. `moves`: of each level, from the device down."""


class WholeBatch:
    """Implements `Arranger` for a single rank: all look-ups of a batch, and all of its rows."""

    def __init__(self, grouper: Grouper) -> None:
        self._grouper = grouper

    def group(self, parts: Sequence[Batch | IdsBatch]) -> Grouping:
        [batch] = parts
        return self._grouper.group(self._grouper.lookups(batch))

    def plan(self, rows: Grouping, moves: Sequence[GroupMoves], train: bool) -> GroupPlan:
        own = moves[0].unique_slots
        slots, by_row = (None, None) if rows.is_ordered else self._grouper.arrange(rows, own)
        return GroupPlan(
            order=rows.order if rows.is_ordered else None,
            slots=slots,
            unique_slots=own,
            segment_offsets=rows.segment_offsets,
            bag_order=None if by_row is None else rows.bag_order(by_row),
            lookup_order=None if rows.weights is None else by_row,
            offsets=rows.offsets,
            weights=rows.weights,
            sequence_offsets=rows.sequence_offsets,
            **plan_fields(moves),
        )


class RowPlanner:
    """Use from one thread: `add` batches while `wants_batch` is above 0, `end` after the last, `plan` while `ready`.

    groups: every group of the job. slots: of each level, from the device down (level.py). depth: steps of rows in
    flight. horizon: batches known beyond the one being planned, or how that number grows; plans use exactly these, so
    they do not depend on when batches are added. policy: a name in EVICTION_POLICIES. Policies that do not look ahead
    have a horizon of 0; "static" looks at `first_batches`; only "lookahead" works with several levels. pinned: for each
    group, ascending keys of rows that never leave once they are resident; a rank keeps those of its shard.
    num_threads: changes no plan. checkpoint_every: the interval between checkpoints, each a
    `barrier` that the caller makes when `checkpoint_due`; it may be set between two plans.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        slots: Sequence[Slots],
        depth: int,
        horizon: int | AutoHorizon,
        *,
        policy: Policy = "lookahead",
        first_batches: Sequence[ScheduledLookups] = (),
        pinned: tuple[I64, ...] | None = None,
        num_threads: int = 1,
        checkpoint_every: CheckpointInterval = 0,
        rank: Rank = UNDIVIDED,
    ) -> None:
        for above, below in pairwise(slots):
            assert policy == "lookahead", f"{len(slots)} levels with the policy {policy}"
            assert all(map(operator.le, above, below)), f"a level of {below} slots below one of {above}"
        assert depth >= 1, f"a depth of {depth} steps"
        self._pool = ThreadPool(num_threads, name="planner")
        self._arrangers: list[Arranger] = [
            ShareOfBatch(group, grouper, rank) if rank.is_divided else WholeBatch(grouper)
            for group, grouper in zip(groups, groupers_of(groups, self._pool), strict=True)
        ]
        self._rank, self._batch_features = rank, batch_features(groups)
        policies = [
            new_policy(policy, (arranger.group(self._parts(batch.batch)).keys for batch in first_batches))
            for arranger in self._arrangers
        ]
        pins = tuple(
            Shards(group.tables, rank.count).rows_of(rank.number, keys)
            for group, keys in zip(groups, pinned or (NO_IDS,) * len(groups), strict=True)
        )
        self.slots = tuple(slots)
        self._levels = tuple(
            Level(
                [GroupPlanner(*own, key, self._pool) for own in zip(groups, of_groups, policies, pins, strict=True)],
                trains=i == 0,
            )
            for i, (of_groups, key) in enumerate(zip(slots, CAPACITY_KEYS[: len(slots)], strict=True))
        )
        horizon = horizon if EVICTION_POLICIES[policy].looks_ahead else 0
        self._auto = horizon if isinstance(horizon, AutoHorizon) else None
        fixed = 0 if isinstance(horizon, AutoHorizon) else horizon
        self._horizon = Horizon(fixed if self._auto is None else self._auto.num_batches)
        self._write_backs = WriteBackWindow(depth)
        self._last_planned: int | None = None
        self._num_barriers = 0
        self.checkpoint_every: CheckpointInterval = checkpoint_every
        self._before: KnownBatch | None = None  # the batch planned last; None if a barrier came after it
        self.counters = PlanCounters()

    def group(self, batch: Batch | IdsBatch) -> tuple[NeededRows, ...]:
        """Groups a batch's look-ups. Several planners over the same batches can `add` the result."""
        parts = self._parts(batch)
        return tuple(arranger.group(parts) for arranger in self._arrangers)

    def _parts(self, batch: Batch | IdsBatch) -> Sequence[Batch | IdsBatch]:
        return parts_of(batch, self._rank.parts, self._batch_features) if self._rank.is_divided else [batch]

    def add(self, scheduled: ScheduledLookups, groupings: tuple[NeededRows, ...] | None = None) -> None:
        """Adds the next batch to the horizon. Steps have no gaps and may start at any number."""
        self._horizon.check_next(scheduled.step)
        if scheduled.step >= MOST_STEPS:
            raise ConfigError(f"a run has at most {MOST_STEPS} steps; make data.batch_size larger or data.epochs fewer")
        groupings = groupings or self.group(scheduled.batch)
        # first the lowest, which keeps track of most rows, so that a refusal comes before anything has changed
        *_, needed = (level.enter(groupings, scheduled.step) for level in reversed(self._levels))
        known = KnownBatch(
            step=scheduled.step,
            kind=scheduled.kind,
            train_step=scheduled.train_step,
            epoch=scheduled.epoch,
            size=scheduled.batch.size,
            groups=groupings,
            slots_needed=needed,
            num_levels=len(self._levels),
        )
        self._horizon.append(known)

    def end(self) -> None:
        self._horizon.end()

    @property
    def wants_batch(self) -> int:
        """The number of batches to add before `ready`; `add` refuses more. 0 once the data has ended."""
        return self._horizon.wants

    @property
    def horizon(self) -> int:
        return self._horizon.num_batches

    @property
    def num_known(self) -> int:
        return self._horizon.num_known

    def ready(self) -> bool:
        """Whether the next step can be planned: there is a batch, and its horizon is complete or the data has ended."""
        return self._horizon.ready

    @property
    def checkpoint_due(self) -> bool:
        """Whether the next plan must follow a checkpoint's barrier. The end of the data always has a barrier."""
        return (
            self._before is not None
            and self.ready()
            and is_due(self.checkpoint_every, self._before, self._horizon.next)
        )

    def plan(self) -> StepPlan:
        """Plans the next step.

        Raises ConfigError, with nothing changed, if a group has fewer slots than the batch has rows.
        """
        known = self._horizon.next
        moves = self.move()
        plans = tuple(
            arranger.plan(rows, of_levels, known.kind == "train")
            for arranger, rows, *of_levels in zip(self._arrangers, known.groups, *moves.levels, strict=True)
        )
        return StepPlan(
            step=known.step,
            kind=known.kind,
            train_step=known.train_step,
            epoch=known.epoch,
            batch_size=known.size,
            after_step=moves.after_step,
            groups=plans,
        )

    def move(self) -> StepMoves:
        """Plans like `plan`, but makes no array with an element per look-up."""
        known = self._horizon.next
        check_capacity(self._levels, known)
        moves = tuple(level.move(known, self._horizon.last_step) for level in self._levels)
        after_step = self._write_backs.after_step(known.step, moves[0], self._horizon.num_batches)
        if self._auto is not None:
            groups = [group for level in self._levels for group in level.groups]
            self._horizon.num_batches = self._auto.grow(groups, self._horizon.id_bytes, self._horizon.num_known)
        self._horizon.advance()
        self._last_planned, self._before = known.step, known
        for grouping, group_moves in zip(known.groups, moves[0], strict=True):
            self.counters.count(grouping.num_lookups, group_moves)
        return StepMoves(step=known.step, after_step=after_step, levels=moves)

    def barrier(self, reason: str, finished: bool) -> BarrierPlan:
        """Returns a barrier after the last planned step. After it, every row is in the store, or
        clean in a slot."""
        dirty = tuple(group.clean() for group in self._levels[0].groups)
        self._write_backs.settle(self._last_planned)
        self._num_barriers += 1
        self._before = None
        self.counters.rows_flushed += sum(map(len, dirty))
        return BarrierPlan(
            barrier=self._num_barriers - 1, after_step=self._last_planned, dirty=dirty, reason=reason, finished=finished
        )

    @property
    def occupancy(self) -> tuple[Occupancy, ...]:
        """Resident, dirty and free slots of each group on the device."""
        return tuple(group.occupancy for group in self._levels[0].groups)

    def check_integrity(self) -> None:
        """Raises AssertionError with both numbers if directory, slots, queues and horizon disagree. Slow."""
        for level in self._levels:
            level.check_integrity(self._horizon.batches)


def is_due(every: CheckpointInterval, before: KnownBatch, following: KnownBatch) -> bool:
    if every == "epoch":
        return before.epoch != following.epoch
    return every > 0 and before.kind == "train" and (before.train_step + 1) % every == 0


class WriteBackWindow:
    """Dirty victims of the last `depth` plans, which may not have reached the store yet."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        # step, keys of each group's dirty victims
        self._recent: deque[tuple[int, tuple[I64, ...]]] = deque(maxlen=depth)
        self._settled: int | None = None

    def after_step(self, step: int, moves: tuple[GroupMoves, ...], horizon: int) -> int | None:
        """Returns the last of these plans that evicted a row which this one fetches.

        With a horizon of at least `depth`, such a row had a known next use when it left, and its occurrence has the
        step. With a shorter horizon, keys are compared.
        """
        if horizon >= self._depth:
            least = max(step - self._depth, 0 if self._settled is None else self._settled + 1)
            return max(
                (m.last_evicted for m in moves if m.last_evicted is not None and m.last_evicted >= least), default=None
            )
        fetched = [group_moves.fetch_keys for group_moves in moves]
        found = (
            e for e, keys in reversed(self._recent) if any(share_key(*pair) for pair in zip(fetched, keys, strict=True))
        )
        after_step = next(found, None)
        self._recent.append((step, tuple(group_moves.evict_keys[: group_moves.num_dirty] for group_moves in moves)))
        return after_step

    def settle(self, step: int | None) -> None:
        """Notes that all rows evicted up to `step` are home."""
        self._recent.clear()
        self._settled = step


def groupers_of(groups: tuple[GroupSpec, ...], pool: ThreadPool | None = None) -> tuple[Grouper, ...]:
    num_features = sum(group.num_features for group in groups)
    return tuple(Grouper(group, num_features, pool) for group in groups)


@compiled_loop
def share_key(some: I64, others: I64) -> bool:
    i = j = 0
    while i < len(some) and j < len(others):
        if some[i] == others[j]:
            return True
        if some[i] < others[j]:
            i += 1
        else:
            j += 1
    return False
