"""Prefetchers that `rowcast.connect` starts, forked from a process with everything imported; none outlives its test."""

import os
from collections.abc import Iterator

import pytest

from tests.adopt.scripts import Launches, launched_by
from tests.support.starter import Starter


@pytest.fixture
def launches(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    yield from launched_by(starter, dict(os.environ), monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _own_logs(own_logs: None) -> None:
    """Nobody sets up logs for a script."""
