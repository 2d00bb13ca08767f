"""Whoever makes work for a thread wakes it: no thread needs the time-out after which it would look again by itself.

Both processes' stages run in one thread, in an order that a seed decides, but only a stage that was woken may advance.
So a wake-up that is missing in one of the two tables leaves a run in which nobody is awake.
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rowcast.prefetcher.pipeline.engine
import rowcast.trainer.step.engine
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.writer import CheckpointWriter
from rowcast.prefetcher.stores.store import Keys, ReadTicket, Records, RowStore, Ticket
from rowcast.protocol.messages import Bye, Flush, Hello, PlanDone, PlanReady, Released, RowsBack
from rowcast.protocol.plan import GroupPlan
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.disk import Disk
from rowcast.runtime.stages import IDLE_WAIT_S, Stage, Wakes
from tests.support import driver, repeats
from tests.support.batches import slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, ListSource, Past, Settings
from tests.support.inproc_link import inproc_pair

TABLES: dict[str, Wakes] = {
    "prefetcher": rowcast.prefetcher.pipeline.engine.WAKES,
    "trainer": rowcast.trainer.step.engine.WAKES,
}
Thread = tuple[str, str]  # process, name


class PunctualSource(ListSource):
    """Batches that are never late: nothing here would ring for one that comes."""

    def __init__(self, batches: Any, chance: random.Random | None, start: Position) -> None:
        super().__init__(batches, None, start)


class AllAsleep(AssertionError):
    """No thread was woken, although the run is not over."""


class WokenOnly:
    """Advances a run's stages as threads would that never look by themselves."""

    def __init__(
        self, make_run: Callable[[Callable[[], tuple[Any, Any]]], InProcessRun], tables: Mapping[str, Wakes]
    ) -> None:
        self._tables = tables
        self._awake: set[Thread] = set()
        self.run = run = make_run(
            lambda: inproc_pair((lambda: self._wake("prefetcher", "mail"), lambda: self._wake("trainer", "mail")))
        )
        self._chance = random.Random(run.chance.random())
        names = {"mail": "mail", "loop": "main", "sender": "sender"}
        self._stages: dict[Thread, Stage] = {
            **{("prefetcher", name): stage for name, stage in run.prefetcher.stages.items()},
            **{("trainer", names[name]): stage for name, stage in run.trainer.stages.items()},
        }
        self._looks_s = {("prefetcher", name): look_s for name, look_s in run.prefetcher.looks_s.items()}
        if run.writer is not None:
            self._stages["prefetcher", "checkpoint"] = run.writer.advance
            run.writer.on_offer = lambda: self._wake("prefetcher", "checkpoint")
        for process, engine in (("prefetcher", run.prefetcher), ("trainer", run.trainer)):
            engine.conversation.on_message = partial(self._after, process)
        run.prefetcher.wake_after = partial(self._after, "prefetcher")
        run.trainer.sender.on_queued = partial(self._after, "trainer", "to send")
        self._awake |= self._stages.keys()  # a thread begins with a look

    def _wake(self, process: str, name: str) -> None:
        self._awake.add((process, name))

    def _after(self, process: str, cause: object) -> None:
        for name in self._tables[process].get(cause, ()):
            self._wake(process, name)

    def to_the_end(self) -> InProcessRun:
        self._until(lambda: self.run.trainer.loop.finished)
        self.run.trainer.say_bye()
        self._until(lambda: self.run.prefetcher.finished)
        return self.run

    def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            polling = {thread for thread, look_s in self._looks_s.items() if look_s() < IDLE_WAIT_S}
            able = sorted(self._stages.keys() & (self._awake | polling))
            if not able:
                raise AllAsleep(
                    f"prefetcher waits for {self.run.prefetcher.waiting_for}, "
                    f"trainer for {self.run.trainer.loop.waiting_for}"
                )
            process, name = thread = self._chance.choice(able)
            self._awake.discard(thread)
            if self._stages[thread]():
                self._awake.add(thread)
                self._after(process, name)


def run_woken(
    folder: Path,
    seed: int,
    tables: Mapping[str, Wakes] = TABLES,
    *,
    late_store: bool = False,
    capacity: str = "one batch",
    ring_bytes: int = 24 * 1024,
    harm: Callable[[RowStore], RowStore] | None = None,
) -> InProcessRun:
    """A run with evaluations and checkpoints in small rings."""
    folder.mkdir()
    job = small_job("adagrad", "multi", job={"run_dir": str(folder)}, checkpoint={"every": 4})
    batches = small_batches(job, "multi", num_steps=14)
    slots = slots_for(group_specs(job), batches, capacity)

    def make_run(links: Callable[[], tuple[Any, Any]]) -> InProcessRun:
        settings = Settings(
            slots=slots,
            seed=seed,
            ring_bytes=ring_bytes,
            late_store=late_store,
            seeded_streams=False,
            links=links,
            harm=harm,
        )
        return InProcessRun(job, batches, settings, Past(checkpoints=Checkpoints(folder, Disk()), newest=None))

    return WokenOnly(make_run, tables).to_the_end()


@pytest.mark.parametrize("seed", range(repeats.count(6, 60)))
def test_only_woken_threads_finish_a_run_with_checkpoints(seed: int, tmp_path: Path) -> None:
    run = run_woken(tmp_path / "run", seed)
    assert isinstance(run.writer, CheckpointWriter)
    assert run.prefetcher.barrier.finished
    assert len(run.results.losses) == 14


@pytest.mark.parametrize("seed", range(repeats.count(3, 30)))
def test_only_woken_threads_finish_a_run_with_a_slow_store(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "ListSource", PunctualSource)
    run = run_woken(tmp_path / "run", seed, late_store=True)
    assert len(run.results.losses) == 14


def run_seeds(folder: Path, tables: Mapping[str, Wakes], capacity: str) -> None:
    for seed in range(10):
        run_woken(folder / f"run-{seed}", seed, tables, capacity=capacity, ring_bytes=8 * 1024)


def without(process: str, cause: object, thread: str) -> dict[str, Wakes]:
    table = TABLES[process]
    names = table[cause]
    assert thread in names
    return {**TABLES, process: {**table, cause: tuple(name for name in names if name != thread)}}


NEEDED: list[tuple[str, object, str]] = [
    ("prefetcher", PlanDone, "fetcher"),
    ("prefetcher", PlanDone, "planning"),
    ("prefetcher", Released, "fetcher"),
    ("prefetcher", RowsBack, "write-back"),
    ("prefetcher", "plan made", "fetcher"),
    ("prefetcher", "no rows return", "write-back"),
    ("prefetcher", "write-back", "fetcher"),
    ("prefetcher", "checkpoint", "fetcher"),
    ("trainer", PlanReady, "main"),
    ("trainer", Flush, "main"),
    ("trainer", Released, "sender"),
    ("trainer", "to send", "sender"),
    ("trainer", "sender", "main"),
]


@pytest.mark.parametrize(("process", "cause", "thread"), NEEDED, ids=lambda value: getattr(value, "__name__", value))
def test_without_one_of_these_wakes_all_threads_may_fall_asleep(
    process: str, cause: object, thread: str, tmp_path: Path
) -> None:
    tables = without(process, cause, thread)
    capacity = "everything" if cause == "no rows return" else "one batch"  # it is needed by plans that return no rows
    with pytest.raises(AllAsleep):
        run_seeds(tmp_path, tables, capacity)


class Hinted(RowStore):
    """Notes the last plan that it was told of, and what `advance` was told after it."""

    works_ahead = True

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def read(self, keys: Keys, out: Records) -> ReadTicket:
        return self._store.read(keys, out)

    def write(self, keys: Keys, rows: Records) -> Ticket:
        return self._store.write(keys, rows)

    def close(self) -> None:
        self._store.close()

    def stage(self, step: int, plan: GroupPlan) -> None:
        self.staged, self.advanced = step, False

    def advance(self, home_through: int | None) -> bool:
        self.advanced, self.home_through = True, home_through
        return False


@pytest.mark.parametrize("cause", ["plan made", "write-back"])
@pytest.mark.parametrize("seed", range(3))
def test_the_staging_thread_is_woken_by_plans_and_by_rows_that_are_home(cause: str, seed: int, tmp_path: Path) -> None:
    told = list[Hinted]()

    def hint(store: RowStore) -> RowStore:
        told.append(Hinted(store))
        return told[-1]

    other = {"plan made": "write-back", "write-back": "plan made"}[cause]
    run_woken(tmp_path / "run", seed, without("prefetcher", other, "staging"), harm=hint)
    for store in told:
        assert store.staged == 15, "14 train steps and two evaluations"
        assert store.advanced if cause == "plan made" else store.home_through == store.staged


def test_a_store_that_does_nothing_ahead_has_no_thread_for_it(tmp_path: Path) -> None:
    threads = run_woken(tmp_path / "memory", 0).prefetcher.stages.keys()
    assert run_woken(tmp_path / "hinted", 0, harm=Hinted).prefetcher.stages.keys() - threads == {"staging"}


def test_every_thread_that_is_woken_exists() -> None:
    prefetcher = {"mail", "planning", "staging", "fetcher", "write-back", "checkpoint", "main"}
    for table, threads in ((TABLES["prefetcher"], prefetcher), (TABLES["trainer"], {"mail", "sender", "main"})):
        assert {name for names in table.values() for name in names} <= threads
        assert {cause for cause in table if isinstance(cause, str)} <= threads | {
            "plan made",
            "no rows return",
            "to send",
        }
    assert TABLES["prefetcher"][Hello][-1:] == TABLES["prefetcher"][Bye] == ("main",)
