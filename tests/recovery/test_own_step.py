"""A model that owns its step is killed at many steps, in either process: losses, export and objects keep their bits."""

from pathlib import Path
from typing import Any

import pytest

from rowcast.job.file import load_job
from rowcast.trainer.report.report_json import read_report
from tests.recovery.ranked import PARTS, RecoveringRanks
from tests.recovery.restarted import NUM_TRAIN, ROLES, Outcome, Recovering, Role
from tests.support.comparisons import assert_trained_as_the_plain_loop
from tests.support.processes import Session
from tests.support.repeats import count
from tests.support.starter import Starter

LAST = {"prefetcher": "PlanReady sent", "trainer": "step computed"}  # the last crash point of a step in each process
SKIPPED = NUM_TRAIN // 4


def own_step(model: str = "everything", **options: str) -> dict[str, Any]:
    """Sections of a job file."""
    kind = f"tests.support.own_steps:{model}"
    return {
        "model": {"kind": kind, "options": options, "bottom_mlp": None, "top_mlp": None},
        "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.05}, "dense": None},
        "checkpoint": {"every": 1, "keep": 2},
    }


def unhindered(folder: Path, starter: Starter, **more: Any) -> Outcome:
    with Session(folder, starter.launch) as session:
        run = Recovering(session, **own_step(), **more)
        outcome = run.finish()
        assert run.num_starts == 2
        assert_trained_as_the_plain_loop(session, NUM_TRAIN, load_job(session.config).ranks.num_parts)
        return outcome


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, starter: Starter) -> Outcome:
    return unhindered(tmp_path_factory.mktemp("whole"), starter)


@pytest.mark.parametrize("role", ROLES)
def test_kills_at_many_steps_change_no_bit(role: Role, session: Session, whole: Outcome) -> None:
    run = Recovering(session, **own_step())
    for _ in range(count(2, 10)):
        run.crash({role: f"{LAST[role]}:3"})
    assert run.finish().differs(whole) == []
    assert read_report(session.run_dir / "report.json").skipped_steps == SKIPPED


@pytest.mark.timeout(600)
def test_a_kill_of_one_of_two_ranks_changes_no_bit(tmp_path: Path, starter: Starter) -> None:
    for name in ("alone", "ranks"):
        (tmp_path / name).mkdir()
    alone = unhindered(tmp_path / "alone", starter, ranks={"parts": PARTS})
    with Session(tmp_path / "ranks") as session:
        run = RecoveringRanks(session, **own_step())
        run.crash(LAST["trainer"], 14)
        assert run.finish().differs(alone) == []


@pytest.mark.timeout(600)
def test_an_object_that_differs_between_ranks_ends_them_by_name_before_the_first_step(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        run = RecoveringRanks(session, **own_step("adversary", turn="RANK"))
        assert run.end(run.start()).code == 2, run.told
        assert (
            "Adversary.training_objects()[0] of type Turn begins with another state on rank 1 than on rank 0"
            in run.told
        )
        assert not (session.run_dir / "losses.f32").read_bytes()
