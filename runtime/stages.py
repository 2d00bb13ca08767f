"""Stages and the threads that run them.

Every stage of both processes has one non-blocking `advance()`. In a process each stage has a thread that is a loop around it;
in a test all stages of both sides are advanced by one thread, in an order that a seed decides.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

IDLE_WAIT_S = 0.05  # a stage looks again after this long even if nobody rang, for what has no bell: clocks and devices


class Stage(Protocol):
    def advance(self) -> bool:
        """Does what can be done without waiting; True if anything was done."""


class FunctionStage:
    """A stage that is one function: an engine's, for one of its threads."""

    def __init__(self, advance: Callable[[], bool]) -> None:
        self.advance = advance


class Doorbell:
    """Wakes every idle stage of a process: whoever has changed something rings."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._rings = 0

    @property
    def rings(self) -> int:
        return self._rings

    def ring(self) -> None:
        with self._condition:
            self._rings += 1
            self._condition.notify_all()

    def wait(self, seen: int, timeout_s: float = IDLE_WAIT_S) -> None:
        """Returns when the bell has rung since `seen` rings, or after the time-out."""
        with self._condition:
            if self._rings == seen:
                self._condition.wait(timeout_s)


class StageThread:
    """Runs one stage until stopped. Its first error is handed to `on_error`, and ends the thread."""

    def __init__(
        self,
        name: str,
        stage: Stage,
        bell: Doorbell,
        on_error: Callable[[BaseException], None],
        on_idle: Callable[[float], None] | None = None,
    ) -> None:
        """`on_idle` is told after each wait how many seconds it took."""
        self._stage = stage
        self._bell = bell
        self._on_error = on_error
        self._on_idle = on_idle
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the `advance` in progress and joins the thread."""
        self._stopped.set()
        self._bell.ring()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _wait(self, seen: int) -> None:
        began_s = time.perf_counter()
        self._bell.wait(seen)
        if self._on_idle is not None:
            self._on_idle(time.perf_counter() - began_s)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                seen = self._bell.rings
                if self._stage.advance():
                    self._bell.ring()
                else:
                    self._wait(seen)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the process must hear of it
            self._on_error(error)
