"""What the processes of a run import before they are of use, and what they never import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import Session

COUNTS = """
import atexit, gc, os, sys, pathlib
def count():
    own = [name for name in sys.modules if name.partition(".")[0] in ("torch", "sympy")]
    found = [name for name in own if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))]
    counts = [len(own), gc.isenabled(), gc.get_freeze_count(), found[:3]]
    pathlib.Path({folder!r}, str(os.getpid())).write_text(" ".join(map(str, counts)))
if "rowcast.trainer" in sys.orig_argv:
    atexit.register(count)
"""
DENSE = {"kind": "adamw", "lr": 0.01, "clip_norm": 1.0, "clip_value": 0.5}


def counted(session: Session, *options: str) -> list[str]:
    """What the trainers of a run have imported at their end."""
    folder = session.folder / "-".join(["counts", *options])
    folder.mkdir()
    (session.folder / "sitecustomize.py").write_text(COUNTS.format(folder=str(folder)))
    path = os.pathsep.join([str(session.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    session.start("train", *options, PYTHONPATH=path).ended().quiet()
    return [file.read_text() for file in Path(folder).iterdir()]


def loaded(module: str, names: str) -> set[str]:
    """Which of these modules are loaded once `module` is."""
    line = f"import sys, {module}; print(*[name for name in {names.split()} if name in sys.modules])"
    return set(subprocess.run([sys.executable, "-c", line], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_that_compiles_nothing_imports_no_compiler(ranks: int, session: Session) -> None:
    session.write_job(
        optimizer={"dense": DENSE},
        data={"eval_fraction": 0.25, "synthetic": {"samples": 64 * 10}},
        ranks={"count": ranks},
    )
    for options in ([], ["--eval"]):
        found = counted(session, *options)
        assert len(found) >= ranks  # torchrun has their arguments too
        of_torch, collects, frozen, *compiler = zip(*(own.split() for own in found), strict=True)
        assert min(map(int, of_torch)) > 500
        assert compiler == [("[]",) * len(found)]
        if ranks == 1:
            assert (collects, int(frozen[0]) > 100_000) == (("True",), True)


def test_a_launcher_starts_its_processes_before_it_imports_what_only_they_need() -> None:
    assert loaded("rowcast.command_line.rowcast, rowcast.deploy.local", "typer numpy torch zmq numba") == {"typer"}


def test_a_trainer_imports_what_shows_its_results_after_its_last_step() -> None:
    shown = " ".join(f"rowcast.trainer.report.{name}" for name in ("charts", "page"))
    assert loaded("rowcast.trainer.run.attempt", f"torch matplotlib pyarrow pandas jinja2 {shown}") == {"torch"}
