"""Processes of these tests are forked from one that has imported everything."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Session
from tests.support.starter import Starter


@pytest.fixture
def session(tmp_path: Path, starter: Starter) -> Iterator[Session]:
    with Session(tmp_path, starter.launch) as session:
        yield session
