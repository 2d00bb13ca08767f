"""Starts processes that stop in order if their parent is killed, ends them together, and describes how they ended."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rowcast.runtime.errors import ERRORS_BY_EXIT_CODE, RowcastError
from rowcast.runtime.machine import stat_of
from rowcast.runtime.process import Signals
from rowcast.runtime.stops import AT_SUDDEN_EXIT, PASSED_ON, held
from rowcast.runtime.telemetry.logs import open_log


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path | None  # None if it writes to our stderr
    log_start: int = 0  # bytes of earlier processes

    @property
    def code(self) -> int | None:
        """Returns the exit code as a shell reports it; None while the process runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped the process; a debugger's hold does not count."""
        found = stat_of(self.process.pid)
        return found is not None and found.state == "T"

    def signal(self, number: int) -> None:
        if self.code is None:
            self.process.send_signal(number)

    def ended_within(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self, seconds: float) -> None:
        """Waits up to `seconds` for the process to end, then sends SIGTERM, and after `seconds` more SIGKILL."""
        if not self.ended_within(seconds):
            self.signal(signal.SIGTERM)
            if not self.ended_within(seconds):
                self.signal(signal.SIGKILL)
                self.ended_within(seconds)

    def describe_exit(self) -> str:
        """Describes how the process ended. Call it only after the end."""
        who, code = f"the {self.name} (process {self.process.pid})", self.process.returncode
        if code < 0:
            return f"{who} {killed_by(-code)}"
        if self.log is None:
            return f"{who} ended with code {code}; its error is above"
        return f"{who} ended with code {code}: {self.last_line(self.log)} [{self.log}]"

    def last_line(self, log: Path) -> str:
        """Returns the last error in the log, or the last line: a process of another run may write to it as well."""
        try:
            text = log.read_bytes()[self.log_start :].decode(errors="replace")
        except OSError as error:
            return f"its log cannot be read ({error.strerror})"
        lines = text.strip().splitlines()
        return "".join(([line for line in lines if line.startswith(f"rowcast {self.name}: ")] or lines)[-1:])


def killed_by(number: int) -> str:
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    return f"was killed by {name}" + (
        "; unless you sent it, the machine ran out of memory" if name == "SIGKILL" else ""
    )


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
        process = subprocess.Popen(command, stdout=file, stderr=output, env=environment(), preexec_fn=tie)
    return Child(name, process, log, log_start)


def environment() -> dict[str, str]:
    """Returns this process's environment, with its module search path: `python -m` would search the working folder
    first, which may be somebody's run."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


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
    while True:
        ended = [child for child in children if child.code is not None]
        if first is None:
            first = failed(children, replaced)
            if first is not None:
                now_s = time.monotonic()
                deadlines.extend([(now_s + NOTICE_S, PASSED_ON), (now_s + END_S, signal.SIGKILL)])
        if ended == children:  # all had ended, and none was replaced since
            return first
        if deadlines and time.monotonic() > deadlines[0][0]:
            _, number = deadlines.popleft()
            for child in children:
                child.signal(number)
        meanwhile()
        time.sleep(POLL_S)


def failed(children: list[Child], replaced: Callable[[Child], Child | None]) -> Child | None:
    for index, child in enumerate(children):
        if child.code:
            another = replaced(child)
            if another is None:
                return child
            children[index] = another
    return None


def ended_badly(child: Child) -> RowcastError:
    code = child.code or 1
    error = ERRORS_BY_EXIT_CODE.get(code, RowcastError)(child.describe_exit())
    error.exit_code = code
    return error
