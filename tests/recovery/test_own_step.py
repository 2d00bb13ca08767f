"""A model that owns its step is killed at many steps, in either process: losses, export and objects keep their bits."""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rowcast.trainer.report.report_json import read_report
from tests.recovery.ranked import PARTS, Pairs, RecoveringRanks
from tests.recovery.restarted import NUM_TRAIN, ROLES, Outcome, Recovering, Role
from tests.support.comparisons import assert_trained_as_the_plain_loop
from tests.support.processes import Session
from tests.support.repeats import count
from tests.support.starter import Starter

LAST = {"prefetcher": "PlanReady sent", "trainer": "step computed"}  # the last crash point of a step in each process
MODELS = ("everything", "adversary")
SKIPPED = {"everything": NUM_TRAIN // 4, "adversary": 0}
CASES = [  # `make soak` tries all
    *(("everything", 1, role) for role in ROLES),
    ("adversary", 4, "trainer"),
    ("adversary", 4, "prefetcher"),
    *(("adversary", 1, role) for role in ROLES),
    *product(MODELS, (2,), ROLES),
    *(("everything", 4, role) for role in ROLES),
]
TRIED = CASES[: count(3, len(CASES))]


def own_step(model: str = "everything", **options: str) -> dict[str, Any]:
    """Sections of a job file."""
    kind = f"tests.support.own_steps:{model}"
    return {
        "model": {"kind": kind, "options": options, "bottom_mlp": None, "top_mlp": None},
        "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.05}, "dense": None},
        "checkpoint": {"every": 1, "keep": 2},
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, starter: Starter) -> Callable[[str, int], Outcome]:
    """Returns what a model comes to on one rank with so many parts, beside the plain loop."""

    @cache
    def unhindered(model: str, parts: int) -> Outcome:
        with Session(tmp_path_factory.mktemp("whole"), starter.launch) as session:
            run = Recovering(session, **own_step(model), ranks={"parts": parts})
            outcome = run.finish()
            assert run.num_starts == 2
            assert_trained_as_the_plain_loop(session, NUM_TRAIN, parts)
            return outcome

    return unhindered


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("model", "ranks", "role"), TRIED)
def test_kills_at_many_steps_change_no_bit(
    model: str, ranks: int, role: Role, session: Session, whole: Callable[[str, int], Outcome]
) -> None:
    parts = 1 if ranks == 1 else PARTS
    run = Pairs(session, ranks, parts, **own_step(model))
    for number in range(count(2, 10)):
        run.crash(role, number % ranks, f"{LAST[role]}:3")
    assert run.finish().differs(whole(model, parts)) == []
    assert read_report(session.run_dir / "report.json").skipped_steps == SKIPPED[model]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4][: count(1, 2)])
def test_a_kill_of_one_of_several_ranks_changes_no_bit(
    ranks: int, tmp_path: Path, whole: Callable[[str, int], Outcome]
) -> None:
    with Session(tmp_path) as session:
        run = RecoveringRanks(session, ranks, **own_step())
        run.crash(LAST["trainer"], 14)
        assert run.finish().differs(whole("everything", PARTS)) == []


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
