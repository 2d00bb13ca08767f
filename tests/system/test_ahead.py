"""Rows are at most `depth` steps ahead of the trainer, plans a few more; at a barrier nothing is ahead."""

from collections.abc import Callable

import pytest

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.pipeline.fetcher import PlannedBarrier
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import Finished, Keys, Records
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.messages import PlanReady
from rowcast.protocol.plan import PlannedSteps, pack
from rowcast.runtime.stages import Stage
from rowcast.trainer.step.cache import ArrivedPlan
from tests.support import driver
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, MemoryCheckpointer, Settings

LARGE_RING = 2**24
NUM_STEPS = 24
QUIET_ROUNDS = 200  # rounds over all stages without progress: the late store's dice come up long before


def workload(depth: int, eval_at: tuple[int, ...] = (4, 9)) -> tuple[Job, list[ScheduledBatch]]:
    job = small_job("adagrad", "single", depth=depth, horizon=3)
    return job, small_batches(job, "single", num_steps=NUM_STEPS - len(eval_at), eval_at=eval_at)


def make_run(job: Job, batches: list[ScheduledBatch], capacity: str, seed: int = 0) -> InProcessRun:
    slots = slots_for(group_specs(job), batches, capacity)
    return InProcessRun(job, batches, Settings(slots=slots, ring_bytes=LARGE_RING, seed=seed, late_store=seed % 2 == 1))


def advance_until_quiet(run: InProcessRun, held: Stage | None = None) -> None:
    """Every stage and stream of both sides but the one held, until none can do anything more."""
    everything = [*run.prefetcher.stages.values(), *run.trainer.stages.values(), run.streams.advance]
    stages = [stage for stage in everything if stage is not held]
    quiet = 0
    while quiet < QUIET_ROUNDS:
        progress = sum(stage() for stage in stages)
        quiet = 0 if progress else quiet + 1


class Arrivals:
    """What arrives at the trainer, which is held before a step: it may fill that step's rows, but not begin it."""

    def __init__(self, run: InProcessRun, held_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        self.held_before: int | None = held_before
        self._cache = run.trainer.cache
        self._take_filled: Callable[[], ArrivedPlan | None] = self._cache.take_filled
        self._next = 0
        monkeypatch.setattr(self._cache, "take_filled", self._take)
        run.trainer.conversation.listen({PlanReady: self._accept})

    def _accept(self, message: PlanReady) -> None:
        assert message.num_pieces == 1, "the ring is large"
        self.steps.append(message.plan)
        self._cache.accept(message)

    def _take(self) -> ArrivedPlan | None:
        if self._next == self.held_before:
            return None
        step = self._take_filled()
        self._next += step is not None
        return step


@pytest.mark.parametrize(("depth", "held_before"), [(2, 0), (1, 1), (4, 5), (2, 13)])
def test_with_the_trainer_held_before_a_step_exactly_the_next_depth_steps_arrive(
    depth: int, held_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, batches = workload(depth)
    run = make_run(job, batches, "everything", seed=held_before)
    arrivals = Arrivals(run, held_before, monkeypatch)
    advance_until_quiet(run)
    assert run.prefetcher.fetcher.done_through == (held_before - 1 if held_before else None)
    assert arrivals.steps == list(range(held_before + depth + 1))
    assert run.prefetcher.fetcher.sent_through == held_before + depth
    assert run.prefetcher.planning.due.planned_through == held_before - 1 + 2 * depth + 2
    arrivals.held_before = None
    run.run()
    assert arrivals.steps == list(range(NUM_STEPS))


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_the_planner_stays_within_twice_the_depth_and_two_of_the_last_step_done(depth: int, seed: int) -> None:
    job, batches = workload(depth)
    run = make_run(job, batches, "more", seed)
    ahead: list[int] = []

    def note(plan: PlannedSteps) -> None:
        done = run.prefetcher.fetcher.done_through
        ahead.append(plan.plan - (-1 if done is None else done))

    run.prefetcher.planning.on_plan = note
    run.run()
    assert len(ahead) == NUM_STEPS
    assert max(ahead) == 2 * depth + 2, "the whole distance is used, and no more"


class BarrierWatch(MemoryCheckpointer):
    """Looks at the rings when the barrier has begun: everything before it is done and home."""

    def __init__(self) -> None:
        super().__init__()
        self.run: InProcessRun | None = None

    def begin(self, barrier: PlannedBarrier) -> bool:
        assert self.run is not None
        prefetcher, trainer = self.run.prefetcher, self.run.trainer
        assert prefetcher.fetcher.done_through == barrier.plan.after_plan
        assert prefetcher.writeback.applied_through == barrier.plan.after_plan
        assert prefetcher.writeback.queued == trainer.sender.queued == trainer.cache.plans_waiting == 0
        while trainer.conversation.advance():  # the last Released may still be on its way
            continue
        assert prefetcher.fetch_ring.used_bytes == 0
        assert self.run.rings.of_trainer.back.used_bytes == 0
        return super().begin(barrier)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_barrier_waits_for_rows_that_were_sent_home_but_are_not_in_the_store(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = BarrierWatch()
    monkeypatch.setattr(driver, "MemoryCheckpointer", lambda: watch)
    job, batches = workload(depth)
    run = watch.run = make_run(job, batches, "one batch")
    run.advance_until(lambda: run.prefetcher.fetcher.sent_through == NUM_STEPS - 1)
    advance_until_quiet(run, held=run.prefetcher.stages["write-back"])
    assert run.prefetcher.fetcher.done_through == NUM_STEPS - 1
    assert run.prefetcher.writeback.queued > 0, "every row was in the store already"
    assert watch.begun == []
    run.run()
    assert len(watch.begun) == 1


class ReadKeys(MemoryStore):
    """A memory store that remembers what was read from it."""

    def __init__(self, group: GroupSpec) -> None:
        super().__init__(group)
        self.read_keys: list[int] = []

    def read(self, keys: Keys, out: Records) -> Finished:
        self.read_keys += keys.tolist()
        return super().read(keys, out)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_after_a_barrier_is_read_or_sent_before_the_barrier_is_done(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "MemoryStore", ReadKeys)
    job, batches = workload(depth=2)
    run = make_run(job, batches, "one batch", seed)
    prefetcher = run.prefetcher
    fetcher, planning, planner = prefetcher.fetcher, prefetcher.planning, prefetcher.planner
    last = 5 + seed
    run.advance_until(lambda: planning.due.planned_through == last)
    prefetcher.stop("a barrier in the middle")
    assert planning.plan_next()
    planner.end()
    plan = planner.plan()
    assert any(len(group.fetch_keys) for group in plan.move), "the later plan has nothing to read"
    prefetcher.plans.append(pack([planning._samples[0]], plan))
    run.advance_until(lambda: prefetcher.barrier.ended)
    assert (fetcher.sent_through, fetcher.reading, len(prefetcher.plans)) == (last, 0, 1)
    assert [plan.step for plan in run.plans] == list(range(last + 1))
    for index, store in enumerate(run.plain_stores):
        assert isinstance(store, ReadKeys)
        planned = [key for earlier in run.plans for key in earlier.groups[index].fetch_keys.tolist()]
        assert sorted(store.read_keys) == sorted(planned)
