"""torchrun starts refused trainers again; they must not take the end of an earlier run for their own."""

import os
from pathlib import Path

import pytest

from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import seen
from rowcast.runtime.process import Signals
from rowcast.runtime.run_directory import COMPLETE, Completion, RunDirectory
from rowcast.trainer.run.attempt import TrainerRun
from tests.support import jobs


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Of a run of two ranks that has ended."""
    RunDirectory(tmp_path, "trainer").mark_complete(Completion(train_steps=7, epochs=1))
    return jobs.job(job={"run_dir": str(tmp_path)}, ranks={"count": 2})


def start(job: Job, monkeypatch: pytest.MonkeyPatch, restarts: int) -> None:
    """Rank 1, as torchrun starts it."""
    numbers = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29400}
    for name, number in {**numbers, "TORCHELASTIC_RESTART_COUNT": restarts}.items():
        monkeypatch.setenv(name, str(number))
    TrainerRun(job, Signals()).run()


def test_a_trainer_that_was_refused_is_refused_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = seen(os.getppid())
    assert launcher is not None
    os.utime(job.run_dir / COMPLETE, (launcher.began_s - 1, launcher.began_s - 1))
    for restarts in range(3):
        with pytest.raises(ConfigError, match="finished after 7 train steps"):
            start(job, monkeypatch, restarts)


def test_a_trainer_that_was_killed_after_the_last_step_ends_in_order(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    start(job, monkeypatch, 1)
