"""Lets one process make files in a folder while others wait for them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rowcast.runtime.disk import try_lock
from rowcast.runtime.errors import ConfigError

LONGEST_WAIT_S = 1800.0  # without a change of the files that the holder makes


@contextmanager
def folder_lock(lock: Path, made: str) -> Iterator[None]:
    """Holds the lock file `lock`. Continues without it if the folder cannot be locked, or if the holder seems to be
    stopped: for so long no file that matches `made` has grown beside it."""
    descriptor = None
    with suppress(OSError, ConfigError):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        wait_for_lock(descriptor, lock, made)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def wait_for_lock(descriptor: int, lock: Path, made: str) -> None:
    seen, until_s = -1, 0.0
    while not try_lock(descriptor, lock):
        now = sum(own.stat().st_size for own in lock.parent.glob(made) if own.exists())
        if now != seen:
            seen, until_s = now, time.monotonic() + LONGEST_WAIT_S
        if time.monotonic() > until_s:
            return
        time.sleep(0.05)
