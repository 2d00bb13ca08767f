"""The planner: batches in, step plans out. A plan is a function of the data, the first step, the slots and the horizon alone."""

from collections import deque
from dataclasses import dataclass

from prefetcher.compiled import compiled
from prefetcher.planner.group_planner import GroupPlanner, Occupancy
from prefetcher.planner.grouping import I64
from prefetcher.planner.horizon import Horizon, KnownBatch
from protocol.batch import ScheduledBatch
from protocol.errors import ConfigError
from protocol.plan import BarrierPlan, GroupPlan, StepPlan
from protocol.tables import GroupSpec


@dataclass(kw_only=True, slots=True)
class PlanCounters:
    """Sums over all plans and groups."""

    lookups: int = 0
    unique_rows: int = 0  # distinct rows of each batch
    hits: int = 0  # of them, resident when planned
    rows_fetched: int = 0
    rows_evicted: int = 0
    rows_written_back: int = 0  # dirty victims
    rows_flushed: int = 0  # dirty rows at barriers

    def count(self, plan: GroupPlan) -> None:
        self.lookups += len(plan.slots)
        self.unique_rows += len(plan.unique_slots)
        self.hits += len(plan.unique_slots) - len(plan.fetch)
        self.rows_fetched += len(plan.fetch)
        self.rows_evicted += len(plan.evict)
        self.rows_written_back += plan.num_dirty


class RowPlanner:
    """One caller, one thread. `add` batches while `wants_batch` is above 0, `end` when there are no more, `plan` while `ready`.

    groups: every group of the job. slots: device slots of each. depth: steps of rows in flight. horizon: batches known beyond the one
    being planned; plans use exactly these, so they do not depend on when batches are added.
    """

    def __init__(self, groups: tuple[GroupSpec, ...], slots: tuple[int, ...], depth: int, horizon: int) -> None:
        assert len(groups) == len(slots), f"{len(groups)} groups, but slots for {len(slots)}"
        assert depth >= 1, f"a depth of {depth} steps"
        num_features = sum(group.num_features for group in groups)
        self._groups = tuple(GroupPlanner(group, n, horizon, num_features) for group, n in zip(groups, slots, strict=True))
        self._horizon = Horizon(horizon)
        self._written_back: deque[tuple[int, tuple[I64, ...]]] = deque(maxlen=depth)  # step, keys of the dirty victims of each group
        self._last_planned: int | None = None
        self._num_barriers = 0
        self.counters = PlanCounters()

    def add(self, scheduled: ScheduledBatch) -> None:
        """The next batch enters the horizon: steps follow each other without gaps, from any first step."""
        self._horizon.check_next(scheduled.step)
        entered = tuple(group.enter(scheduled.batch, scheduled.step) for group in self._groups)
        self._horizon.append(KnownBatch(scheduled=scheduled, groups=entered))

    def end(self) -> None:
        """No further batch."""
        self._horizon.end()

    @property
    def wants_batch(self) -> int:
        """Batches still needed before `ready`; none beyond them is taken. 0 once the data has ended."""
        return self._horizon.wants

    @property
    def num_known(self) -> int:
        """Batches known and not planned yet."""
        return len(self._horizon.batches)

    def ready(self) -> bool:
        """Whether the next step can be planned: its horizon is complete or the data has ended, and there is a batch."""
        return self._horizon.ready

    def plan(self) -> tuple[ScheduledBatch, StepPlan]:
        """Plans the next step. Raises ConfigError, with nothing changed, where a group has fewer slots than the batch has rows."""
        known = self._horizon.next
        self._check_capacity(known)
        scheduled, last_step = known.scheduled, self._horizon.last_step
        train = scheduled.kind == "train"
        plans = tuple(
            group.plan(lookups, scheduled.step, last_step, train) for group, lookups in zip(self._groups, known.groups, strict=True)
        )
        after_step = self._after_step(plans)
        self._written_back.append((scheduled.step, tuple(plan.evict.keys[: plan.num_dirty] for plan in plans)))
        self._horizon.advance()
        self._last_planned = scheduled.step
        for plan in plans:
            self.counters.count(plan)
        return scheduled, StepPlan(
            step=scheduled.step,
            kind=scheduled.kind,
            train_step=scheduled.train_step,
            epoch=scheduled.epoch,
            after_step=after_step,
            groups=plans,
        )

    def barrier(self, reason: str, finished: bool) -> BarrierPlan:
        """A barrier after the last planned step. Every row is in the store or clean in a slot once it is done, so nothing stays pending."""
        dirty = tuple(group.clean() for group in self._groups)
        self._written_back.clear()
        self._num_barriers += 1
        self.counters.rows_flushed += sum(map(len, dirty))
        return BarrierPlan(barrier=self._num_barriers - 1, after_step=self._last_planned, dirty=dirty, reason=reason, finished=finished)

    @property
    def occupancy(self) -> tuple[Occupancy, ...]:
        """Resident, dirty and free slots of each group."""
        return tuple(group.occupancy for group in self._groups)

    def check_integrity(self) -> None:
        """Raises AssertionError with both numbers where directory, slots, queues and horizon disagree. For idle times and tests."""
        for index, group in enumerate(self._groups):
            group.check_integrity([(batch.scheduled.step, batch.groups[index]) for batch in self._horizon.batches])

    def _after_step(self, plans: tuple[GroupPlan, ...]) -> int | None:
        for step, written_back in reversed(self._written_back):
            if any(share_key(plan.fetch.keys, keys) for plan, keys in zip(plans, written_back, strict=True)):
                return step
        return None

    def _check_capacity(self, known: KnownBatch) -> None:
        for group, lookups in zip(self._groups, known.groups, strict=True):
            if lookups.num_unique > group.num_slots:
                raise ConfigError(self._refusal(known.scheduled.step, group, lookups.num_unique))

    def _refusal(self, step: int, refused: GroupPlanner, num_rows: int) -> str:
        """One group's slots follow its capacity; several share one, which is raised in proportion."""
        group = refused.group
        what = f"step {step} touches {num_rows} distinct rows of group {group.name}, more than its {refused.num_slots} slots"
        needed = f"{num_rows} rows ({num_rows * group.record_bytes} bytes)"
        if len(self._groups) == 1:
            return f"{what}; raise cache.capacity to at least {needed}, or make data.batch_size smaller"
        total = sum(other.num_slots * other.group.record_bytes for other in self._groups)
        enough = -(-total * num_rows // max(1, refused.num_slots))
        return f"{what}; it needs {needed}, so raise cache.capacity from {total} to about {enough} bytes, or make data.batch_size smaller"


@compiled
def share_key(some: I64, others: I64) -> bool:
    """Whether two ascending arrays have a key in common."""
    i = j = 0
    while i < len(some) and j < len(others):
        if some[i] == others[j]:
            return True
        if some[i] < others[j]:
            i += 1
        else:
            j += 1
    return False
