"""Sessions of real processes, which leave nothing behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.processes import Session


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path) as session:
        yield session


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A second session, whose processes do not meet those of the first."""
    with Session(tmp_path_factory.mktemp("other")) as session:
        yield session
