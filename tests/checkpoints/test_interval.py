"""A time between checkpoints becomes a number of train steps once; a restart has its barriers at the same steps."""

from pathlib import Path

import pytest

from rowcast.prefetcher.checkpoints.interval import (
    AwaitedPace,
    PaceMeter,
    RankPace,
    held_after,
    keep_interval,
    read_interval,
)
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import RowcastError
from tests.checkpoints.faulty import Failure, FaultyDisk


def found(seconds: float, step_s: float, *, start: int = 0, ahead: int = 10) -> tuple[int, int]:
    """(train steps between checkpoints, steps done when that was known) of a run whose every step takes so long."""
    now = [0.0]
    meter = PaceMeter(seconds, start, 1, lambda: now[0])
    for done in range(100_000):
        steps = meter.steps(done, start + done + ahead)
        if steps is not None:
            return steps, done
        now[0] += step_s
    raise AssertionError("the pace was never known")


def test_ten_minutes_are_as_many_steps_as_ten_minutes_take() -> None:
    steps, done = found(600, 0.1)
    assert steps == 6000
    assert done * 0.1 < 35, "it is known long before the first checkpoint"


def test_steps_that_take_minutes_are_counted_too() -> None:
    assert found(600, 240)[0] >= 2
    steps, done = found(600, 3600, ahead=0)
    assert done <= 3, "a step that takes longer than the interval is followed by a checkpoint as soon as that is seen"
    assert steps <= done + 1


@pytest.mark.parametrize("start", [0, 1, 95, 5000])
@pytest.mark.parametrize("seconds", [1, 3, 60])
def test_no_checkpoint_would_have_been_due_among_the_steps_that_were_planned_before(start: int, seconds: float) -> None:
    steps, done = found(seconds, 0.09, start=start)
    planned = range(start + 1, start + done + 10 + 1)
    assert not [step for step in planned if step % steps == 0]


def test_the_number_is_kept_for_the_same_time_only(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert read_interval(root, "10m") is None
    keep_interval(Disk(), root, "10m", 6000)
    assert read_interval(root, "10m") == 6000
    assert read_interval(root, "5m") is None
    (root / "interval.json").write_bytes(b'{"every": "10m", "steps": -3}')
    assert read_interval(root, "10m") is None
    (root / "interval.json").write_bytes(b"\xff")
    assert read_interval(root, "10m") is None


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    with pytest.raises(RowcastError, match="nothing can be written there"):
        keep_interval(FaultyDisk(Failure("write", 0, "ENOSPC")), tmp_path, "10m", 6000)


@pytest.mark.parametrize("ahead", [4, 10, 66])
@pytest.mark.parametrize("start", [0, 7, 1000])
@pytest.mark.parametrize("seconds", [0.001, 1, 600])
def test_no_rank_has_planned_beyond_a_checkpoint_when_the_first_one_knows_the_interval(
    seconds: float, start: int, ahead: int
) -> None:
    now, late = [0.0], 0
    pace = RankPace(seconds, start, ahead, 1, lambda: now[0])
    other = AwaitedPace(lambda: None, ahead)
    steps = None
    for done in range(0, 1000, ahead):  # as coarse as it can be seen
        now[0] += 0.1
        steps = pace.steps(done, start + done + ahead)
        if steps is not None:
            late = done
            break
    assert steps is not None
    planned = [late + ahead, next(n for n in range(1000) if other.must_wait(n))]
    assert max(planned) <= held_after(ahead)
    assert not any((start + n) % steps == 0 for n in range(1, max(planned) + 1)), (steps, planned)
    assert pace.must_wait(10**6) is False


def test_another_rank_takes_the_interval_that_the_first_has_found() -> None:
    found_later = iter([None, 700])
    pace = AwaitedPace(lambda: next(found_later), ahead=10)
    assert [pace.steps(done, 50) for done in (0, 20, 21)] == [None, None, 700]
