"""Runs the stage threads of a process.

It is not in `stages.py`, because a serving host imports that one without the packages that write logs.
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from rowcast.runtime.errors import PeerLost, RowcastError, told
from rowcast.runtime.stages import Doorbell, Stage, StageThread, Wakes
from rowcast.runtime.stops import leave_at_once
from rowcast.runtime.telemetry.logs import get_logger, say

MAIN = "main"  # the thread that calls `Crew.check`
HANG_GRACE_S = 5.0  # how long the main thread may take to notice a fatal error


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
