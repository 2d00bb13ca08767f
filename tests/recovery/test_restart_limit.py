"""All killed prefetchers of a host are started again: not for ever, and yet for as long as a run takes.

torchrun starts refused trainers again; they must not take the end of an earlier run for their own.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.run.all_ranks import MOST_RESTARTS, WITHIN_S, Restarts
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import seen
from rowcast.runtime.process import Child, Signals, ended_together
from rowcast.runtime.run_directory import COMPLETE, Completion, RunDirectory
from rowcast.trainer.run.attempt import TrainerRun
from tests.support import jobs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


def test_a_process_that_is_killed_at_every_attempt_is_given_up(
    clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    restarts = Restarts()
    allowed = []
    for _ in range(MOST_RESTARTS + 1):
        allowed.append(restarts.allows("prefetcher of rank 1"))
        clock[0] += WITHIN_S / MOST_RESTARTS - 1.0  # the slowest that is a loop
    assert allowed == [True] * MOST_RESTARTS + [False]
    assert "the prefetcher of rank 1 was started again 10 times within 24 hours" in "".join(capfd.readouterr())
    assert restarts.allows("prefetcher of rank 0"), "each rank has its own"


def test_rare_kills_of_a_run_of_weeks_never_end_it(clock: list[float]) -> None:
    restarts = Restarts()
    for _ in range(10 * MOST_RESTARTS):
        assert restarts.allows("prefetcher of rank 1")
        clock[0] += WITHIN_S / MOST_RESTARTS


@pytest.mark.parametrize(("killed", "count"), [(1, 1), (1, 2), (2, 2), (4, 4)])
def test_all_that_are_killed_at_once_are_started_again_though_no_other_lives(killed: int, count: int) -> None:
    children = [Child(f"rank {rank}", subprocess.Popen(["cat"], stdin=subprocess.PIPE), None) for rank in range(count)]
    first = list(children)
    again: list[str] = []

    def another(child: Child) -> Child:
        again.append(child.name)
        return Child(child.name, subprocess.Popen(["true"]), None)

    def meanwhile() -> None:
        """Kills them between two looks, and lets the others end once all are back."""
        if not again:
            for child in first[:killed]:
                child.process.kill()
                child.process.wait()
        for child in first if len(again) == killed else ():
            assert child.process.stdin is not None
            child.process.stdin.close()

    assert ended_together(children, another, meanwhile) is None
    assert again == [child.name for child in first[:killed]]
    assert [child.code for child in children] == [0] * count


def test_one_that_fails_is_not_hidden_by_another_that_is_started_again() -> None:
    children = [
        Child(name, subprocess.Popen(["sh", "-c", what]), None) for name, what in (("a", "kill -9 $$"), ("b", "exit 5"))
    ]
    for child in children:
        child.process.wait()
    failed = ended_together(
        children, lambda child: Child("a", subprocess.Popen(["true"]), None) if child.name == "a" else None
    )
    assert failed is not None
    assert (failed.name, failed.code) == ("b", 5)


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
