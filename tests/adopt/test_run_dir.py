"""Which run directory a script has that names none, and that it never takes another one's."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rowcast
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.connect.module import EmbeddingBagCollection
from tests.adopt.scripts import CONFIGS, Launches, Model, make, train_all
from tests.support.facts import facts

DATASET = "tests.adopt.clicks:train"


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


@pytest.mark.parametrize("fresh", [False, True])
def test_a_script_of_the_same_name_is_refused_and_its_run_stays(
    fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs_as("/one/train.py", monkeypatch)
    first = collection().shared.write_job_file()
    content = first.read_bytes()
    runs_as("/two/train.py", monkeypatch)
    with pytest.raises(
        ConfigError,
        match=facts("runs/train", "/one/train.py", "/two/train.py"),
    ):
        rowcast.connect(collection(), DATASET, fresh=fresh)
    with pytest.raises(ConfigError, match=facts("EmbeddingBagCollection", "run_dir=")):
        collection().state_dict()
    assert first.read_bytes() == content
    rowcast.connect(collection(run_dir="runs/train"), DATASET, fresh=True)  # named: taken as it is
    runs_as("/one/train.py", monkeypatch)
    rowcast.connect(collection(), DATASET, fresh=fresh)


def test_a_run_that_was_given_the_directory_by_name_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: Launches
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = make(tmp_path / "runs" / "train")
    train_all(model, optimizer, rowcast.connect(model.ebc, DATASET, max_steps=1))
    runs_as("/two/train.py", monkeypatch)
    with pytest.raises(ConfigError, match=facts("runs/train", "by name", "run_dir=")):
        rowcast.connect(collection(), DATASET, fresh=True)


def test_a_model_shows_its_tables(tmp_path: Path) -> None:
    shown = repr(Model(collection(run_dir=tmp_path)))
    assert "wide: 500 x 4 fp32, sum of a, b" in shown
    assert "small: 6 x 4 fp32, sum of c" in shown
    assert f"optimizer=sgd(lr=0.1), capacity=60 rows, device=cpu, run_dir={tmp_path}" in shown
