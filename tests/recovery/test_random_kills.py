"""SIGKILL at random times, also during what follows a kill, and stops that outlast a peer's patience: no bit changes.

A failing seed goes again with `pytest tests/recovery/test_random_kills.py -k "[<seed>]"`, as far as times repeat.
"""

import fcntl
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.recovery.restarted import END_TIMEOUT_S, KILLED, PEER_LOST, ROLES, Outcome, Recovering, Role, end_well
from tests.support.processes import Process, Session
from tests.support.repeats import count
from tests.support.starter import Starter

MOST_KILLS = 3


@dataclass(frozen=True, kw_only=True)
class Kill:
    roles: tuple[Role, ...]
    after_share: float  # of the time that an undisturbed run takes


def kills_of(rng: random.Random) -> list[Kill]:
    chosen: list[tuple[Role, ...]] = [("prefetcher",), ("trainer",), ROLES]
    return [Kill(roles=rng.choice(chosen), after_share=rng.random()) for _ in range(rng.randint(1, MOST_KILLS))]


@pytest.fixture(scope="module")
def seconds(tmp_path_factory: pytest.TempPathFactory, starter: Starter, undisturbed: Outcome) -> float:
    """That a run takes."""
    with Session(tmp_path_factory.mktemp("timed"), starter.launch) as session:
        began_s = time.monotonic()
        assert Recovering(session).finish().differs(undisturbed) == []
        return time.monotonic() - began_s


@pytest.mark.parametrize("seed", range(count(4, 40)))
def test_kills_at_random_times_change_no_bit(
    seed: int, tmp_path: Path, starter: Starter, undisturbed: Outcome, seconds: float
) -> None:
    rng = random.Random(seed)
    rejoins = rng.random() < 0.5
    transport = {"ring": "1MiB", "connect_timeout": "10s", "rejoin_timeout": "10s" if rejoins else "0s"}
    with Session(tmp_path, starter.launch) as session:
        run = Recovering(session, transport=transport)
        processes: dict[Role, Process] = {}
        for kill in kills_of(rng):
            if run.complete:
                break
            for role in ROLES:
                if role not in processes or not processes[role].running:
                    processes[role] = run.start(role)
            time.sleep(kill.after_share * seconds)
            for role in kill.roles:
                processes[role].signal(signal.SIGKILL)
            for role in ROLES if not rejoins else kill.roles:
                assert processes[role].ended(END_TIMEOUT_S).code in (0, KILLED, PEER_LOST), processes[role].stderr
        settle(run, processes)
        assert run.finish().differs(undisturbed) == []
        assert session.remains() == []
        assert held_locks(session.run_dir) == []
        assert not list(session.run_dir.rglob("*.partial"))


def held_locks(run_dir: Path) -> list[Path]:
    """Locks that somebody still holds, of those that a run directory must have."""
    found = []
    for path in (run_dir / "prefetcher.lock", run_dir / "trainer.lock"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(path)
    return found


def settle(run: Recovering, processes: dict[Role, Process]) -> None:
    """A survivor that waits goes on with the one started again, or ends because nobody comes."""
    waiting = [role for role in ROLES if processes[role].running]
    if waiting and not run.complete:
        processes |= {role: run.start(role) for role in ROLES if role not in waiting}
    for process in processes.values():
        assert process.ended(END_TIMEOUT_S).code in (0, KILLED, PEER_LOST), process.stderr


STANDS_STILL: dict[Role, str] = {"prefetcher": "PlanReady sent:24:SIGSTOP", "trainer": "loss written:10:SIGSTOP"}
OTHER: dict[Role, Role] = {"prefetcher": "trainer", "trainer": "prefetcher"}
REJOIN = {"ring": "1MiB", "connect_timeout": "60s", "rejoin_timeout": "60s"}
Started = list[tuple[Role, Recovering, dict[Role, Process]]]


@contextmanager
def standing_still(
    tmp_path_factory: pytest.TempPathFactory, starter: Starter, **more: dict[str, str]
) -> Iterator[Started]:
    """Two runs side by side; of one the prefetcher stands still, of the other the trainer."""
    with ExitStack() as stack:
        started = []
        for role in ROLES:
            run = Recovering(stack.enter_context(Session(tmp_path_factory.mktemp(role), starter.launch)), **more)
            started.append((role, run, run.start_both({role: STANDS_STILL[role]})))
        for role, _, processes in started:
            stopped = processes[role]
            stopped.until(lambda stopped=stopped: "T (stopped)" in stopped.status, "stop", END_TIMEOUT_S)  # type: ignore[misc]
        yield started


def test_a_stop_for_too_long_ends_both_and_a_restart_goes_on(
    tmp_path_factory: pytest.TempPathFactory, starter: Starter, undisturbed: Outcome
) -> None:
    with standing_still(tmp_path_factory, starter) as started:
        for role, run, processes in started:
            sentence = processes[OTHER[role]].ended(END_TIMEOUT_S).refused(PEER_LOST)
            assert sentence.startswith(f"the {role} has been silent for ")
            processes[role].signal(signal.SIGCONT)
            assert processes[role].ended(END_TIMEOUT_S).code == PEER_LOST
            assert run.finish().differs(undisturbed) == []
            assert run.session.remains() == []


def test_a_peer_that_wakes_up_too_late_meets_the_survivor_again(
    tmp_path_factory: pytest.TempPathFactory, starter: Starter, undisturbed: Outcome
) -> None:
    with standing_still(tmp_path_factory, starter, transport=REJOIN) as started:
        for role, run, processes in started:
            processes[OTHER[role]].until_logged(f"waiting for another {role}")
            processes[role].signal(signal.SIGCONT)
            end_well(*processes.values())
            assert run.num_starts == 2, "nobody had to be started again"
            assert run.finish().differs(undisturbed) == []
            assert run.session.remains() == []
