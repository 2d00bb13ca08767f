"""Settings for all tests."""

from collections.abc import Iterator

import pytest
import torch

from tests.system.processes import Session
from tests.system.starting import Starter


@pytest.hookimpl(tryfirst=True)  # before the one that reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several workers share the tests, those that start processes of their own take turns on one of them: two at once would wait for
    each other's cores, and some of them wait for no longer than a user would."""
    for item in items:
        assert isinstance(item, pytest.Function), f"{item} is no function"
        if "starter" in item.fixturenames or vars(item.module).get("Session") is Session:
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests train tiny models: a second thread only waits. Tests that are about threads set their own."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def starter() -> Iterator[Starter]:
    """Starts commands without their imports; it is started when a test first asks for it."""
    with Starter() as starter:
        yield starter
