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

settings.register_profile("rowcast", deadline=None)  # tests assert no timings
settings.load_profile("rowcast")


def named(file: str) -> set[str]:
    """The tests that this list beside us names."""
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line.startswith("tests/")}


CHOSEN, LONG = named("smoke.txt"), named("long.txt")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Marks what uses processes and servers, with `rest` what `make test` leaves out, and with `long` the soak's."""
    for item in items:
        used, names = uses(item), {item.nodeid, item.nodeid.partition("[")[0]}
        if names & LONG:
            used |= {"rest", "long"}
        elif used and not names & CHOSEN:
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
