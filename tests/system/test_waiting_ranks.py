"""A rank that waits for others handles signals, notices errors of its own threads, and gives up in time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rowcast.runtime.errors import ConfigError, PeerLost

ROOT = Path(__file__).parents[2]
RANKS = 3
LOST = 1  # the rank that is stopped or killed


class Ranks:
    """Three processes of `tests.support.waiting_rank`."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        arguments = [sys.executable, "-m", "tests.support.waiting_rank", str(folder)]
        self.processes = [
            subprocess.Popen(
                [*arguments, str(number), str(RANKS), str(timeout_s)],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(RANKS)
        ]
        self.until(lambda: all(self.exchanges(number) > 2 for number in range(RANKS)))

    def exchanges(self, number: int) -> int:
        made = self.folder / f"exchanges-{number}"
        return made.stat().st_size if made.exists() else 0

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(6000):
            if condition():
                return
            time.sleep(0.01)
        pytest.fail("not within a minute")

    def stop_one(self) -> None:
        """Returns once the others wait for it."""
        self.processes[LOST].send_signal(signal.SIGSTOP)
        before = -1
        while before != (now := self.exchanges(0) + self.exchanges(2)):
            before = now
            time.sleep(0.3)

    def ends(self, number: int) -> tuple[int, str]:
        _, sentence = self.processes[number].communicate(timeout=60)
        return self.processes[number].returncode, sentence

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(tmp_path, request.param)
    yield started
    started.close()


@pytest.mark.parametrize("ranks", [60.0], indirect=True)
def test_a_rank_that_waits_handles_a_signal_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    ranks.stop_one()
    waiting_since = ranks.exchanges(0)
    ranks.processes[0].send_signal(signal.SIGTERM)
    ranks.until(lambda: (tmp_path / "signal-0").exists())
    assert ranks.exchanges(0) == waiting_since, "it was to wait all the time"
    (tmp_path / "enough").touch()
    ranks.processes[LOST].send_signal(signal.SIGCONT)
    assert [ranks.ends(number)[0] for number in range(RANKS)] == [0, 0, 0]


@pytest.mark.parametrize("ranks", [60.0], indirect=True)
def test_an_error_of_another_thread_ends_the_wait(ranks: Ranks, tmp_path: Path) -> None:
    ranks.stop_one()
    (tmp_path / "failed").touch()
    for number in (0, 2):
        assert ranks.ends(number) == (ConfigError.exit_code, "another thread has failed\n")


@pytest.mark.parametrize("ranks", [2.0], indirect=True)
def test_a_rank_that_does_not_come_is_given_up_after_the_time_out(ranks: Ranks) -> None:
    ranks.stop_one()
    for number in (0, 2):
        code, sentence = ranks.ends(number)
        assert code == PeerLost.exit_code, sentence
        # the first that gives up closes its connections, which the other may see before its own time is up
        assert f"rank {number} of 3" in sentence
        assert "test numbers" in sentence
        assert "ranks.timeout" in sentence or "lost another rank" in sentence


@pytest.mark.parametrize("ranks", [60.0], indirect=True)
def test_a_killed_rank_ends_the_others_at_once(ranks: Ranks) -> None:
    ranks.processes[LOST].kill()
    for number in (0, 2):
        code, sentence = ranks.ends(number)
        assert code == PeerLost.exit_code, sentence
        assert f"rank {number} of 3 lost another rank while they exchanged test numbers" in sentence
