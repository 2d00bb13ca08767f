"""The image's HEALTHCHECK, run for real against the server that both processes have, and what a scheduler learns from
the prefetcher's exit code.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

import rowcast.deploy.health
import rowcast.prefetcher.run.attempt
from rowcast.command_line.prefetcher import app
from rowcast.job.schema import Job
from rowcast.prefetcher.run.starting_point import RunOptions
from rowcast.runtime.errors import PeerLost
from rowcast.runtime.process import Signals
from rowcast.runtime.stages import Crew, Doorbell
from rowcast.runtime.telemetry.metrics import Health, Process
from rowcast.runtime.telemetry.server import TelemetryServer
from tests.deploy.manifests import ROOT, health_check
from tests.support.jobs import job_content, write_job

FREE = "127.0.0.1:0"


@contextmanager
def served(health: Health, process: Process = "trainer") -> Iterator[int]:
    """The port on which `health` is served."""
    with TelemetryServer(process, FREE, CollectorRegistry(), health) as server:
        yield int(server.address.rpartition(":")[2])


@contextmanager
def unused_port() -> Iterator[int]:
    """One that nothing listens on and nobody else can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield cast(int, held.getsockname()[1])


def run_health_check(*ports: int) -> "subprocess.CompletedProcess[str]":
    """The image's command, in this Python."""
    python, *arguments = health_check()
    assert python == "python"
    command = [sys.executable, *arguments, *map(str, ports)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})


def test_the_images_health_check_passes_until_a_stage_is_dead() -> None:
    health = Health(state="connecting")
    with served(health) as port:
        good = run_health_check(port)
        assert (good.returncode, good.stdout) == (0, f"{port}: ok\n"), good.stderr
        health.dead_stage = lambda: "sender"
        bad = run_health_check(port)
        assert (bad.returncode, bad.stdout) == (1, f"{port}: sender is dead\n"), bad.stderr


def test_a_folder_of_the_user_cannot_stand_in_for_the_health_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "__init__.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    with unused_port() as port:
        assert run_health_check(port).returncode == 1


def test_a_port_that_was_named_must_be_served() -> None:
    with served(Health()) as port, unused_port() as other:
        assert rowcast.deploy.health.main([port]) == 0
        assert rowcast.deploy.health.main([port, other]) == 1
        assert rowcast.deploy.health.main([other]) == 1


@pytest.mark.parametrize("served_first", [True, False])
def test_without_a_port_the_command_that_runs_here_is_found(
    served_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = Health()
    with served(health) as port, unused_port() as other:
        monkeypatch.setattr(rowcast.deploy.health, "USUAL_PORTS", (port, other) if served_first else (other, port))
        assert rowcast.deploy.health.main([]) == 0
        health.dead_stage = lambda: "mail"
        assert rowcast.deploy.health.main([]) == 1
    with unused_port() as one, unused_port() as two:
        monkeypatch.setattr(rowcast.deploy.health, "USUAL_PORTS", (one, two))
        assert rowcast.deploy.health.main([]) == 1


def test_two_processes_on_one_network_must_both_be_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetcher, trainer = Health(), Health()
    with served(prefetcher, "prefetcher") as one, served(trainer) as two:
        monkeypatch.setattr(rowcast.deploy.health, "USUAL_PORTS", (one, two))
        assert rowcast.deploy.health.main([]) == 0
        trainer.dead_stage = lambda: "sender"
        assert rowcast.deploy.health.main([]) == 1


def test_a_process_that_never_answers_is_not_healthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rowcast.deploy.health, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert rowcast.deploy.health.main([port]) == 1
    assert capsys.readouterr().out == f"{port}: no answer (TimeoutError)\n"


def crew_that_met(error: BaseException) -> Crew:
    """After the stage named watch has ended with `error`."""
    bell = Doorbell()
    crew = Crew("prefetcher", bell)

    def ends() -> bool:
        raise error

    crew.start({"watch": ends}, {})
    while crew.error is None:
        bell.wait(0)
    crew.stop()
    assert crew.error is error
    return crew


def test_a_lost_peer_does_not_make_a_process_unhealthy() -> None:
    """It may wait for another trainer or still write its last checkpoint: a failed probe would cut that short."""
    assert crew_that_met(PeerLost("the trainer went away")).dead_stage() is None
    assert crew_that_met(ValueError("a bug")).dead_stage() == "watch"


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
