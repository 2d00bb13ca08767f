"""Prefetchers that `trainer.connect` starts, forked from one process that has imported everything; they leave nothing behind."""

import os
from collections.abc import Iterator

import pytest

from tests.adopt.runs import Launches, launched_by
from tests.system.starting import Starter


@pytest.fixture
def launches(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    yield from launched_by(starter, dict(os.environ), monkeypatch.setattr)
