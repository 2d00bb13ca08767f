"""A run that is killed at any crash point on either side and started again comes to the bits of an undisturbed run."""

import pytest

from rowcast.runtime.crash_points import CRASH_POINTS
from tests.recovery.crashes import CRASHES, NEEDS_REJOIN, NEEDS_TIER, OF_A_PUBLISHER, OF_ONE_PAIR, called
from tests.recovery.restarted import TIERED, Outcome, Recovering, sections
from tests.support.processes import Session
from tests.support.repeats import count

# in each part of a run, on both sides; `make soak` tries all, and `tests/simulation` any moment in one thread
SOME = (
    *("PlanReady sent", "rows not written", "row file written", "manifest renamed", "rows loaded"),
    *("model restored", "RowsBack not sent", "Saved sent"),
)
CONNECT_S = 10  # the one whose peer was killed before it had said a word waits for another


def test_every_crash_point_is_called_at_exactly_one_place() -> None:
    names = [name for package in ("protocol", "prefetcher", "serving", "trainer", "deploy") for name in called(package)]
    assert sorted(names) == sorted(CRASH_POINTS)
    assert len(set(CRASH_POINTS)) == len(CRASH_POINTS) == len(CRASHES) + len(OF_A_PUBLISHER)
    assert len(CRASHES) >= 24


@pytest.mark.parametrize("name", OF_ONE_PAIR if count(0, 1) else SOME)
def test_a_run_that_is_killed_there_comes_to_the_same_bits(name: str, session: Session, undisturbed: Outcome) -> None:
    rejoin = {"rejoin_timeout": "60s"} if name in NEEDS_REJOIN else {}
    tier = {"store": TIERED} if name in NEEDS_TIER else {}
    run = Recovering(session, transport={"ring": "1MiB", "connect_timeout": f"{CONNECT_S}s", **rejoin}, **tier)
    for armed in CRASHES[name]:
        run.crash(armed)
    assert run.finish().differs(undisturbed) == []
    assert session.remains() == []


def test_a_run_goes_on_with_stores_of_other_kinds(session: Session, undisturbed: Outcome) -> None:
    transport = {"ring": "1MiB", "connect_timeout": f"{CONNECT_S}s"}
    run = Recovering(session, transport=transport)
    for armed, store in (("PlanReady sent:10", TIERED), ("rows spilled:3", {"kind": "memory"})):
        run.crash({"prefetcher": armed})
        session.write_job(**sections(transport=transport, store=store))
    assert run.finish().differs(undisturbed) == []
    assert session.remains() == []
