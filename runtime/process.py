"""Runs a command: handles its signals and ends its process in order.

It ends with an exit code and one sentence, without a traceback for errors that the user can correct."""

import atexit
import errno
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from rowcast.runtime.errors import RowcastError, advice, told
from rowcast.runtime.stages import Doorbell
from rowcast.runtime.stops import HELD, PASSED_ON, STOPS, leave_at_once, release
from rowcast.runtime.telemetry.logs import get_logger, make_lasting, say, setup_logging

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
    allow_open_files()
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


def allow_open_files() -> None:
    """Raises the soft limit of open files, which is often 1,024, to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # the host does not allow it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
