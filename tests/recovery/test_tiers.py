"""A run whose rows come and go between memory and a cold tier is as hard to lose as any other."""

from tests.recovery.restarted import TIERED, Outcome, Recovering, end_well, killed, sections
from tests.support.processes import Session

TRANSPORT = {"ring": "1MiB", "connect_timeout": "60s"}


def test_a_run_goes_on_with_stores_of_other_kinds(session: Session, undisturbed: Outcome) -> None:
    run = Recovering(session, transport=TRANSPORT)
    for armed, store in (("StepReady sent:10", TIERED), ("rows spilled:3", {"kind": "memory"})):
        run.crash({"prefetcher": armed})
        session.write_job(**sections(transport=TRANSPORT, store=store))
    assert run.finish().differs(undisturbed) == []
    assert session.remains() == []


def test_a_memory_tier_outlives_a_lost_trainer(session: Session, undisturbed: Outcome) -> None:
    run = Recovering(session, transport={**TRANSPORT, "rejoin_timeout": "60s"}, store=TIERED)
    processes = run.start_both({"trainer": "loss written:10"})
    killed(processes["trainer"])
    processes["trainer"] = run.start("trainer")
    end_well(*processes.values())
    assert run.complete
    assert run.finish().differs(undisturbed) == []
