"""Makes plans from batches. A plan depends only on the data, the first step, the slots, the horizon and the bundle."""

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from rowcast.job.schema import EVICTION_POLICIES, CheckpointInterval, Job, Policy
from rowcast.job.tables import GroupSpec, batch_features, num_features
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.planner.all_groups import NUM_MOVED, enter_all, find_unprepared, move_all
from rowcast.prefetcher.planner.eviction import new_policy
from rowcast.prefetcher.planner.exchange import ShareOfBatch
from rowcast.prefetcher.planner.group_planner import NO_ROWS, NO_SLOTS, GroupMoves, GroupPlanner, Occupancy, plan_fields
from rowcast.prefetcher.planner.grouping import Grouper, Grouping, JointGrouper
from rowcast.prefetcher.planner.horizon import (
    MOST_STEPS,
    NONE,
    BatchRows,
    Bundle,
    Horizon,
    NeededRows,
    Places,
    id_bytes,
)
from rowcast.protocol.batch import Lookups, Scheduled
from rowcast.protocol.parts import UNDIVIDED, Rank, Shards, own_parts, parts_of
from rowcast.protocol.plan import BarrierPlan, GroupPlan, PlannedSteps, StepPlan
from rowcast.runtime.arrays import I64
from rowcast.runtime.compiled import compiled_loop
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.stages import ThreadPool

CAPACITY_KEYS = ("cache.capacity", "store.memory")  # of the levels, from the device down
WHILE_FILLING = 8  # batches by which the automatic horizon grows per step
SHARE = 16  # it grows by 1/16 per plan while plans guess

Slots = tuple[int, ...]  # of each group


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMoves:
    """A plan's changes in the slots of each level."""

    bundle: Bundle
    after_plan: int | None  # as in PlannedSteps
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

    def count(self, bundle: Bundle, moves: Sequence[GroupMoves]) -> None:
        """`moves`: of each group."""
        rows = [rows for step in bundle.steps for rows in step.batch.groups]
        num_unique = sum([group_rows.num_unique for group_rows in rows])
        num_fetched = sum([len(group_moves.fetch_keys) for group_moves in moves])
        self.lookups += sum([group_rows.num_lookups for group_rows in rows])
        self.unique_rows += num_unique
        self.hits += num_unique - num_fetched
        self.rows_fetched += num_fetched
        self.rows_evicted += sum([len(group_moves.evict_keys) for group_moves in moves])
        self.rows_written_back += sum([group_moves.num_dirty for group_moves in moves])


class Arranger(Protocol):
    """Finds the rows that a batch needs on this rank, in all groups. Arranges look-ups once their rows have slots."""

    def group(self, parts: Sequence[Lookups]) -> tuple[NeededRows, ...]:
        """`parts`: of all ranks; the batch itself if it is not divided."""

    def sources(self, parts: Sequence[Lookups], whole: Lookups) -> Sequence[Lookups]:
        """Returns what this rank looks up, source by source (`protocol/parts.py`). `parts`: its own, of all features.
        `whole`: the batch of all ranks, if this one owns placed tables."""

    def want(self, sources: Sequence[Lookups]) -> tuple[Any, ...]:
        """Returns what this rank knows of each group's rows without the others."""

    def wanted(self, needed: Any, rank: int) -> list[I64]:
        """Returns the keys of a rank's shard that this rank looks up, by group. `needed`: as `want` returned it."""

    def complete(self, needed: Any, asked: Sequence[Sequence[I64]]) -> tuple[NeededRows, ...]:
        """`asked`: the keys of this shard that the samples of each rank look up, by group."""

    def plan(self, group: int, rows: Any, moves: Sequence[GroupMoves], train: bool) -> GroupPlan:
        """`rows`: the group's, as `group` returned them. `moves`: of each level, from the device down."""


class WholeBatch:
    """Implements `Arranger` for a single rank: all look-ups of a batch, and all of its rows."""

    def __init__(self, grouper: JointGrouper) -> None:
        self._grouper = grouper

    def group(self, parts: Sequence[Lookups]) -> tuple[Grouping, ...]:
        [batch] = parts
        return self._grouper.group(batch)

    def sources(self, parts: Sequence[Lookups], whole: Lookups) -> Sequence[Lookups]:
        return parts

    def want(self, sources: Sequence[Lookups]) -> tuple[Grouping, ...]:
        return self.group(sources)

    def wanted(self, needed: tuple[Grouping, ...], rank: int) -> list[I64]:
        return [rows.keys for rows in needed]

    def complete(self, needed: tuple[Grouping, ...], asked: Sequence[Sequence[I64]]) -> tuple[Grouping, ...]:
        return needed

    def plan(self, group: int, rows: Grouping, moves: Sequence[GroupMoves], train: bool) -> GroupPlan:
        unique_slots = moves[0].unique_slots
        is_ordered = rows.is_ordered
        slots, by_row = (None, None) if is_ordered else self._grouper.each[group].arrange(rows, unique_slots)
        return GroupPlan(
            order=rows.order if is_ordered else None,
            slots=slots,
            unique_slots=unique_slots,
            segment_offsets=rows.segment_offsets,
            bag_order=None if by_row is None else rows.bag_order(by_row),
            lookup_order=None if rows.weights is None else by_row,
            offsets=rows.offsets,
            weights=rows.weights,
            sequence_offsets=rows.sequence_offsets,
            **plan_fields(moves),
        )


class Level:
    """Plans one level of a chain of caches. Every level plans the same batches.

    level          capacity          fetches rows from, evicts rows to
    the device     cache.capacity    the store: its memory tier, or all of it without one
    memory tier    store.memory      the cold tier

    Eviction follows one order of all rows (next use, last use, key), which is the same for any number of slots. A lower
    level has at least as many slots, so it contains every row of the levels above.
    """

    def __init__(self, groups: Sequence[GroupPlanner], *, trains: bool) -> None:
        """`trains`: only for the device: a row that leaves a lower level has left the device and is home."""
        self.groups, self._trains = groups, trains
        self._states = np.stack([group.state for group in groups])
        for group, state in zip(groups, self._states, strict=True):
            group.state = state

    def enter(self, keys: Sequence[I64], step: int) -> None:
        """Adds a bundle. `keys`: of each group. `step`: the number of its plan."""
        starts = np.array([0, *accumulate(map(len, keys))])
        unprepared = np.empty(len(keys), np.int64)
        for g in unprepared[: find_unprepared(self._states, starts, step, unprepared)].tolist():
            self.groups[g].prepare(keys[g], step)
        enter_all(self._states, keys[0] if len(keys) == 1 else np.concatenate(keys), starts, step)
        for g in self._divided:
            self.groups[g].enter(keys[g], step)

    @property
    def _divided(self) -> list[int]:
        """The groups that the loops over all groups pass over."""
        return np.flatnonzero(self._states["is_whole"] == 0).tolist()

    def move(self, bundle: Bundle, last_plan: int) -> tuple[GroupMoves, ...]:
        """Plans the oldest bundle, whose rows must fit. `last_plan` is the last one entered."""
        plan, train = bundle.plan, self._trains and bundle.first.kind == "train"
        counts = list(map(len, bundle.keys))
        starts = [0, *accumulate(counts)]
        slots, keys = np.empty((2, starts[-1]), np.int32), np.empty((2, starts[-1]), np.int64)
        moved = np.zeros((len(counts), NUM_MOVED), np.int64)
        move_all(self._states, np.array(starts), plan, last_plan, train, slots, keys, moved)
        (unique, filled), (fetched, evicted), moves = slots, keys, list[GroupMoves]()
        for (a, b), level_moves in zip(pairwise(starts), moved.tolist(), strict=True):
            num_fetched, num_evicted, num_dirty, fill_after, last = level_moves
            assert num_evicted >= 0, f"{-1 - num_evicted} rows can leave, but {num_fetched} must"
            moves.append(
                GroupMoves(
                    unique_slots=unique[a:b],
                    fetch_slots=filled[a : a + num_fetched],
                    fetch_keys=fetched[a : a + num_fetched],
                    evict_keys=evicted[a : a + num_evicted],
                    num_dirty=num_dirty,
                    fill_after=fill_after if num_evicted else None,
                    last_evicted=None if last == NONE else last,
                )
            )
        for g in self._divided:
            moves[g] = self.groups[g].move(counts[g], plan, last_plan, train)
        return tuple(moves)


def refusal(levels: Sequence[Level], index: int, step: int, num_rows: int) -> str:
    # one group's slots follow its capacity; several groups share one, which is raised in proportion
    refused, *below = (level.groups[index] for level in levels)
    group = refused.group
    memory = "".join(
        f" and {level.capacity_key}, which has room for {level.num_slots} rows of the group"
        for level in below
        if level.num_slots < num_rows
    )
    what = (
        f"step {step} touches {num_rows} distinct rows of group {group.name}, more than its {refused.num_slots} slots"
    )
    needed = f"{num_rows} rows ({num_rows * group.record_bytes} bytes)"
    device = levels[0].groups
    if len(device) == 1:
        return f"{what}; raise {refused.capacity_key} to at least {needed}{memory}, or make data.batch_size smaller"
    total = sum(other.num_slots * other.group.record_bytes for other in device)
    enough = -(-total * num_rows // max(1, refused.num_slots))
    return (
        f"{what}; it needs {needed}, so raise {refused.capacity_key} from {total} to about {enough} bytes{memory}, "
        "or make data.batch_size smaller"
    )


class AutoHorizon:
    """Grows the horizon, within a budget of bytes, while knowing more batches would change the fetched rows.

    A plan that evicted rows and left no idle row guessed nothing: it knew the next use of every remaining row, and
    knowing more would have changed nothing. A plan that left idle rows chose among rows without a known next use, so
    the horizon grows. While a group has free slots there is nothing to evict yet, and the horizon grows by 8 batches
    per step in preparation, to about eight times the steps that fill the cache once. On 18 logs this fetched exactly as
    many rows as the bound (docs/log/planner.md). All levels count: the horizon grows until none has to guess.

    Only the plans and the budget decide, never time: two runs over the same data have the same horizon at every step.

    `least`: batches known beyond the next plan's at the start. `id_bytes`: the budget for known batches.
    """

    def __init__(self, least: int, id_bytes: int) -> None:
        self.least, self._budget_bytes = least, id_bytes

    def grow(self, groups: Sequence[GroupPlanner], known: Horizon) -> int:
        """Returns the new horizon after a plan. `groups`: of every level. `known`: the plan's batches and those beyond
        them."""
        proposed = known.num_ahead + max(growth(group, known) for group in groups)
        fits = proposed * known.id_bytes <= self._budget_bytes * known.num_batches
        return proposed if fits else known.num_ahead


def growth(group: GroupPlanner, known: Horizon) -> int:
    """Returns the batches by which an automatic horizon grows after the next plan of `known`, for one group."""
    num_steps = len(known.next.steps)
    if group.num_slots >= group.group.num_rows:
        return 0
    if group.num_free:
        return WHILE_FILLING * num_steps
    return num_steps + known.num_ahead // SHARE if group.guessed else 0


class RowPlanner:
    """Use from one thread: `add` batches while `wants_batch` is above 0, `end` after the last, `plan` while `ready`.

    groups: every group of the job. slots: of each level, from the device down (`Level`). depth: plans with rows in
    flight. horizon: batches known beyond those being planned, or how that number grows; as many as it asks for and the
    rest of a bundle, and `depth` bundles of them if it is no smaller. Plans use exactly these, so they do not depend on
    when batches are added. bundle: the most steps of a plan. policy: a name in EVICTION_POLICIES.
    Policies that do not look ahead have a horizon of 0; "static" looks at `first_batches`; only "lookahead" works with
    several levels. num_threads: changes no plan. The caller makes a `barrier` when `checkpoint_due`.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        slots: Sequence[Slots],
        depth: int,
        horizon: int | AutoHorizon,
        *,
        bundle: int = 1,
        policy: Policy = "lookahead",
        first_batches: Sequence[Scheduled[Lookups]] = (),
        num_threads: int = 1,
        rank: Rank = UNDIVIDED,
    ) -> None:
        for above, below in pairwise(slots):
            assert policy == "lookahead", f"{len(slots)} levels with the policy {policy}"
            assert all(map(operator.le, above, below)), f"a level of {below} slots below one of {above}"
        assert depth >= 1, f"a depth of {depth} plans"
        assert bundle == 1 or EVICTION_POLICIES[policy].looks_ahead, f"{policy} with plans of {bundle} steps"
        self._pool = ThreadPool(num_threads, name="planner")
        grouper = JointGrouper(groups, self._pool)
        self.arranger: Arranger = ShareOfBatch(groups, grouper, rank) if rank.is_divided else WholeBatch(grouper)
        self.groups, self.rank, self._batch_features = groups, rank, batch_features(groups)
        self.shards = [Shards(group.tables, rank.count) for group in groups]
        policies = [
            new_policy(policy, (self.group(batch.batch)[g].keys for batch in first_batches)) for g in range(len(groups))
        ]
        self.slots = tuple(slots)
        self.levels = tuple(
            Level(
                [
                    GroupPlanner(*group_and_slots, key, self._pool)
                    for group_and_slots in zip(groups, of_groups, policies, strict=True)
                ],
                trains=i == 0,
            )
            for i, (of_groups, key) in enumerate(zip(slots, CAPACITY_KEYS[: len(slots)], strict=True))
        )
        horizon = horizon if EVICTION_POLICIES[policy].looks_ahead else 0
        self._auto = horizon if isinstance(horizon, AutoHorizon) else None
        num_ahead = horizon.least if isinstance(horizon, AutoHorizon) else horizon
        self.bundle, self.least_ahead = bundle, num_ahead
        self.known = Horizon(num_ahead, min(num_ahead, depth))
        self._open: list[Scheduled[BatchRows]] = []  # the batches of the next bundle
        self._next_plan: int | None = None  # the number of the next bundle
        self._write_backs = WriteBackWindow(depth, looks_beyond=num_ahead >= depth)
        self._last_planned: int | None = None
        self._num_barriers = 0
        self.checkpoint_every: CheckpointInterval = 0  # each with a `barrier`
        self.saves_evaluations = False  # each evaluation ends with a checkpoint
        self.evaluating = False  # the batch before the next one was an evaluation's, and no barrier came after it
        self._before: Scheduled[BatchRows] | None = None  # the batch planned last; None if a barrier came after it
        self.counters = PlanCounters()

    def own_parts(self, lookups: Lookups) -> Sequence[Lookups]:
        """`lookups`: of the rank's samples of a batch."""
        return own_parts(lookups, self.rank, self._batch_features) if self.rank.is_divided else [lookups]

    def group(self, batch: Lookups) -> tuple[NeededRows, ...]:
        """Groups the look-ups of a batch, of all ranks. Several planners of the same batches can `add` the result."""
        return self.arranger.group(self._parts(batch))

    def _parts(self, batch: Lookups) -> Sequence[Lookups]:
        return parts_of(batch, self.rank.parts, self._batch_features) if self.rank.is_divided else [batch]

    def add(self, scheduled: Scheduled[Lookups], groupings: tuple[NeededRows, ...] | None = None) -> None:
        """Adds the next batch to the horizon. Steps have no gaps and may start at any number."""
        self.known.check_next(scheduled.step)
        if scheduled.step >= MOST_STEPS:
            raise ConfigError(f"a run has at most {MOST_STEPS} steps; make data.batch_size larger or data.epochs fewer")
        groupings = groupings or self.group(scheduled.batch)
        rows = BatchRows(
            size=scheduled.batch.batch_size,
            groups=groupings,
            id_bytes=id_bytes(groupings, len(self.levels)),
        )
        batch = scheduled.holding(rows)
        steps = [*self._open, batch]
        if self._open and (self._parts_all(self._open[-1], batch) or not self._fits(steps)):
            self._enter(self._open)
            self._open, steps = [], [batch]
        if len(steps) == self.bundle:
            self._enter(steps)
            steps = []
        self._open, self.known.following = steps, scheduled.step + 1

    def _parts_all(self, before: Scheduled[Any], following: Scheduled[Any]) -> bool:
        """Returns whether the plans of every rank end between two batches, as there may be a barrier."""
        at_multiple = following.kind == "train" and following.train_step % self.bundle == 0
        return at_multiple or before.kind != following.kind or is_due(self.checkpoint_every, before, following)

    def _fits(self, steps: Sequence[Scheduled[BatchRows]]) -> bool:
        """Returns whether one plan may serve the steps: if their rows surely take at most a third of the slots, so
        that rows of later plans can stay beside them, or every row has a slot."""
        rows = zip(*[step.batch.groups for step in steps], strict=True)
        return all(
            3 * sum([step_rows.num_unique for step_rows in of_group]) <= group.num_slots
            or group.num_slots >= group.group.num_rows
            for of_group, group in zip(rows, self.levels[0].groups, strict=True)
        )

    def _enter(self, steps: Sequence[Scheduled[BatchRows]]) -> None:
        plan = steps[0].step if self._next_plan is None else self._next_plan
        bundle = Bundle.of(plan, steps)
        # first the lowest, which keeps track of most rows, so that a refusal comes before anything has changed
        for level in reversed(self.levels):
            level.enter(bundle.keys, plan)
        self.known.append(bundle)
        self._next_plan = plan + 1

    def end(self) -> None:
        if self._open:
            self._enter(self._open)
            self._open = []
        self.known.end()

    @property
    def wants_batch(self) -> int:
        """How many batches may be added now, as each ends one plan at most; 0 once the next plan can be made, or the
        data has ended."""
        return self.known.wants(len(self._open))

    @property
    def horizon(self) -> int:
        """The batches that may have to be known beyond the next one for a plan."""
        of_batches = self.known.num_ahead + 2 * (self.bundle - 1)  # the first and the last bundle may be full
        return max(of_batches, (self.known.least_plans + 1) * self.bundle - 1)

    @property
    def num_known(self) -> int:
        """Returns the number of known batches."""
        return self.known.num_batches + len(self._open)

    def ready(self) -> bool:
        """Whether the next plan can be made: there is a bundle, and its horizon is complete or the data has ended."""
        return self.known.ready

    @property
    def checkpoint_due(self) -> bool:
        """Whether the next plan must follow a checkpoint's barrier. The end of the data always has a barrier."""
        before = self._before
        has_passed = (
            before is not None and self.ready() and is_due(self.checkpoint_every, before, self.known.next.first)
        )
        return has_passed or self.evaluated

    @property
    def may_save(self) -> bool:
        """Whether a checkpoint between two plans would hold a step, and divides no evaluation that ends with one."""
        return self._before is not None and not (self.evaluating and self.saves_evaluations)

    def reaches(self, step: int, next_step: int) -> bool:
        """Whether a checkpoint that may not come before `step` comes before the next plan, which begins at `next_step`:
        alone before one that ends at `step` or later, among ranks where the plans of all have ended."""
        if self.rank.count == 1:
            return next_step >= step or self.known.ends_from(step)
        return next_step >= step and self._all_have_ended

    @property
    def _all_have_ended(self) -> bool:
        before = self._before
        if before is None or self.bundle == 1:
            return True
        at_multiple = before.kind == "train" and before.following.train_step % self.bundle == 0
        return at_multiple or (self.ready() and self._parts_all(before, self.known.next.first))

    @property
    def evaluated(self) -> bool:
        """Whether an evaluation that ends with a checkpoint is over."""
        has_ended = self.evaluating and self.ready() and self.known.next.first.kind == "train"
        return has_ended and self.saves_evaluations

    def plan(self) -> PlannedSteps:
        """Makes the next plan.

        Raises ConfigError, with nothing changed, if a group has fewer slots than the batch has rows.
        """
        moves = self.move()
        steps = tuple(self._step(number, moves) for number in range(len(moves.bundle.steps)))
        return PlannedSteps(plan=moves.bundle.plan, after_plan=moves.after_plan, steps=steps)

    def _step(self, number: int, moves: PlanMoves) -> StepPlan:
        step, places = moves.bundle.steps[number], moves.bundle.places[number]
        of_groups = zip(step.batch.groups, places, *moves.levels, strict=True)
        return StepPlan(
            step=step.step,
            kind=step.kind,
            train_step=step.train_step,
            epoch=step.epoch,
            batch_size=step.batch.size,
            groups=tuple(
                self.arranger.plan(group, rows, moves_of(number, own, of_levels), step.kind == "train")
                for group, (rows, own, *of_levels) in enumerate(of_groups)
            ),
        )

    def move(self) -> PlanMoves:
        """Plans like `plan`, but makes no array with an element per look-up."""
        bundle, known = self.known.next, self.known
        for index, keys in enumerate(bundle.keys):  # what fits the device fits every level
            if len(keys) > self.levels[0].groups[index].num_slots:  # then it is a single batch
                raise ConfigError(refusal(self.levels, index, bundle.first.step, len(keys)))
        moves = tuple(level.move(bundle, known.last_plan) for level in self.levels)
        after_plan = self._write_backs.after_plan(bundle.plan, moves[0])
        if self._auto is not None:
            groups = [group for level in self.levels for group in level.groups]
            known.num_ahead = self._auto.grow(groups, known)
        known.advance()
        self._last_planned, self._before, self.evaluating = bundle.plan, bundle.last, bundle.first.kind == "eval"
        self.counters.count(bundle, moves[0])
        return PlanMoves(bundle=bundle, after_plan=after_plan, levels=moves)

    def barrier(self, reason: str, finished: bool) -> BarrierPlan:
        """Returns a barrier after the last plan. After it, every row is in the store, or
        clean in a slot."""
        dirty = tuple(group.clean() for group in self.levels[0].groups)
        self._write_backs.settle(self._last_planned)
        self._num_barriers += 1
        self._before, self.evaluating = None, False
        self.counters.rows_flushed += sum(map(len, dirty))
        return BarrierPlan(
            barrier=self._num_barriers - 1, after_plan=self._last_planned, dirty=dirty, reason=reason, finished=finished
        )

    @property
    def occupancy(self) -> tuple[Occupancy, ...]:
        """Resident, dirty and free slots of each group on the device."""
        return tuple(group.occupancy for group in self.levels[0].groups)


def moves_of(number: int, places: Places, moves: Sequence[GroupMoves]) -> list[GroupMoves]:
    """Returns a group's moves for one step of the plan: its slots, and with the first step also what moves."""
    device, *below = moves
    slots = device.unique_slots[places]
    if number == 0:
        return [replace(device, unique_slots=slots), *below]
    return [
        GroupMoves(
            unique_slots=slots,
            fetch_slots=NO_SLOTS,
            fetch_keys=NO_ROWS,
            evict_keys=NO_ROWS,
            num_dirty=0,
            fill_after=None,
            last_evicted=None,
        )
    ]


def is_due(every: CheckpointInterval, before: Scheduled[BatchRows], following: Scheduled[BatchRows]) -> bool:
    if every == "epoch":
        return before.epoch != following.epoch
    return every > 0 and before.kind == "train" and (before.train_step + 1) % every == 0


class WriteBackWindow:
    """Dirty victims of the last `depth` plans, which may not have reached the store yet."""

    def __init__(self, depth: int, *, looks_beyond: bool) -> None:
        """`looks_beyond`: at least `depth` plans are known beyond the one being made."""
        self._depth, self._looks_beyond = depth, looks_beyond
        # plan, keys of each group's dirty victims
        self._recent: deque[tuple[int, tuple[I64, ...]]] = deque(maxlen=depth)
        self._settled: int | None = None

    def after_plan(self, plan: int, moves: tuple[GroupMoves, ...]) -> int | None:
        """Returns the last of these plans that evicted a row which this one fetches.

        Where plans look beyond the window, such a row had a known next use when it left, and its occurrence has the
        plan. Otherwise keys are compared.
        """
        if self._looks_beyond:
            least = max(plan - self._depth, 0 if self._settled is None else self._settled + 1)
            return max(
                (m.last_evicted for m in moves if m.last_evicted is not None and m.last_evicted >= least), default=None
            )
        fetched = [group_moves.fetch_keys for group_moves in moves]
        plans = (
            e for e, keys in reversed(self._recent) if any(share_key(*pair) for pair in zip(fetched, keys, strict=True))
        )
        after_plan = next(plans, None)
        self._recent.append((plan, tuple(group_moves.evict_keys[: group_moves.num_dirty] for group_moves in moves)))
        return after_plan

    def settle(self, plan: int | None) -> None:
        """Notes that all rows evicted up to `plan` are home."""
        self._recent.clear()
        self._settled = plan


def groupers_of(groups: tuple[GroupSpec, ...], pool: ThreadPool | None = None) -> tuple[Grouper, ...]:
    return tuple(Grouper(group, num_features(groups), pool) for group in groups)


def job_planner(
    job: Job,
    groups: tuple[GroupSpec, ...],
    slots: Sequence[Slots],
    first_batches: Sequence[Scheduled[Lookups]],
    *,
    num_threads: int = 1,
    rank: Rank = UNDIVIDED,
) -> RowPlanner:
    """Makes the planner of a job, the same for a run and for a simulation. `first_batches`: the batches that divided
    the capacity. The others as in RowPlanner."""
    least = job.lookahead.horizon_batches
    planner = RowPlanner(
        groups,
        slots,
        job.lookahead.depth,
        AutoHorizon(least, parse_bytes(job.lookahead.id_bytes)) if job.lookahead.horizon == "auto" else least,
        bundle=job.bundle,
        policy=job.cache.policy,
        first_batches=first_batches,
        num_threads=num_threads,
        rank=rank,
    )
    planner.checkpoint_every = job.checkpoint.interval
    planner.saves_evaluations = job.eval.keep == "best"
    return planner


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
