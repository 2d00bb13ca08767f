"""What the processes of a run import: a trainer that compiles nothing has no part of torch's compiler."""

import os
from pathlib import Path

import pytest

from tests.support.processes import Session

COUNTS = """
import atexit, os, sys, pathlib
def count():
    own = [name for name in sys.modules if name.partition(".")[0] in ("torch", "sympy")]
    found = [name for name in own if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))]
    pathlib.Path({folder!r}, str(os.getpid())).write_text(f"{{len(own)}} {{found[:3]}}")
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
        assert all(int(own.split()[0]) > 500 and own.endswith(" []") for own in found), found
