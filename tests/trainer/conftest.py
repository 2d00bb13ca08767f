"""Threads of Torch, which some tests change."""

from collections.abc import Iterator

import pytest
import torch

from rowcast.trainer.device.cuda import warm_up_sqrt


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch's threads: one, or what a test asks for."""
    warm_up_sqrt()
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)
