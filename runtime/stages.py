"""Defines stages and the threads that run them.

Every stage of both processes has one non-blocking `advance()`. In a process, each stage has a thread that calls it in a
loop. In a test, one thread advances all stages of both sides, in an order that a seed decides.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

IDLE_WAIT_S = 0.05  # an idle stage looks again after this time, because clocks and devices do not ring


class Stage(Protocol):
    def advance(self) -> bool:
        """Does what it can without waiting; returns whether it did anything."""


class FunctionStage:
    """A stage made of one function, such as one of an engine's."""

    def __init__(self, advance: Callable[[], bool]) -> None:
        self.advance = advance


class Doorbell:
    """Wakes all idle stages of a process. Code that has changed something rings it."""

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
        """Returns once `rings` differs from `seen`, or after the time-out."""
        with self._condition:
            if self._rings == seen:
                self._condition.wait(timeout_s)


class StageThread:
    """Runs one stage until it is stopped. The first error is passed to `on_error` and ends the thread."""

    def __init__(
        self,
        name: str,
        stage: Stage,
        bell: Doorbell,
        on_error: Callable[[BaseException], None],
        on_idle: Callable[[float], None] | None = None,
    ) -> None:
        self._bell = bell
        self._on_error = on_error
        self._stopped = threading.Event()
        # arguments, so that what the stage holds can be freed once its thread has ended
        self._thread = threading.Thread(target=self._run, args=(stage, on_idle), name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the current `advance` and joins the thread."""
        self._stopped.set()
        self._bell.ring()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _wait(self, seen: int, on_idle: Callable[[float], None] | None) -> None:
        began_s = time.perf_counter()
        self._bell.wait(seen)
        if on_idle is not None:
            on_idle(time.perf_counter() - began_s)

    def _run(self, stage: Stage, on_idle: Callable[[float], None] | None) -> None:
        try:
            while not self._stopped.is_set():
                seen = self._bell.rings
                if stage.advance():
                    self._bell.ring()
                else:
                    self._wait(seen, on_idle)
        except BaseException as error:  # noqa: BLE001 - the process must hear of any error
            self._on_error(error)
