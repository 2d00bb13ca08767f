"""The planner once more, by brute force: dicts, sorts and scans over the whole trace, nothing kept incrementally."""

import math
from typing import Any

import numpy as np

from rowcast.job.schema import EVICTION_POLICIES
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import BarrierPlan, GroupPlan, PlannedSteps, RowMove, StepPlan
from rowcast.trainer.kernels.choose import lookup_arrays
from tests.support.planner_runs import Entry, Run, distinct_keys, i32, i64, lookups_of, plan_bags


class GroupOracle:
    def __init__(self, run: Run, index: int) -> None:
        self.group = run.groups[index]
        self.num_slots = run.slots[index]
        self.policy = run.policy
        self.horizon = run.horizon if EVICTION_POLICIES[run.policy].looks_ahead else 0
        self.uses = [(scheduled.step, set(distinct_keys(self.group, scheduled.batch))) for scheduled in run.trace]
        self.first_uses = [keys for _, keys in self.uses[: run.num_first]]
        self.num_uses: dict[int, int] = {}  # of resident rows, since their fill
        self.slot: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self.dirty: set[int] = set()

    def next_use(self, key: int, step: int) -> float:
        return min((s for s, keys in self.uses if step < s <= step + self.horizon and key in keys), default=math.inf)

    def rank(self, key: int, step: int) -> Any:
        """The least leaves first, ties by oldest last use, then key."""
        next_use = self.next_use(key, step)
        match self.policy:
            case "lookahead" | "lru":
                return -next_use
            case "lfu":
                return self.num_uses[key]
            case "static":
                return sum(key in keys for keys in self.first_uses)
        raise NotImplementedError(f"the order of {self.policy} is to be written down here")

    def victims(self, count: int, step: int, own: list[int]) -> list[int]:
        others = [key for key in self.slot if key not in own]
        others.sort(key=lambda key: (self.rank(key, step), self.last_use[key], key))
        return sorted(others[:count], key=lambda key: (key not in self.dirty, key))

    def plan(self, scheduled: ScheduledBatch) -> GroupPlan:
        batch, step = scheduled.batch, scheduled.step
        lookups, keys = lookups_of(self.group, batch), distinct_keys(self.group, batch)
        missing = [key for key in keys if key not in self.slot]
        free = sorted(set(range(self.num_slots)) - set(self.slot.values()))
        victims = self.victims(max(0, len(missing) - len(free)), step, keys)
        num_dirty = sum(key in self.dirty for key in victims)
        left = [self.slot[key] for key in victims]
        fill_after = max((self.last_use[key] for key in victims), default=None)
        for key in victims:
            del self.slot[key], self.num_uses[key]
            self.dirty.discard(key)
        fetch_slots = [*left, *free][: len(missing)]
        self.slot.update(zip(missing, fetch_slots, strict=True))
        self.last_use.update((key, step) for key in keys)
        self.num_uses.update((key, self.num_uses.get(key, 0) + 1) for key in keys)
        if scheduled.kind == "train":
            self.dirty.update(keys)
        counts, starts = plan_bags(self.group, batch)
        arrays = lookup_arrays(
            i64([key for key, _, _ in lookups]),
            i32([self.slot[key] for key, _, _ in lookups]),
            None if batch.offsets is None or len(starts) == self.group.num_features else i64(counts),
            None if batch.weights is None else batch.weights[[i for _, _, i in lookups]],
            np.array(starts, np.int32) if starts else None,
        )
        return GroupPlan(
            **arrays.named(),
            fetch_slots=i32(fetch_slots),
            fetch_keys=i64(missing),
            evict_keys=i64(victims),
            num_dirty=num_dirty,
            fill_after=fill_after,
            load_keys=i64([]),
            spill_keys=i64([]),
        )

    def clean(self) -> RowMove:
        dirty = sorted(self.dirty)
        self.dirty.clear()
        return RowMove(keys=i64(dirty), slots=i32([self.slot[key] for key in dirty]))


def oracle_entries(run: Run) -> list[Entry]:
    """The plan stream of a run."""
    groups = [GroupOracle(run, index) for index in range(len(run.groups))]
    written_back: dict[int, set[tuple[int, int]]] = {}  # step -> (group, key)
    entries: list[Entry] = []
    num_barriers = 0
    for scheduled in run.trace:
        step = scheduled.step
        plans = tuple(group.plan(scheduled) for group in groups)
        fetched = {(g, key) for g, plan in enumerate(plans) for key in plan.fetch_keys.tolist()}
        recent = [e for e in range(step - run.depth, step) if written_back.get(e, set()) & fetched]
        written_back[step] = {
            (g, key) for g, plan in enumerate(plans) for key in plan.evict_keys[: plan.num_dirty].tolist()
        }
        entries.append(
            PlannedSteps(
                plan=step,
                after_plan=max(recent, default=None),
                steps=(
                    StepPlan(
                        step=step,
                        kind=scheduled.kind,
                        train_step=scheduled.train_step,
                        epoch=scheduled.epoch,
                        batch_size=scheduled.batch.size,
                        groups=plans,
                    ),
                ),
            )
        )
        if step in run.barriers:
            dirty = tuple(group.clean() for group in groups)
            entries.append(
                BarrierPlan(barrier=num_barriers, after_plan=step, dirty=dirty, reason="checkpoint", finished=False)
            )
            written_back.clear()
            num_barriers += 1
    return entries


def fewest_fetches(batches: list[set[int]], num_slots: int) -> int:
    """The fewest rows that any choice of victims fetches, by trying every subset that could stay at every step."""
    cost = {frozenset[int](): 0}
    for rows in batches:
        following: dict[frozenset[int], int] = {}
        for resident, fetched in cost.items():
            others = sorted(resident - rows)
            for chosen in range(2 ** len(others)):
                kept = frozenset(rows | {row for i, row in enumerate(others) if chosen >> i & 1})
                if len(kept) <= num_slots:
                    following[kept] = min(following.get(kept, 10**9), fetched + len(rows - resident))
        cost = following
    return min(cost.values())
