"""Each reason for which a process stands still, provoked once, shows in its counter and in no other."""

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

import rowcast.prefetcher.pipeline.metrics
import rowcast.trainer.step.metrics
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import Finished, Keys, Records
from rowcast.protocol.batch import Lookups, Scheduled
from rowcast.protocol.parts import Rank
from rowcast.protocol.scrape import CountersCollector, new_registry
from rowcast.runtime.disk import Disk
from rowcast.runtime.stages import Doorbell, Stage, StageThread
from rowcast.trainer.device.streams import Work
from rowcast.trainer.models.exchanges import LocalCollectives
from rowcast.trainer.step.metrics import TrainerCounters
from tests.support import driver, three_steps
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, ListSource, MemoryCheckpointer, Past, Settings, Sharing

DEADLINE_S = 20.0
REASONS = {
    "prefetcher": get_args(rowcast.prefetcher.pipeline.metrics.StallReason),
    "trainer": get_args(rowcast.trainer.step.metrics.StallReason),
}


class SilentSource(ListSource):
    """Batches that never come."""

    @property
    def ended(self) -> bool:
        return False

    def poll_ids(self) -> Scheduled[Lookups] | None:
        return None


class WaitingSource(SilentSource):
    """Batches of files that have not arrived (data.follow)."""

    def poll_ids(self) -> Scheduled[Lookups] | None:
        self.counters.awaits_file = True
        return None


class Never:
    def done(self) -> bool:
        return False


class StuckStore(MemoryStore):
    """Reads that never finish."""

    def read(self, keys: Keys, out: Records) -> Finished:
        return Never()  # type: ignore[return-value]


def in_process_run(
    capacity: str = "one batch",
    ring_bytes: int = 2**24,
    depth: int = 4,
    num_steps: int = 12,
    seeded_streams: bool = False,
    sharing: Sharing | None = None,
) -> InProcessRun:
    job = small_job("adagrad", "single", depth=depth, horizon=3)
    batches = small_batches(job, "single", num_steps=num_steps, eval_at=())
    slots = slots_for(group_specs(job), batches, capacity)
    settings = Settings(slots=slots, ring_bytes=ring_bytes, seeded_streams=seeded_streams)
    return InProcessRun(job, batches, settings, sharing=sharing)


def stages_of(run: InProcessRun) -> dict[str, Stage]:
    ours = {f"prefetcher {name}": stage for name, stage in run.prefetcher.stages.items()}
    theirs = {f"trainer {name}": stage for name, stage in run.trainer.stages.items()}
    return {**ours, **theirs, "streams": run.streams.advance}


def settle(run: InProcessRun, *held: str, until: Callable[[], bool] = lambda: False) -> None:
    """Advances every stage but those held, until none can do anything, or a condition."""
    stages = stages_of(run)
    free = [stage for name, stage in stages.items() if name not in held]
    assert set(held) <= stages.keys()
    while not until() and sum(stage() for stage in free):
        continue


def idle(stage: Stage, clock: Callable[[float], None], seconds: Mapping[Any, float]) -> set[str]:
    """Runs an idle stage on its thread, as a process does, until its clock has counted; returns what it counted."""
    errors: list[BaseException] = []
    before = dict(seconds)
    thread = StageThread("held", stage, Doorbell(), errors.append, clock)
    thread.start()
    deadline_s = time.monotonic() + DEADLINE_S
    while seconds == before and thread.alive and time.monotonic() < deadline_s:
        time.sleep(0.005)
    thread.stop()
    assert errors == []
    return {reason for reason, counted in seconds.items() if counted > before[reason]}


def served(collector: CountersCollector[Any, Any]) -> dict[str, float]:
    """The stalls as a scrape shows them."""
    families = text_string_to_metric_families(generate_latest(new_registry(collector)).decode())
    samples = [
        sample for family in families for sample in family.samples if sample.name == "rowcast_stall_seconds_total"
    ]
    return {sample.labels["reason"]: sample.value for sample in samples}


def assert_prefetcher_stalls(run: InProcessRun, stage: str, reason: str) -> None:
    engine = run.prefetcher
    assert idle(engine.stages[stage], engine.stall_clocks()[stage], engine.counters.stalls) == {reason}
    found = served(three_steps.prefetcher_collector(engine.counters))
    assert found == engine.counters.stalls
    assert found[reason] > 0


class BusyCheckpointer(MemoryCheckpointer):
    """The checkpoint before never gets onto the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = True


Patch = tuple[str, type]  # of the driver
# reason: the stage that waits, what is held, how the run is made, what stands in
PREFETCHER: dict[str, tuple[str, tuple[str, ...], dict[str, Any], tuple[Patch, ...]]] = {
    "data": ("planning", (), {}, (("ListSource", WaitingSource),)),
    "batches": ("planning", (), {}, (("ListSource", SilentSource),)),
    "plans": ("fetcher", ("prefetcher planning",), {}, ()),
    "credit": ("fetcher", ("trainer loop",), {"capacity": "everything"}, ()),
    "ring": ("fetcher", ("trainer loop",), {"ring_bytes": 24 * 1024}, ()),
    "store": ("fetcher", (), {}, (("MemoryStore", StuckStore),)),
    "write_back": ("fetcher", ("trainer sender",), {}, ()),
    "barrier": ("fetcher", ("trainer loop",), {"num_steps": 2}, ()),
    "checkpoint": ("fetcher", (), {"num_steps": 2}, (("MemoryCheckpointer", BusyCheckpointer),)),
}


@pytest.mark.parametrize("reason", PREFETCHER)
def test_what_the_prefetcher_waits_for_is_counted_under_its_reason(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, held, how, patches = PREFETCHER[reason]
    for name, stand_in in patches:
        monkeypatch.setattr(driver, name, stand_in)
    run = in_process_run(**how)
    settle(run, *held)
    assert reason != "write_back" or any(after is not None for after in run.after_plans)
    assert_prefetcher_stalls(run, stage, reason)


@pytest.mark.parametrize("source", [SilentSource, WaitingSource])
def test_to_wait_for_a_file_is_progress_and_for_a_reader_is_none(
    source: type[ListSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "ListSource", source)
    run = in_process_run()
    settle(run)
    first, second = (run.prefetcher.progress(0) for _ in range(2))
    assert (first.work < second.work) == (source is WaitingSource)
    assert (first.waiting_for == "files that arrive") == (source is WaitingSource)


def test_rows_that_find_no_room_beside_those_of_a_checkpoint_are_counted_under_checkpoint(tmp_path: Path) -> None:
    job = small_job("adagrad", "single", depth=4, horizon=3, checkpoint={"every": 4, "memory": 1})
    batches = small_batches(job, "single", num_steps=12, eval_at=())
    slots = slots_for(group_specs(job), batches, "one batch")
    past = Past(checkpoints=Checkpoints(tmp_path, Disk()), newest=None)
    run = InProcessRun(job, batches, Settings(slots=slots, seeded_streams=False), past)
    settle(run)
    assert run.trainer.loop.step_done in range(4, 7), "it waits after the first barrier and before the second"
    assert_prefetcher_stalls(run, "fetcher", "checkpoint")
    run.advance_until(lambda: run.trainer.loop.finished)


def assert_trainer_stalls(
    run: InProcessRun, stage: str, clock: Callable[[float], None], counters: TrainerCounters, reason: str
) -> None:
    assert idle(run.trainer.stages[stage], clock, counters.stalls) == {reason}
    found = served(three_steps.trainer_collector(counters))
    assert found == counters.stalls
    assert found[reason] > 0


def assert_loop_stalls(run: InProcessRun, reason: str) -> None:
    assert_trainer_stalls(run, "loop", run.trainer.loop.idled, run.trainer.counters, reason)


def test_a_prefetcher_that_is_too_slow_is_counted_under_rows() -> None:
    run = in_process_run()
    settle(run, until=lambda: run.trainer.loop.step_done == 3)
    settle(run, "prefetcher fetcher")
    assert_loop_stalls(run, "rows")
    assert run.trainer.counters.stalls["rows"] > 0


def test_a_device_that_is_too_slow_is_counted_under_results() -> None:
    run = in_process_run(seeded_streams=True)
    settle(run, until=lambda: run.trainer.loop.step_done == 3)
    settle(run, until=lambda: run.trainer.loop.step_begun != run.trainer.loop.step_done)
    settle(run, "streams")
    assert_loop_stalls(run, "results")


def test_a_loop_that_waits_for_a_flush_is_counted_under_barrier() -> None:
    run = in_process_run(num_steps=3)
    settle(run, until=lambda: run.trainer.barrier.stop_reason is not None)
    settle(run, "prefetcher fetcher")
    assert run.trainer.barrier.end is None
    assert_loop_stalls(run, "barrier")


def test_victims_that_find_no_space_are_counted_under_ring() -> None:
    run = in_process_run(ring_bytes=8 * 1024, depth=2)
    settle(run, "prefetcher write-back")
    assert run.trainer.sender.waiting_for_ring
    assert_trainer_stalls(run, "sender", run.trainer.stall_clocks["sender"], run.trainer.counters, "ring")


class Late:
    """The work of a collective that another rank begins 10 ms later."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        time.sleep(0.01)


class LateCollectives(LocalCollectives):
    def all_gather(self, output: Tensor, given: Tensor) -> Work:
        super().all_gather(output, given)
        return Late()


def assert_step_stalls(run: InProcessRun, reason: Literal["ranks"]) -> None:
    counters = run.trainer.counters
    before = dict(counters.stalls)
    done = run.trainer.loop.step_done
    settle(run, until=lambda: run.trainer.loop.step_done != done)
    assert {name for name, seconds in counters.stalls.items() if seconds > before[name]} == {reason}
    assert served(three_steps.trainer_collector(counters)) == counters.stalls
    assert counters.phases["exchange"] >= counters.stalls[reason] >= 0.01


def test_ranks_that_are_too_slow_are_counted_under_ranks() -> None:
    sharing = Sharing(rank=Rank(number=0, count=1, parts=2), collectives=LateCollectives())
    run = in_process_run(sharing=sharing)
    assert_step_stalls(run, "ranks")


def test_every_reason_of_both_processes_is_provoked_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    check = r'(?:assert_loop_stalls|assert_trainer_stalls|assert_step_stalls)\(run, .*"(\w+)"\)'
    assert set(re.findall(check, source)) == set(REASONS["trainer"])
    assert PREFETCHER.keys() == set(REASONS["prefetcher"])
