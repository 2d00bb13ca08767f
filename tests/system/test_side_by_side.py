"""Trainings and a scoring on one host at the same time, with the default ports; and numba switched off."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.jobs import job_content, table, write_job
from tests.support.processes import ROOT, Process, Session

SLOW_S = 600.0  # for a scoring beside two trainings


def with_default_ports(session: Session, **sections: Any) -> None:
    write_job(session.config, job_content(session.run_dir, metrics={"prefetcher": None, "trainer": None}, **sections))


def write_clicks(path: Path) -> None:
    lines = [f"{row % 7},{row % 2},0.5" for row in range(64 * 4)]
    path.write_text("\n".join(["user,label,price", *lines, ""]))


def addresses(session: Session, process: Process) -> list[str]:
    """Of the trainer and the prefetcher, once both serve."""
    log, found = session.run_dir / "prefetcher.log", list[str]()
    serving = re.compile(r'event="serving metrics" address=(\S+)')

    def serve() -> bool:
        found[:] = serving.findall(process.stderr)[-1:] + serving.findall(log.read_text() if log.exists() else "")[-1:]
        return len(found) == 2

    process.until(serve, "two addresses")
    return found


def test_two_trainings_and_a_scoring_run_beside_each_other(session: Session, other: Session, tmp_path: Path) -> None:
    (tmp_path / "scored").mkdir()
    with Session(tmp_path / "scored") as trained:
        clicks = trained.folder / "clicks.csv"
        write_clicks(clicks)
        columns = {"label": "label", "dense": ["price"]}
        data = {"format": "csv", "path": str(clicks), "columns": columns, "synthetic": None}
        with_default_ports(trained, data=data, tables=[table("user", 7, 4)])
        trained.start("train").ended().quiet()
        for own in (session, other):
            with_default_ports(own)
        running = {own: own.start("train") for own in (session, other)}
        found = [address for own, process in running.items() for address in addresses(own, process)]
        assert len(set(found)) == 4, found
        out = trained.folder / "scores.csv"
        arguments = [f"--run={trained.run_dir}", f"--data={clicks}", f"--out={out}"]
        trained.start_module("rowcast", "score", *arguments).ended(SLOW_S).quiet()
        assert len(out.read_text().splitlines()) == 64 * 4 + 1
        assert all(process.running for process in running.values())
        logs = [process.stderr + (own.run_dir / "prefetcher.log").read_text() for own, process in running.items()]
        assert "".join(logs).count("is in use; metrics and health have a free one") >= 2
        for process in running.values():
            process.insist(signal.SIGTERM)


def test_a_disabled_compiler_is_a_sentence(session: Session) -> None:
    command = [sys.executable, "-m", "rowcast.prefetcher", "run", f"--config={session.config}"]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "NUMBA_DISABLE_JIT is set" in done.stderr
