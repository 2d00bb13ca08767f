"""Starts processes that stop in order when their parent is killed, and ends them together."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from rowcast.runtime.child import Child
from rowcast.runtime.errors import RowcastError

STOPS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.1
NOTICE_S = 3.0  # for the other processes to notice that one has failed, before they are asked to stop
END_S = 40.0  # until they are killed: a stop in order takes up to 30 s
PRCTL, PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1


def start_child(name: str, module: str, arguments: Sequence[str], log: Path | None = None) -> Child:
    """Starts `python -m module`. `log`: appended to, so that the log of an earlier run stays; None: our stderr.

    STOPS are blocked in it, and so kept, until it has handlers and unblocks them.
    """
    command = [sys.executable, "-m", module, *arguments]
    with ExitStack() as stack:
        file = None if log is None else stack.enter_context(log.open("ab"))
        output = subprocess.STDOUT if file is not None else None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        process = subprocess.Popen(command, stdout=file, stderr=output, preexec_fn=stop_with_parent)
    return Child(name, process, log)


def stop_with_parent() -> None:
    """Requests SIGTERM for this process if the process that has started it is killed."""
    PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)


def forward(children: Callable[[], Sequence[Child]]) -> Callable[[int, FrameType | None], None]:
    """A handler that passes a signal on to the children of that moment."""

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and has_terminal():
            return  # the terminal has sent it to all processes; a second one would end the others at once
        for child in children():
            child.signal(number)

    return handle


def has_terminal() -> bool:
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def ended_together(
    children: list[Child],
    replaced: Callable[[Child], Child | None] = lambda child: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Child | None:
    """Waits for all; returns the child that failed first, or None.

    `replaced` is asked for another process in place of one that has failed. If there is none, the others may notice by
    themselves, are then asked to stop, then killed.
    """
    first: Child | None = None
    deadlines: deque[tuple[float, signal.Signals]] = deque()
    while any(child.code is None for child in children):
        if first is None:
            first = failed(children, replaced)
            if first is not None:
                now_s = time.monotonic()
                deadlines.extend([(now_s + NOTICE_S, signal.SIGTERM), (now_s + END_S, signal.SIGKILL)])
        if deadlines and time.monotonic() > deadlines[0][0]:
            _, number = deadlines.popleft()
            for child in children:
                child.signal(number)
        meanwhile()
        time.sleep(POLL_S)
    return first or failed(children, lambda child: None)


def failed(children: list[Child], replaced: Callable[[Child], Child | None]) -> Child | None:
    for index, child in enumerate(children):
        if child.code:
            another = replaced(child)
            if another is None:
                return child
            children[index] = another
    return None


def ended_badly(child: Child) -> RowcastError:
    error = RowcastError(child.describe_exit())
    error.exit_code = child.code or 1
    return error
