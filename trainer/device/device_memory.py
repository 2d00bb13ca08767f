"""Says in a sentence that the device has no room."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rowcast.runtime.errors import ConfigError


@contextmanager
def memory_for(what: str, change: str) -> Iterator[None]:
    """Around an allocation. Raises ConfigError if memory is short; any other error, also a late one of CUDA, stays."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in first_line:
            raise
        raise ConfigError(f"{what} ({first_line}); {change}") from None
