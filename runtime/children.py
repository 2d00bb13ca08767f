"""Starts processes that stop in order if their parent is killed, and ends them together."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rowcast.runtime.child import Child
from rowcast.runtime.errors import RowcastError
from rowcast.runtime.process import AT_SUDDEN_EXIT, Signals
from rowcast.runtime.stops import PASSED_ON, held
from rowcast.runtime.telemetry.lasting_output import open_log

POLL_S = 0.1
NOTICE_S = 3.0  # for the other processes to notice a failed one, before they get a stop signal
END_S = 40.0  # before they are killed: an orderly stop takes up to 30 s
PRCTL, PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1


def start_child(name: str, module: str, arguments: Sequence[str], log: Path | None = None) -> Child:
    """Starts `python -m module`. `log`: appended to, to keep the log of an earlier run; None: our stderr."""
    command = [sys.executable, "-m", module, *arguments]
    with ExitStack() as stack:
        file = None if log is None else stack.enter_context(open_log(log, "ab"))
        log_start = 0 if file is None else file.tell()
        output = subprocess.STDOUT if file is not None else None
        stack.enter_context(held())
        tie = partial(stop_with_parent, os.getpid())
        process = subprocess.Popen(command, stdout=file, stderr=output, preexec_fn=tie)
    return Child(name, process, log, log_start)


def stop_with_parent(parent: int) -> None:
    """Stops this process if its `parent` is killed or was killed already."""
    PRCTL(PR_SET_PDEATHSIG, PASSED_ON)
    if os.getppid() != parent:
        os.kill(os.getpid(), PASSED_ON)


class StopsChildren:
    """Passes a stop on to children, once. A second signal ends this process and them at once."""

    def __init__(self, signals: Signals, children: list[Child]) -> None:
        self.asked = False
        self._signals, self._children = signals, children
        AT_SUDDEN_EXIT.append(partial(self._send, signal.SIGTERM))

    def advance(self) -> bool:
        """Returns whether it passed a stop on now."""
        if self.asked or self._signals.stop_reason is None:
            return False
        self.asked = True
        self._send(PASSED_ON)
        return True

    def _send(self, number: int) -> None:
        for child in self._children:
            child.signal(number)


def ended_together(
    children: list[Child],
    replaced: Callable[[Child], Child | None] = lambda child: None,
    meanwhile: Callable[[], object] = lambda: None,
) -> Child | None:
    """Waits for all children. Returns the first failed one, or None.

    `replaced` returns a replacement for a failed process, or None. Then the others get time to notice, a stop signal,
    and at last SIGKILL."""
    first: Child | None = None
    deadlines: deque[tuple[float, int]] = deque()
    while any(child.code is None for child in children):
        if first is None:
            first = failed(children, replaced)
            if first is not None:
                now_s = time.monotonic()
                deadlines.extend([(now_s + NOTICE_S, PASSED_ON), (now_s + END_S, signal.SIGKILL)])
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
