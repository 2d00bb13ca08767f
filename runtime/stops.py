"""What a command needs before its other imports: it holds the signals that stop a run, and imports without the garbage
collector. This module imports almost nothing.
"""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = signal.SIGRTMIN + 1  # sent by a parent instead, so that a child never counts one stop twice
HELD = (*STOPS, PASSED_ON)


def hold() -> None:
    """Blocks them in this thread and all threads that it starts, until `release`. Signals meanwhile are not lost."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


def release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


@contextmanager
def held() -> Iterator[None]:
    """Holds them within the block. A process started inside holds them until it calls `release`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


AT_SUDDEN_EXIT: list[Callable[[], None]] = []  # each removes what a process without a clean-up would leave


def leave_at_once(code: int) -> None:
    """Ends the process without a clean-up, apart from `AT_SUDDEN_EXIT`."""
    for remove in AT_SUDDEN_EXIT:
        remove()
    os._exit(code)


@contextmanager
def uncollected() -> Iterator[None]:
    """Lets the block import without the garbage collector, which also ignores the new objects later: modules are never
    garbage, and scanning a million of their objects takes a fifth of the time of their imports."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
