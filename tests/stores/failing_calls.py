"""Calls to the file system that fail, in place of those of `os`."""

import os
from collections.abc import Callable


def failing(code: int, after: int = 0) -> Callable[..., int]:
    """A call to the file system that fails, from the call number `after` on."""
    calls = 0

    def fail(*_: object) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(code, os.strerror(code))
        return 0

    return fail
