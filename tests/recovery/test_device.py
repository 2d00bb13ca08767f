"""`trainer.device = "cuda:1"` touches no other device: all that a trainer asks of one is within that one's context.

A device need not hold two caches: what a lost attempt had is gone before the next attempt makes its own.
"""

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rowcast.job.file import load_job
from rowcast.job.tables import GroupSpec
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.process import Signals
from rowcast.trainer.run.attempt import TrainerRun
from rowcast.trainer.step.engine import TrainerEngine
from rowcast.trainer.step.memory import make_records
from tests.recovery.restarted import Recovering, end_well, killed
from tests.support.one_device import OneDevice
from tests.support.processes import Session


@pytest.fixture
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_same_threads", "own_logs")
def test_a_run_asks_its_device_alone(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    device, run = OneDevice(monkeypatch), Recovering(session)
    prefetcher = run.start("prefetcher")
    TrainerRun(load_job(session.config), Signals()).run()
    end_well(prefetcher)
    main = ["kernels", "records", "page-locking", "streams", "allocation", "look-up", "update"]
    main += ["copy in", "fill", "compute", "event results", "event released", "event state_gathered"]
    assert device.work == {*((what, "MainThread") for what in main), ("evict", "sender"), ("event sent", "sender")}
    assert device.outside == set()


REJOIN = {"ring": "1MiB", "connect_timeout": "60s", "rejoin_timeout": "60s"}


@pytest.fixture
def _no_collection() -> Iterator[None]:
    """Python frees cycles when it sees fit; here nothing does but the product."""
    threads = torch.get_num_threads()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_no_collection", "own_logs")
def test_nothing_of_a_lost_attempt_is_left_when_the_next_one_makes_its_cache(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Recovering(session, transport=REJOIN)
    earlier: dict[str, weakref.ref[object]] = {}
    left: list[list[str]] = []

    def noted_records(slots: Sequence[int], groups: Sequence[GroupSpec], device: torch.device) -> list[Tensor]:
        left.append([name for name, held in earlier.items() if held() is not None])
        records = make_records(slots, groups, device)
        earlier.update({f"records {n}": weakref.ref(own) for n, own in enumerate(records)})
        return records

    def noted_engine(*parts: Any) -> TrainerEngine:
        engine = TrainerEngine(*parts)
        earlier.update({"engine": weakref.ref(engine), "cache": weakref.ref(engine.cache)})
        earlier.update({"model": weakref.ref(engine.loop._steps), "conversation": weakref.ref(engine.conversation)})
        return engine

    monkeypatch.setattr("rowcast.trainer.step.memory.make_records", noted_records)
    monkeypatch.setattr("rowcast.trainer.run.connection.TrainerEngine", noted_engine)
    lost = run.start("prefetcher", "PlanReady sent:24")

    def follow() -> None:
        killed(lost)
        end_well(run.start("prefetcher"))

    follower = threading.Thread(target=follow)
    follower.start()
    TrainerRun(load_job(session.config), Signals(), timeline=True).run()
    follower.join()
    assert left == [[], []]
    assert run.complete


@pytest.mark.usefixtures("_no_collection", "own_logs")
def test_a_model_without_room_beside_the_cache_is_a_sentence_of_both(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*parts: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore lines")

    monkeypatch.setattr("rowcast.trainer.run.attempt.StepRunner", refuse)
    prefetcher = Recovering(session).start("prefetcher")
    sentence = (
        "no room for the model on cpu beside the cache (CUDA out of memory. Tried to allocate); make cache.capacity "
        "smaller"
    )
    with pytest.raises(ConfigError) as refused:
        TrainerRun(load_job(session.config), Signals()).run()
    assert str(refused.value) == sentence
    assert sentence in prefetcher.ended().refused(2)
