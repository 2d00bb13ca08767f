"""Two ranks, started by one command: whatever is killed or stops, the run has the bits of one trainer of four parts."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recovery.crashes import OF_RANKS
from tests.recovery.ranked import LONGEST_LIFE_S, PARTS, RecoveringRanks
from tests.recovery.restarted import Outcome, Recovering
from tests.support.processes import Session
from tests.support.repeats import count
from tests.support.starter import Starter

AT_RANDOM = ("parent", "torchrun", "local", "prefetcher 0", "prefetcher 1", "trainer 0", "trainer 1")
CRASHES = {  # how often the point is passed by the process that is killed there; first those of ranks alone
    "shard not renamed": 2,
    "manifest seen": 2,
    "shard file written": 2,
    "shards agree": 2,
    "step computed": 14,
    "rows written": 4,
}
TRIED = list(CRASHES)[: count(1, len(CRASHES))]  # `make soak` tries all
ASKED = {"rows written": 2, "step computed": 2}  # early: steps that are planned are still made
STANDS_STILL = {"prefetcher": "rows written:4:SIGSTOP", "trainer": "step computed:14:SIGSTOP"}
STARTED_AGAIN = "a trainer has ended; all of them are started again"
pytestmark = pytest.mark.timeout(600)  # a test starts nine processes several times


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


def test_make_soak_tries_every_crash_point_of_ranks_alone() -> None:
    assert set(CRASHES) >= OF_RANKS


@pytest.mark.parametrize("name", TRIED)
def test_a_crash_in_the_middle_changes_no_bit(name: str, run: RecoveringRanks, alone: Outcome) -> None:
    run.crash(name, CRASHES[name])
    assert run.finish().differs(alone) == []
    assert run.processes.remains() == []


def test_a_trainer_that_is_killed_in_a_checkpoint_costs_one_restart_of_all(
    run: RecoveringRanks, alone: Outcome
) -> None:
    """The other rank's prefetcher waits for a shard that does not come, while the next trainers start."""
    run.crash("dense side not packed", 2)
    assert run.told.count(STARTED_AGAIN) == 1, run.told
    assert run.finish().differs(alone) == []
    assert run.processes.remains() == []


@pytest.mark.parametrize("name", list(ASKED)[: count(1, 2)])
def test_a_stop_that_one_of_them_is_asked_for_is_one_of_all(name: str, run: RecoveringRanks, alone: Outcome) -> None:
    once = run.session.folder / "once"
    ended = run.end(run.start(f"{name}:{ASKED[name]}:SIGTERM:{once}"))
    assert once.exists(), run.told
    assert ended.code == 0, run.told
    assert not run.complete
    assert run.processes.remains() == []
    assert run.finish().differs(alone) == []
    assert run.num_starts == 2


@pytest.mark.parametrize("role", list(STANDS_STILL)[: count(1, 2)])
def test_one_that_stands_still_is_replaced(role: str, run: RecoveringRanks, alone: Outcome) -> None:
    once = run.session.folder / "once"
    run.end(run.start(f"{STANDS_STILL[role]}:{once}"))
    assert once.exists(), run.told
    log = (run.session.run_dir / "prefetcher.log").read_text()
    assert (") was stopped for 20 s (ranks.timeout) and is killed" in log) == (role == "prefetcher")
    assert run.finish().differs(alone) == []
    assert run.processes.remains() == []


@pytest.mark.parametrize("seed", range(count(1, 40)))
def test_a_kill_of_any_process_at_any_time_changes_no_bit(seed: int, run: RecoveringRanks, alone: Outcome) -> None:
    rng = random.Random(seed)
    name, after_s = AT_RANDOM[seed % len(AT_RANDOM)], rng.uniform(0.0, LONGEST_LIFE_S)
    command = run.start()
    if run.until(command, lambda: name in run.processes.by_name()):
        time.sleep(after_s)
        run.processes.signal(name, signal.SIGKILL)
    run.end(command)
    assert run.finish().differs(alone) == []
    assert run.processes.remains() == []
