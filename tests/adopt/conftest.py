"""Adopted models: none outlives its test."""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from rowcast.trainer.adopt import adopt, script_process
from rowcast.trainer.adopt.adoption import Adoption
from tests.adopt.engines import Engines, drop
from tests.support.starter import Starter


@pytest.fixture
def engines(starter: Starter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engines]:
    own = Engines(starter)
    monkeypatch.setattr(script_process, "start_child", own.start)
    monkeypatch.chdir(tmp_path)
    yield own
    for child in own.children:
        child.signal(signal.SIGKILL)


@pytest.fixture(autouse=True)
def _own_logs(own_logs: None) -> None:
    """Nobody sets up logs for a script."""


@pytest.fixture
def let_go() -> Iterator[None]:
    """Models that a test adopted are gone at its end, and loaders are read as before."""
    plain = DataLoader.__iter__
    yield
    for _ in range(2):  # the first frees graphs, whose hooks hold tables
        gc.collect()
    assert DataLoader.__iter__ is plain
    while adopt._doors:
        drop()


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of adopted models stay in this process, in files of the test's folder."""
    monkeypatch.setattr(Adoption, "look_up", lambda self, device: None)
    monkeypatch.setattr("rowcast.trainer.adopt.adoption.default_run_dir", lambda: tmp_path / "rows")
