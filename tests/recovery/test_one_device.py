"""`trainer.device = "cuda:1"` touches no other device: all that a trainer asks of one is within that one's context."""

from collections.abc import Iterator

import pytest
import torch

from rowcast.job.file import load_job
from rowcast.runtime.process import Signals
from rowcast.trainer.run.attempt import TrainerRun
from tests.recovery.restarted import Recovering, end_well
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
