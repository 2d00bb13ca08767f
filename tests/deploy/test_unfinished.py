"""What a scheduler learns from the prefetcher's exit code: whether a run that ended in order is to be started again."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rowcast.prefetcher.run.attempt
from rowcast.command_line.prefetcher import app
from rowcast.job.schema import Job
from rowcast.prefetcher.run.starting_point import RunOptions
from rowcast.runtime.process import Signals
from tests.support.jobs import job_content, write_job

pytestmark = pytest.mark.usefixtures("own_logs")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_job(tmp_path / "job.toml", job_content(tmp_path / "run"))


def code_of(config: Path, monkeypatch: pytest.MonkeyPatch, *options: str, finishes: bool) -> int:
    """The exit code of `prefetcher run`, whose run ends in order: complete, or stopped before."""

    def run(job: Job, options: RunOptions, signals: Signals, arguments: Sequence[str]) -> bool:
        return finishes

    monkeypatch.setattr(rowcast.prefetcher.run.attempt, "run_prefetcher", run)
    monkeypatch.setattr(Signals, "start", lambda signals: signals)  # this process's handlers stay
    return CliRunner().invoke(app, ["run", f"--config={config}", *options]).exit_code


@pytest.mark.parametrize(("finishes", "code"), [(False, 75), (True, 0)])
def test_a_run_that_was_stopped_before_its_end_has_the_code_that_was_asked_for(
    config: Path, monkeypatch: pytest.MonkeyPatch, finishes: bool, code: int
) -> None:
    assert code_of(config, monkeypatch, "--unfinished-code=75", finishes=finishes) == code


def test_without_the_option_a_stop_in_order_is_a_success(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of(config, monkeypatch, finishes=False) == 0


def test_an_evaluation_leaves_nothing_to_go_on_with(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of(config, monkeypatch, "--eval", "--unfinished-code=75", finishes=False) == 0
