"""Runs the stage threads of a process, handles its signals, keeps its first error, and ends it in order.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Self

from rowcast.runtime.errors import PeerLost, RowcastError, advice, told
from rowcast.runtime.stages import Doorbell, Stage, StageThread, Wakes
from rowcast.runtime.stops import HELD, PASSED_ON, STOPS, release
from rowcast.runtime.telemetry.logs import get_logger, make_lasting, print_line, setup_logging

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


def say(process: str, sentence: str) -> None:
    print_line(" ".join(sentence.splitlines()), f"rowcast {process}")


def stdout_errno(*, after: str) -> int:
    """Writes `after` and flushes. Returns why stdout cannot be written, or 0. What failed may be in no buffer now."""
    try:
        sys.stdout.write(after)
        sys.stdout.flush()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


NAMES = {number: number.name for number in STOPS} | {PASSED_ON: "a stop passed on"}
TOGETHER_S = 1.0  # signals within this time are one request
STOPPING = "stopping: the plans already made are finished first; a second signal ends the process at once"
AT_SUDDEN_EXIT: list[Callable[[], None]] = []  # each removes what a process without a clean-up would leave
MAIN = "main"  # the thread that calls `Crew.check`
HANG_GRACE_S = 5.0  # how long the main thread may take to notice a fatal error


class Signals:
    """The first of STOPS requests a stop; a second one after TOGETHER_S ends the process at once.

        signal -> handler in C -> pipe -> thread

    So no signal waits for the main thread, which may be in a long call. Signals before `start` are held (`stops.py`).
    """

    def __init__(self) -> None:
        self.stop_reason: str | None = None
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
    return exit_code_of(process, lambda: main(signals))


class Crew:
    """The stage threads of a process, their bells, and the first error of any of them."""

    def __init__(self, process: str, bell: Doorbell, *, owns_process: bool = True) -> None:
        """`bell`: the main thread's. With `owns_process`, an error ends the process even if its main thread hangs."""
        self.error: BaseException | None = None
        self.bell = bell
        self._process = process
        self._owns_process = owns_process
        self._bells = {MAIN: bell}
        self._wakes: dict[object, tuple[Doorbell, ...]] = {}
        self._threads: dict[str, StageThread] = {}
        self._stopped = threading.Event()

    def start(
        self,
        stages: Mapping[str, Stage],
        on_idle: Mapping[str, Callable[[float], None]],
        wakes: Wakes = MappingProxyType({}),
        polls: Mapping[str, Callable[[], bool]] = MappingProxyType({}),
    ) -> None:
        """The other arguments name some of `stages`. `wakes` may name threads that this process lacks."""
        self._bells |= {name: Doorbell() for name in stages}
        self._wakes |= {
            cause: tuple(self._bells[name] for name in names if name in self._bells) for cause, names in wakes.items()
        }
        threads = {
            name: StageThread(
                name,
                stage,
                self._bells[name],
                self.fail,
                on_idle.get(name),
                on_work=partial(self.wake_after, name),
                polls=polls.get(name),
            )
            for name, stage in stages.items()
        }
        self._threads |= threads
        for thread in threads.values():
            thread.start()

    def wake(self, name: str) -> None:
        """Wakes a thread, or, before that thread starts, the main thread, which does its work."""
        self._bells.get(name, self._bells[MAIN]).ring()

    def wake_after(self, cause: object) -> None:
        """Wakes the threads that `wakes` lists for this cause: a thread that did something, or a type of message."""
        for bell in self._wakes.get(cause, ()):
            bell.ring()

    def stop(self) -> None:
        for thread in self._threads.values():
            thread.stop()
        self._stopped.set()

    def fail(self, error: BaseException) -> None:
        """Keeps the first error for the main thread to raise. If the main thread hangs, ends the process."""
        if self.error is None:
            self.error = error
            if self._owns_process:
                threading.Thread(target=self._end_hung_process, args=(error,), name="last resort", daemon=True).start()
        self._bells[MAIN].ring()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def dead_stage(self) -> str | None:
        """Returns the name of a stage that an error has ended. None if the peer is lost, which is not this process's
        fault."""
        if self.error is None or isinstance(self.error, PeerLost):
            return None
        return next((name for name, thread in self._threads.items() if not thread.alive), None)

    def _end_hung_process(self, error: BaseException) -> None:
        if self._stopped.wait(HANG_GRACE_S):
            return
        get_logger().error("the main thread did not end; ending the process")
        code, sentence = told(error)
        say(self._process, sentence if isinstance(error, RowcastError) else f"unexpected error: {sentence}")
        leave_at_once(code)


def leave_at_once(code: int) -> None:
    """Ends the process without a clean-up, apart from `AT_SUDDEN_EXIT`."""
    for remove in AT_SUDDEN_EXIT:
        remove()
    os._exit(code)
