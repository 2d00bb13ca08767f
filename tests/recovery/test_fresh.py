"""`--fresh`, typed by accident or on purpose, costs the model that was there nothing until a new one is on the disk."""

from pathlib import Path

import pytest

from tests.recovery.restarted import END_TIMEOUT_S, KILLED, ROLES, Outcome, Recovering, Role, end_well, outcome_of
from tests.support.processes import Session

KEPT = ("complete", "losses.f32", "report.json", "report.html")


def snapshot(run_dir: Path) -> dict[str, bytes]:
    """Everything of a run that a person may want back."""
    files = [run_dir / name for name in KEPT] + sorted((run_dir / "checkpoints").rglob("*"))
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files if path.is_file()}


@pytest.fixture
def complete(session: Session) -> Recovering:
    run = Recovering(session)
    run.finish()
    return run


def test_a_fresh_run_that_no_trainer_comes_to_leaves_the_model(complete: Recovering) -> None:
    session = complete.session
    before = snapshot(session.run_dir)
    refused = session.start("prefetcher", "--fresh", "--set=transport.connect_timeout=1s").ended().refused(3)
    assert refused.startswith("no trainer came within 1 s")
    assert snapshot(session.run_dir) == before


def test_a_trainer_that_was_not_told_of_the_fresh_run_leaves_its_report(complete: Recovering) -> None:
    session = complete.session
    (session.run_dir / "complete").unlink()  # as on the trainer's own host, where no prefetcher has written it
    before = {**snapshot(session.run_dir)}
    prefetcher, trainer = session.start("prefetcher", "--fresh"), session.start("trainer")
    sentence = trainer.ended(END_TIMEOUT_S).refused(2)
    assert "holds the report of an earlier one; add --fresh to this command too" in sentence
    assert prefetcher.ended(END_TIMEOUT_S).code != 0
    assert snapshot(session.run_dir) == before


@pytest.mark.parametrize(("role", "armed"), [("prefetcher", "PlanReady sent:2"), ("trainer", "loss written:2")])
def test_a_fresh_run_killed_before_its_first_checkpoint_gives_the_old_run_back(
    complete: Recovering, role: Role, armed: str, undisturbed: Outcome
) -> None:
    session = complete.session
    before = snapshot(session.run_dir)
    armed_by = {name: {"ROWCAST_CRASH": armed} if name == role else {} for name in ROLES}
    processes = {name: session.start(name, "--fresh", **armed_by[name]) for name in ROLES}
    codes = {name: process.ended(END_TIMEOUT_S).code for name, process in processes.items()}
    assert codes[role] == KILLED
    found = snapshot(session.run_dir)
    if role == "trainer":  # a process that was killed puts nothing back; its results are in the folder beside
        earlier = {
            path.name: path.read_bytes() for path in (session.run_dir / "earlier").iterdir() if path.name in KEPT
        }
        found = {**found, **earlier}
    assert found == before
    if role == "trainer":
        session.start("trainer", "--set=transport.connect_timeout=1s").ended(END_TIMEOUT_S)
        assert snapshot(session.run_dir) == before, "the next start brings them back, whatever comes of it"
    end_well(session.start("prefetcher", "--fresh", "--max-steps=20"), session.start("trainer", "--fresh"))
    assert outcome_of(session.run_dir).differs(undisturbed) == []
    assert not (session.run_dir / "earlier").exists()
    assert not list(session.run_dir.glob(".checkpoints.*"))


def test_a_fresh_run_with_nothing_to_train_does_not_complete_the_earlier_one(
    complete: Recovering, tmp_path: Path
) -> None:
    session = complete.session
    session.run_dir.rename(tmp_path / "day1")
    end_well(session.start("prefetcher", "--max-steps=5"), session.start("trainer"))
    (session.run_dir / "complete").unlink()  # as if it was stopped
    before = snapshot(session.run_dir)
    end_well(
        session.start("prefetcher", "--fresh", f"--from={tmp_path / 'day1'}", "--max-steps=9"),
        session.start("trainer", "--fresh"),
    )
    assert snapshot(session.run_dir) == before


def test_results_of_a_run_whose_place_was_taken_do_not_come_back(complete: Recovering) -> None:
    """The trainer of the run that took it was killed, so it could not give them up."""
    session = complete.session
    prefetcher, trainer = (
        session.start("prefetcher", "--fresh"),
        session.start("trainer", "--fresh", ROWCAST_CRASH="loss written:11"),
    )
    assert (prefetcher.ended(END_TIMEOUT_S).code, trainer.ended(END_TIMEOUT_S).code) == (3, KILLED)
    assert session.manifest().train_steps in (4, 8)
    losses = (session.run_dir / "losses.f32").read_bytes()
    armed = {"ROWCAST_CRASH": "PlanReady sent:2"}
    prefetcher, trainer = session.start("prefetcher", "--fresh", **armed), session.start("trainer", "--fresh")
    assert (prefetcher.ended(END_TIMEOUT_S).code, trainer.ended(END_TIMEOUT_S).code) == (KILLED, 3)
    assert (session.run_dir / "losses.f32").read_bytes() == losses
    assert not (session.run_dir / "report.json").exists(), "it is of the run that was replaced"
