"""A process that stands still in the middle of a step, for longer than its peer waits."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.recovery.restarted import END_TIMEOUT_S, PEER_LOST, ROLES, Outcome, Recovering, Role, end_well
from tests.support.processes import Process, Session
from tests.support.starter import Starter

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
