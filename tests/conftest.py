"""Settings for all tests."""

import gc
import importlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import torch
from hypothesis import settings

from tests.support.processes import Session
from tests.support.starter import Starter
from tests.support.uses import uses

SMOKE = (Path(__file__).parent / "smoke.txt").read_text(encoding="utf-8").splitlines()
settings.register_profile("rowcast", deadline=None)  # tests assert no timings
settings.load_profile("rowcast")
CHOSEN = {line for line in SMOKE if line.startswith("tests/")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Marks what uses processes and servers, and with `rest` what `make test` leaves out."""
    for item in items:
        used = uses(item)
        if used and not CHOSEN & {item.nodeid, item.nodeid.partition("[")[0]}:
            used.add("rest")
        for marker in used:
            item.add_marker(marker)


def pytest_collection_finish() -> None:
    """What was imported and collected stays, so Python's collector need not look at its million objects."""
    if "tests.support.driver" in sys.modules:
        importlib.import_module("torch._dynamo")  # torch.optim's first use would import it, half of all these objects
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests train tiny models: a second thread only waits. Tests that are about threads set their own."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """A shell that starts a command in the background makes it ignore SIGINT, which all its processes inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def starter() -> Iterator[Starter]:
    """Starts commands without their imports; it is started when a test first asks for it."""
    with Starter() as starter:
        yield starter


@pytest.fixture
def session(tmp_path: Path, starter: Starter) -> Iterator[Session]:
    """Its processes are forked from one that has imported everything."""
    with Session(tmp_path, starter.launch) as session:
        yield session


@pytest.fixture
def own_logs() -> Iterator[None]:
    """A test that sets up logs finds none set up and leaves none."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
