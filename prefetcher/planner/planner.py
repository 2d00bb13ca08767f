"""Turns batches into step plans. A plan depends only on the data, the first step, the slots and the horizon."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rowcast.job.eviction_policies import EVICTION_POLICIES
from rowcast.job.schema import CheckpointInterval, Policy
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.auto_horizon import AutoHorizon
from rowcast.prefetcher.planner.eviction import new_policy
from rowcast.prefetcher.planner.group_plan import bag_order, group_plan
from rowcast.prefetcher.planner.group_planner import GroupMoves, GroupPlanner, Occupancy
from rowcast.prefetcher.planner.grouping import Grouper, Grouping, Lookups, Pool
from rowcast.prefetcher.planner.horizon import MOST_STEPS, Horizon, KnownBatch, NeededRows, ScheduledLookups
from rowcast.prefetcher.planner.integrity import check_group
from rowcast.prefetcher.planner.rank_share import ShareOfBatch
from rowcast.protocol.parts import Rank
from rowcast.protocol.plan import BarrierPlan, GroupPlan, StepPlan
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.protocol.shards import Shards
from rowcast.runtime.arrays import I64
from rowcast.runtime.compiled import compiled_loop
from rowcast.runtime.errors import ConfigError

NO_IDS = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMoves:
    """What a step changes in the slots."""

    after_step: int | None  # as in StepPlan
    groups: tuple[GroupMoves, ...]
    tier: tuple[GroupMoves, ...]  # what it changes in the memory tier; empty without one


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
        self.hits += len(moves.unique_slots) - len(moves.fetch)
        self.rows_fetched += len(moves.fetch)
        self.rows_evicted += len(moves.evict)
        self.rows_written_back += moves.num_dirty


class Arranger(Protocol):
    """What of a group a batch needs here, and how its look-ups are arranged once its rows have slots."""

    def group(self, batch: Lookups) -> NeededRows: ...

    def plan(self, rows: Any, moves: GroupMoves, tier: GroupMoves | None, train: bool) -> GroupPlan:
        """`rows`: what `group` returned. `tier`: None without a memory tier."""


class WholeBatch:
    """Every look-up of a batch, and all of its rows: the arranger of a trainer that is alone."""

    def __init__(self, grouper: Grouper) -> None:
        self._grouper = grouper

    def group(self, batch: Lookups) -> Grouping:
        return self._grouper.group(self._grouper.lookups(batch))

    def plan(self, rows: Grouping, moves: GroupMoves, tier: GroupMoves | None, train: bool) -> GroupPlan:
        slots, order = self._grouper.arrange(rows, moves.unique_slots)
        lookups = LookupArrays(
            slots=slots,
            unique_slots=moves.unique_slots,
            segment_offsets=rows.segment_offsets,
            bag_order=bag_order(rows, order),
            lookup_order=None if rows.weights is None else order,
            offsets=rows.offsets,
            weights=rows.weights,
            sequence_offsets=rows.sequence_offsets,
        )
        return group_plan(lookups, moves, tier)


class RowPlanner:
    """Use from one thread: `add` batches while `wants_batch` is above 0, `end` after the last, `plan` while `ready`.

    groups: every group of the job. slots: device slots of each. depth: steps of rows in flight. horizon: batches known
    beyond the one being planned, or how that number grows; plans use exactly these, so they do not depend on when
    batches are added. policy: a name in EVICTION_POLICIES; those that do not look ahead have a horizon of 0, and
    "static" looks at `first_batches`. pinned: for each group, ascending keys of rows that never leave once they are
    resident; a rank keeps those of its shard. num_threads: changes no plan. keep_ids: `plan` returns batches with their
    ids; by default they are dropped once they are grouped, as nothing after the planner needs them. checkpoint_every:
    the interval between checkpoints, each a `barrier` that the caller makes when `checkpoint_due`; it may be set
    between two plans. rank: None if the trainer is alone. tier_slots: rows of each group that the store's memory tier
    holds, no fewer than `slots`; None: the store has no tier. The tier is a second cache over the same batches, so with
    "lookahead", the only policy it works with, it holds every row of the device: eviction follows an order of all rows
    that no number of slots changes.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        slots: tuple[int, ...],
        depth: int,
        horizon: int | AutoHorizon,
        *,
        policy: Policy = "lookahead",
        first_batches: Sequence[ScheduledLookups] = (),
        pinned: tuple[I64, ...] | None = None,
        num_threads: int = 1,
        keep_ids: bool = False,
        checkpoint_every: CheckpointInterval = 0,
        rank: Rank | None = None,
        tier_slots: tuple[int, ...] | None = None,
    ) -> None:
        assert len(groups) == len(slots), f"{len(groups)} groups, but slots for {len(slots)}"
        if tier_slots is not None:
            assert policy == "lookahead", f"a memory tier with the policy {policy}"
            assert all(least <= n for least, n in zip(slots, tier_slots, strict=True)), (
                f"a memory tier of {tier_slots} rows under {slots} slots"
            )
        assert depth >= 1, f"a depth of {depth} steps"
        self._pool = Pool(num_threads)
        self._keep_ids = keep_ids
        self._rank = rank
        groupers = groupers_of(groups, self._pool)
        self._arrangers: list[Arranger] = (
            [WholeBatch(grouper) for grouper in groupers]
            if rank is None
            else [ShareOfBatch(group, grouper, rank) for group, grouper in zip(groups, groupers, strict=True)]
        )
        policies = [
            new_policy(policy, (arranger.group(batch.batch).keys for batch in first_batches))
            for arranger in self._arrangers
        ]
        pins = pinned or tuple(np.zeros(0, np.int64) for _ in groups)
        if rank is not None:
            pins = tuple(owned(group, keys, rank) for group, keys in zip(groups, pins, strict=True))
        self._groups = tuple(GroupPlanner(*parts) for parts in zip(groups, slots, policies, pins, strict=True))
        self._tier = (
            ()
            if tier_slots is None
            else tuple(
                GroupPlanner(*parts, "store.memory") for parts in zip(groups, tier_slots, policies, pins, strict=True)
            )
        )
        horizon = horizon if EVICTION_POLICIES[policy].looks_ahead else 0
        self._auto = horizon if isinstance(horizon, AutoHorizon) else None
        fixed = 0 if isinstance(horizon, AutoHorizon) else horizon
        self._horizon = Horizon(fixed if self._auto is None else self._auto.num_batches)
        self._write_backs = WriteBackWindow(depth)
        self._last_planned: int | None = None
        self._num_barriers = 0
        self.checkpoint_every: CheckpointInterval = checkpoint_every
        self._before: ScheduledLookups | None = None  # the batch planned last; None if a barrier came after it
        self.counters = PlanCounters()

    def group(self, batch: Lookups) -> tuple[NeededRows, ...]:
        """Groups a batch's look-ups, so that several planners over the same batches can share it with `add`."""
        return tuple(arranger.group(batch) for arranger in self._arrangers)

    def add(self, scheduled: ScheduledLookups, groupings: tuple[NeededRows, ...] | None = None) -> None:
        """Adds the next batch to the horizon. Steps have no gaps and may start at any number."""
        self._horizon.check_next(scheduled.step)
        if scheduled.step >= MOST_STEPS:
            raise ConfigError(f"a run has at most {MOST_STEPS} steps; make data.batch_size larger or data.epochs fewer")
        groupings = groupings or self.group(scheduled.batch)
        # first the tier, which keeps track of more rows, so that a refusal comes before anything has changed
        for group, grouping in zip(self._tier, groupings, strict=bool(self._tier)):
            group.enter(grouping.keys, scheduled.step)
        needed = tuple(
            group.enter(grouping.keys, scheduled.step) for group, grouping in zip(self._groups, groupings, strict=True)
        )
        if not self._keep_ids:
            scheduled = without_ids(scheduled)
        num_levels = 2 if self._tier else 1
        self._horizon.append(
            KnownBatch(scheduled=scheduled, groups=groupings, slots_needed=needed, num_levels=num_levels)
        )

    def end(self) -> None:
        self._horizon.end()

    @property
    def wants_batch(self) -> int:
        """Batches missing before `ready`; no more are accepted. 0 once the data has ended."""
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
        """Whether a checkpoint's barrier belongs before the next plan. The end of the data has a barrier anyway."""
        return (
            self._before is not None
            and self.ready()
            and is_due(self.checkpoint_every, self._before, self._horizon.next.scheduled)
        )

    def plan(self) -> tuple[Any, StepPlan]:
        """Plans the next step. Returns its batch, as it was added, and the plan.

        Raises ConfigError, with nothing changed, if a group has fewer slots than the batch has rows.
        """
        groupings = self._horizon.next.groups
        scheduled, moves = self.move()
        tier = moves.tier or (None,) * len(groupings)
        plans = tuple(
            arranger.plan(rows, group_moves, group_tier, scheduled.kind == "train")
            for arranger, rows, group_moves, group_tier in zip(
                self._arrangers, groupings, moves.groups, tier, strict=True
            )
        )
        plan = StepPlan(
            step=scheduled.step,
            kind=scheduled.kind,
            train_step=scheduled.train_step,
            epoch=scheduled.epoch,
            batch_size=None if self._rank is None else scheduled.batch.size,
            after_step=moves.after_step,
            groups=plans,
        )
        return scheduled, plan

    def move(self) -> tuple[Any, StepMoves]:
        """Like `plan`, without the arrays that have one element per look-up."""
        known = self._horizon.next
        self._check_capacity(known)
        scheduled, last_step = known.scheduled, self._horizon.last_step
        moves = tuple(
            group.move(grouping.num_unique, scheduled.step, last_step, scheduled.kind == "train")
            for group, grouping in zip(self._groups, known.groups, strict=True)
        )
        # a row that leaves the tier has come home from the device, so none is dirty there
        tier = tuple(
            group.move(grouping.num_unique, scheduled.step, last_step, train=False)
            for group, grouping in zip(self._tier, known.groups, strict=bool(self._tier))
        )
        after_step = self._write_backs.after_step(scheduled.step, moves, self._horizon.num_batches)
        if self._auto is not None:
            levels = self._groups + self._tier
            self._horizon.num_batches = self._auto.grow(levels, self._horizon.id_bytes, self._horizon.num_known)
        self._horizon.advance()
        self._last_planned, self._before = scheduled.step, scheduled
        for grouping, group_moves in zip(known.groups, moves, strict=True):
            self.counters.count(grouping.num_lookups, group_moves)
        return scheduled, StepMoves(after_step=after_step, groups=moves, tier=tier)

    def barrier(self, reason: str, finished: bool) -> BarrierPlan:
        """Returns a barrier after the last planned step. Once it is done, every row is in the store or clean in a slot,
        so nothing stays pending."""
        dirty = tuple(group.clean() for group in self._groups)
        self._write_backs.settle(self._last_planned)
        self._num_barriers += 1
        self._before = None
        self.counters.rows_flushed += sum(map(len, dirty))
        return BarrierPlan(
            barrier=self._num_barriers - 1, after_step=self._last_planned, dirty=dirty, reason=reason, finished=finished
        )

    @property
    def occupancy(self) -> tuple[Occupancy, ...]:
        """Resident, dirty and free slots of each group."""
        return tuple(group.occupancy for group in self._groups)

    def check_integrity(self) -> None:
        """Raises AssertionError with both numbers if directory, slots, queues and horizon disagree. Slow."""
        for level in filter(None, (self._groups, self._tier)):
            for index, group in enumerate(level):
                keys = [(known.scheduled.step, known.groups[index].keys) for known in self._horizon.batches]
                check_group(group, keys)

    def _check_capacity(self, known: KnownBatch) -> None:
        for group, needed in zip(self._groups, known.slots_needed, strict=True):
            if needed > group.num_slots:
                raise ConfigError(self._refusal(known.scheduled.step, group, needed))

    def _refusal(self, step: int, refused: GroupPlanner, num_rows: int) -> str:
        # one group's slots follow its capacity; several groups share one, which is raised in proportion
        group = refused.group
        tier = next((other for other in self._tier if other.group is group and other.num_slots < num_rows), None)
        memory = "" if tier is None else f" and store.memory, which has room for {tier.num_slots} rows of the group"
        pinned = f", {refused.num_pinned} pinned ones included" if refused.num_pinned else ""
        what = (
            f"step {step} touches {num_rows} distinct rows of group {group.name}{pinned}, "
            f"more than its {refused.num_slots} slots"
        )
        needed = f"{num_rows} rows ({num_rows * group.record_bytes} bytes)"
        if len(self._groups) == 1:
            return f"{what}; raise cache.capacity to at least {needed}{memory}, or make data.batch_size smaller"
        total = sum(other.num_slots * other.group.record_bytes for other in self._groups)
        enough = -(-total * num_rows // max(1, refused.num_slots))
        return (
            f"{what}; it needs {needed}, so raise cache.capacity from {total} to about {enough} bytes{memory}, "
            "or make data.batch_size smaller"
        )


def owned(group: GroupSpec, keys: I64, rank: Rank) -> I64:
    own: I64 = keys[Shards(group.tables, rank.count).owners(keys) == rank.number]
    return own


def is_due(every: CheckpointInterval, before: ScheduledLookups, following: ScheduledLookups) -> bool:
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

        With a horizon of at least `depth`, such a row had a known next use when it left, so its occurrence tells;
        otherwise keys are compared.
        """
        if horizon >= self._depth:
            least = max(step - self._depth, 0 if self._settled is None else self._settled + 1)
            return max(
                (m.last_evicted for m in moves if m.last_evicted is not None and m.last_evicted >= least), default=None
            )
        fetched = [group_moves.fetch.keys for group_moves in moves]
        found = (
            e for e, keys in reversed(self._recent) if any(share_key(*pair) for pair in zip(fetched, keys, strict=True))
        )
        after_step = next(found, None)
        self._recent.append((step, tuple(group_moves.evict.keys[: group_moves.num_dirty] for group_moves in moves)))
        return after_step

    def settle(self, step: int | None) -> None:
        """Notes that everything up to `step` is home."""
        self._recent.clear()
        self._settled = step


def without_ids(scheduled: Any) -> Any:
    # Any: a dataclass, as all scheduled batches are
    return replace(scheduled, batch=replace(scheduled.batch, ids=NO_IDS, offsets=None, weights=None))


def groupers_of(groups: tuple[GroupSpec, ...], pool: Pool | None = None) -> tuple[Grouper, ...]:
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
