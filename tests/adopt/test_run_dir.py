"""Which run directory a script has that names none."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rowcast.trainer.adopt.connect.module import EmbeddingBagCollection
from tests.adopt.scripts import CONFIGS, Model


def runs_as(script: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `__main__` is for a script, or for a notebook (None)."""
    main: Any = SimpleNamespace() if script is None else SimpleNamespace(__file__=script)
    monkeypatch.setitem(sys.modules, "__main__", main)


def collection(**named: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        CONFIGS, optimizer={"kind": "sgd", "lr": 0.1}, capacity="60 rows", device="cpu", **named
    )


@pytest.mark.parametrize(
    ("script", "name"),
    [("/there/ctr_model.py", "ctr_model"), ("/there/package/__main__.py", "package"), (None, "notebook")],
)
def test_a_run_directory_has_the_name_of_its_script(
    script: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_as(script, monkeypatch)
    assert collection().job.run_dir == Path("runs") / name
    assert collection(run_dir="here").job.run_dir == Path("here")
    assert collection(job={"job.run_dir": "there"}).job.run_dir == Path("there")


def test_a_model_shows_its_tables(tmp_path: Path) -> None:
    shown = repr(Model(collection(run_dir=tmp_path)))
    assert "wide: 500 x 4 fp32, sum of a, b" in shown
    assert "small: 6 x 4 fp32, sum of c" in shown
    assert f"optimizer=sgd(lr=0.1), capacity=60 rows, device=cpu, run_dir={tmp_path}" in shown
