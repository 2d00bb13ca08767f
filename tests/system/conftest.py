"""Sessions of real processes, which leave nothing behind."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.processes import Launch, Session
from tests.support.starter import Starter


@pytest.fixture
def launcher(starter: Starter) -> Launch:
    """How processes are started. A module that is about their start has another one."""
    return starter.launch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For torch, as in every rank of a test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def session(tmp_path: Path, launcher: Launch) -> Iterator[Session]:
    with Session(tmp_path, launcher) as session:
        yield session


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory, launcher: Launch) -> Iterator[Session]:
    """A second session, whose processes do not meet those of the first."""
    with Session(tmp_path_factory.mktemp("other"), launcher) as session:
        yield session


@pytest.fixture
def collected() -> Iterator[None]:
    """A run is a web of closures over megabytes, few enough objects for Python to let thousands of runs lie about."""
    yield
    gc.collect()
