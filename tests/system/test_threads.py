"""With default settings, neither the number of ranks nor the cores of a restart change a bit."""

import re
from typing import Any

import pytest

from rowcast.runtime.telemetry.format_numbers import plural
from tests.support.comparisons import differing, exported
from tests.support.facts import facts
from tests.support.processes import Process, Session

STEPS = 8
JOB: dict[str, Any] = {
    "model": {"kind": "tests.system.odd_models:OneSum", "bottom_mlp": None, "top_mlp": None},
    "trainer": {"threads": None},  # as a user's job file, which does not set it
    "transport": {"connect_timeout": "300s"},
}


def trained(session: Session, cores: int, steps: int, *of_trainer: str) -> tuple[Process, Process]:
    """As on a machine with so many cores."""
    prefetcher = session.start("prefetcher", f"--max-steps={steps}")
    patch = f"import rowcast.trainer.run.attempt as run; run.usable_cores = lambda: {cores}"
    return prefetcher, session.start_patched("trainer", patch, *of_trainer)


def train(session: Session, cores: int, steps: int) -> str:
    """Returns what the trainer has written."""
    prefetcher, trainer = trained(session, cores, steps)
    prefetcher.ended(300).quiet()
    return trainer.ended(300).quiet().stderr


@pytest.mark.parametrize(("first", "then"), [(1, 3)])
def test_a_restart_on_other_cores_changes_no_bit_and_is_said(
    first: int, then: int, session: Session, other: Session
) -> None:
    for run in (session, other):
        run.write_job(**JOB)
    train(session, first, STEPS)
    assert "keeps its" not in train(other, first, STEPS // 2)
    assert f"keeps its {plural(first, 'thread')}; a new run would have {then} here" in train(other, then, STEPS)
    assert other.manifest().machine.threads == first
    assert differing(exported(session), exported(other)) == []


def test_the_number_of_ranks_changes_no_bit(session: Session, other: Session) -> None:
    for run, count in ((session, 1), (other, 2)):
        run.write_job(**JOB, ranks={"count": count, "parts": 2})
        run.start("local", f"--max-steps={STEPS}").ended(300).quiet()
    assert differing(exported(session), exported(other)) == []


def test_another_number_in_the_job_is_refused_until_the_run_is_begun_anew(session: Session) -> None:
    session.write_job(**JOB)
    train(session, 2, STEPS // 2)
    for process in trained(session, 2, STEPS, "--set=trainer.threads=3"):
        assert re.search(facts("trainer.threads", 3, 2), process.ended(300).refused(2))
    prefetcher = session.start("prefetcher", f"--max-steps={STEPS}", "--fresh")
    trainer = session.start("trainer", "--set=trainer.threads=3", "--fresh")
    prefetcher.ended(300).quiet()
    trainer.ended(300).quiet()
    assert session.manifest().machine.threads == 3


def test_a_variable_of_the_environment_decides_nothing(session: Session, other: Session) -> None:
    for run, environment in ((session, {}), (other, {"OMP_NUM_THREADS": "7"})):
        run.write_job(**{**JOB, "trainer": {"threads": 2}})
        prefetcher = run.start("prefetcher", f"--max-steps={STEPS}")
        ended = run.start_module("rowcast.trainer", "run", f"--config={run.config}", **environment).ended(300).quiet()
        assert ("OMP_NUM_THREADS = 7" in ended.stderr) == bool(environment)
        prefetcher.ended(300).quiet()
    assert differing(exported(session), exported(other)) == []


def test_evaluations_and_scores_compute_as_the_run(session: Session) -> None:
    session.write_job(**{**JOB, "data": {"batch_size": 64, "eval_fraction": 0.1, "synthetic": {"samples": 4000}}})
    train(session, 3, STEPS)
    patch = "import rowcast.trainer.run.attempt as run; run.usable_cores = lambda: 1"
    line = f"{patch}; from rowcast.command_line.trainer import app; app()"
    session.start("prefetcher", "--eval")
    ended = session._start(["-c", line, "eval", f"--config={session.config}"], {}).ended(300).quiet()
    assert "keeps its 3 threads" in ended.stderr
