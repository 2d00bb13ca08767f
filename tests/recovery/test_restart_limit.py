"""How often the prefetcher of a rank is started again: not for ever, and yet for as long as a run takes."""

import time

import pytest

from rowcast.prefetcher.run.all_ranks import MOST_RESTARTS, WITHIN_S, Restarts


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
