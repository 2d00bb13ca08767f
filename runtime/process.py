"""Runs a command: handles its signals, starts and ends its child processes, and ends its own process in order.

A process ends with an exit code and one sentence, without a traceback for errors that the user can correct. Its
children stop in order if it is killed.
"""

import atexit
import ctypes
import errno
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from rowcast.runtime.errors import ERRORS_BY_EXIT_CODE, RowcastError, advice, told
from rowcast.runtime.machine import stat_of
from rowcast.runtime.stages import Doorbell
from rowcast.runtime.stops import AT_SUDDEN_EXIT, HELD, PASSED_ON, STOPS, held, leave_at_once, release
from rowcast.runtime.telemetry.logs import get_logger, make_lasting, open_log, say, setup_logging

INTERRUPTED = 130  # 128 + SIGINT, as in shells


def run_command(process: str, main: Callable[[], int | None]) -> int:
    """Runs `main` until a signal interrupts it. Returns the exit code of the process."""

    def interruptible() -> int | None:
        release()
        return main()

    return exit_code_of(process, interruptible)


def exit_code_of(process: str, main: Callable[[], int | None]) -> int:
    """Runs `main` and returns the exit code of the process: what `main` returned, or 0 for None.

    A RowcastError becomes one line on stderr and its exit code; an interrupt becomes 130. Any other exception is our
    bug: its traceback is logged and the code is 1. Logging works before `main` sets it up."""
    make_lasting("stderr")
    setup_logging(process)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # the host does not allow it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # the soft limit is often 1,024
    try:
        code = main() or 0
    except RowcastError as error:
        code = error.exit_code
        say(process, str(error))
    except BrokenPipeError:  # as under `| head`
        code = 1
        say(process, "stdout was closed before everything was written")
    except KeyboardInterrupt:
        code = INTERRUPTED
        say(process, "interrupted")
    except Exception as error:  # noqa: BLE001 - logged with its traceback, and the process ends
        code = 1
        if not isinstance(error, OSError) or stdout_errno(after="\n") != error.errno:
            get_logger().exception("unexpected error")
            say(process, f"unexpected error: {told(error)[1]}")
    if unwritten := stdout_errno(after=""):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter exits with 120
        if unwritten not in (errno.EPIPE, errno.EIO):  # a reader that has ended (`| head`) changes no code
            code = code or 1
            say(process, f"stdout cannot be written ({os.strerror(unwritten)}); {advice(unwritten, 'redirect it')}")
    return code


def stdout_errno(*, after: str) -> int:
    """Writes `after` and flushes. Returns why stdout cannot be written, or 0. What failed may be in no buffer now."""
    try:
        sys.stdout.write(after)
        sys.stdout.flush()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


NAMES = {number: number.name for number in STOPS} | {PASSED_ON: "a request"}
TOGETHER_S = 1.0  # signals within this time are one request
UNTRAINED = "stopped before the first step; nothing was trained since this start"
STOPPING = "stopping: the plans already made are finished first; a second signal ends the process at once"


class Signals:
    """The first of STOPS requests a stop; a second one after TOGETHER_S ends the process at once.

        signal -> handler in C -> pipe -> thread

    So no signal waits for the main thread, which may be in a long call. Signals before `start` are held (`stops.py`).
    """

    def __init__(self) -> None:
        self.stop_reason: str | None = None
        self.left_undone = ""  # logged at the end of a process that a stop has ended
        self.began_s = time.monotonic()
        self.bell = Doorbell()  # the main thread's; rung by the first signal

    def start(self) -> Self:
        """Handles signals until the process ends. Call it in the main thread."""
        self._arrived, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in HELD:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda number, frame: None)
        atexit.register(ignore_signals)
        release()
        if self._has_more():  # held until now
            self._request()
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def _watch(self) -> None:
        if self.stop_reason is None:
            self._request()
        # `timeout`, a service manager and a closing terminal may signal a process more than once
        time.sleep(TOGETHER_S)
        while self._has_more():
            os.read(self._arrived, 4096)
        leave_at_once(128 + self._next(STOPS))

    def _request(self) -> None:
        self.stop_reason = NAMES[self._next(HELD)]
        self.bell.ring()

    def _has_more(self) -> bool:
        return bool(select.select([self._arrived], [], [], 0)[0])

    def _next(self, numbers: Sequence[int]) -> int:
        while (number := os.read(self._arrived, 1)[0]) not in numbers:
            continue  # a handler of foreign code
        return number


def ignore_signals() -> None:
    """Ignores signals until the process ends. Python restores the default handlers before that."""
    for number in HELD:
        signal.signal(number, signal.SIG_IGN)


def run_until_stopped(process: str, main: Callable[[Signals], int | None]) -> int:
    """As `run_command`, for a command that ends in order after a stop signal, and whose stdout holds no results."""
    make_lasting("stdout")  # first: the pipe of the signals must not get a missing descriptor's number
    signals = Signals().start()

    def stoppable() -> int | None:
        code = main(signals)
        if signals.stop_reason is not None and signals.left_undone:
            get_logger().info(signals.left_undone, reason=signals.stop_reason)
        return code

    return exit_code_of(process, stoppable)


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path | None  # None if the child writes to our stderr
    log_start: int = 0  # bytes of earlier processes

    @property
    def code(self) -> int | None:
        """Returns the exit code as a shell reports it; None while the process runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped the process; a debugger's hold does not count."""
        status = stat_of(self.process.pid)
        return status is not None and status.state == "T"

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
