"""Two ranks, started by one command: whatever is killed or stops, the run has the bits of one trainer of four parts."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recovery.ranked import PARTS, RecoveringRanks
from tests.recovery.restarted import NUM_TRAIN, Outcome, Recovering
from tests.support.processes import Session
from tests.support.repeats import count
from tests.support.starter import Starter

KILLED = ("parent", "prefetcher 0", "prefetcher 1", "torchrun", "trainer 0", "trainer 1", "local")
STOPPED = ("prefetcher 1", "trainer 1", "trainer 0", "prefetcher 0")
RANDOM_KILLS = count(3, 40)
CRASHES: dict[str, int] = {  # how often each point is passed before it is armed; those of ranks only
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, starter: Starter) -> Outcome:
    """What one trainer of four parts comes to."""
    with Session(tmp_path_factory.mktemp("alone"), starter.launch) as session:
        run = Recovering(session, ranks={"parts": PARTS})
        outcome = run.finish()
        assert run.num_starts == 2
        return outcome


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecoveringRanks]:
    with Session(tmp_path) as session:
        yield RecoveringRanks(session)


def test_two_ranks_come_to_what_one_comes_to_and_leave_nothing(run: RecoveringRanks, alone: Outcome) -> None:
    command = run.start()
    assert run.until(command, lambda: set(run.processes.names()) == set(run.processes.by_name()))
    assert run.end(command).code == 0, run.told
    assert run.finish().differs(alone) == []
    assert run.num_starts == 1
    assert run.processes.remains() == []


@pytest.mark.parametrize("seed", range(RANDOM_KILLS))
def test_a_kill_or_a_stop_of_any_process_at_any_time_changes_no_bit(
    seed: int, run: RecoveringRanks, alone: Outcome
) -> None:
    rng = random.Random(seed)
    name = (KILLED * 2 + STOPPED)[rng.randrange(len(KILLED) * 2 + len(STOPPED))]
    stops = name in STOPPED and rng.random() < 0.5
    at = rng.randint(0, NUM_TRAIN - 2)
    command = run.start()
    if run.until(command, lambda: run.losses >= at and name in run.processes.by_name()):
        run.processes.signal(name, signal.SIGSTOP if stops else signal.SIGKILL)
    run.end(command)
    assert run.finish().differs(alone) == []
    assert run.processes.remains() == []


@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_at_a_point_that_only_ranks_pass_changes_no_bit(
    name: str, run: RecoveringRanks, alone: Outcome
) -> None:
    run.crash(name, CRASHES[name])
    assert run.finish().differs(alone) == []
    assert run.processes.remains() == []
