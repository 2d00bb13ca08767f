"""Settings for all tests."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests train tiny models: a second thread only waits. Tests that are about threads set their own."""
    torch.set_num_threads(1)
