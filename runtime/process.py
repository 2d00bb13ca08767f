"""Runs the stage threads of a process, handles its signals, keeps its first error, and ends it in order."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType, MappingProxyType, TracebackType
from typing import Self

from rowcast.runtime.command import say
from rowcast.runtime.errors import PeerLost, RowcastError
from rowcast.runtime.stages import Doorbell, Stage, StageThread, Wakes
from rowcast.runtime.telemetry.logs import get_logger

STOPS = (signal.SIGINT, signal.SIGTERM)
STOPPING = "stopping: the plans already made are finished first; a second signal ends the process at once"
AT_SUDDEN_EXIT: list[Callable[[], None]] = []  # each removes what a process that ends without a clean-up would leave
MAIN = "main"  # the thread that calls `Crew.check`
HANG_GRACE_S = 5.0  # how long after a fatal error the main thread may take to notice it


class Signals:
    """The first SIGINT or SIGTERM requests a stop, the second ends the process at once.

    Use it as a context manager in the main thread, around everything that takes time, including a command's imports.
    """

    def __init__(self) -> None:
        self.stop_reason: str | None = None
        self.began_s = time.monotonic()
        self.bell = Doorbell()  # the main thread's; rung by the first signal
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in STOPS:
            self._previous[number] = signal.signal(number, self._handle)
        # a launcher may have blocked them until they can be handled
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop_reason is not None:
            leave_at_once(128 + number)
        self.stop_reason = signal.Signals(number).name
        self.bell.ring()


class Crew:
    """The stage threads of a process, their bells, and the first error of any of them."""

    def __init__(self, process: str, bell: Doorbell, *, owns_process: bool = True) -> None:
        """`bell`: the main thread's. With `owns_process`, an error ends the process even if its main thread hangs."""
        self.error: BaseException | None = None
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
        """All but `stages` go by the names of some of these. `wakes` may name threads that this process lacks."""
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
        """Wakes a thread; before it has started, the main thread does its work."""
        self._bells.get(name, self._bells[MAIN]).ring()

    def wake_after(self, cause: object) -> None:
        """Wakes the threads that `wakes` names for this cause: a thread that did something, or a type of message."""
        for bell in self._wakes.get(cause, ()):
            bell.ring()

    def stop(self) -> None:
        for thread in self._threads.values():
            thread.stop()
        self._stopped.set()

    def fail(self, error: BaseException) -> None:
        """Keeps the first error, which the main thread raises. If the main thread hangs, the process is ended."""
        if self.error is None:
            self.error = error
            if self._owns_process:
                threading.Thread(target=self._end_hung_process, args=(error,), name="last resort", daemon=True).start()
        self._bells[MAIN].ring()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def dead_stage(self) -> str | None:
        """The name of a stage that an error has ended. None if the peer is lost, which is not this process's fault."""
        if self.error is None or isinstance(self.error, PeerLost):
            return None
        return next((name for name, thread in self._threads.items() if not thread.alive), None)

    def _end_hung_process(self, error: BaseException) -> None:
        if self._stopped.wait(HANG_GRACE_S):
            return
        get_logger().error("the main thread did not end; ending the process")
        say(
            self._process,
            str(error) if isinstance(error, RowcastError) else f"unexpected error: {type(error).__name__}: {error}",
        )
        leave_at_once(error.exit_code if isinstance(error, RowcastError) else 1)


def leave_at_once(code: int) -> None:
    """Ends the process without a clean-up, apart from `AT_SUDDEN_EXIT`."""
    for remove in AT_SUDDEN_EXIT:
        remove()
    os._exit(code)
