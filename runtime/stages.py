"""Defines stages, the threads that run them, and the bells that wake these threads.

Every stage of both processes has one non-blocking `advance()`. In a process, each stage has a thread that calls it in a
loop and a bell that the thread waits on. In a test, one thread advances all stages of both sides, in an order that a
seed decides.

No wake-up is lost. Who makes work for a thread changes its state first and rings then; the thread hushes its bell
before it looks:

    change, ring | hush, advance: sees the change
    hush, advance | change, ring | wait: returns at once
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

IDLE_WAIT_S = 0.05  # an idle stage looks again after this time, because clocks do not ring
POLL_S = 0.0002  # between looks at what rings no bell: the events of a device, the tickets of a slow store

# what has happened -> the threads that it may let go on: their bells are rung
Wakes = Mapping[object, tuple[str, ...]]


class Stage(Protocol):
    def advance(self) -> bool:
        """Does what it can without waiting; returns whether it did anything."""


class FunctionStage:
    """A stage made of one function, such as one of an engine's."""

    def __init__(self, advance: Callable[[], bool]) -> None:
        self.advance = advance


class Doorbell:
    """Wakes the one thread that waits on it. Once rung, it stays rung until that thread hushes it or has waited."""

    def __init__(self) -> None:
        self._quiet = threading.Lock()  # held until somebody rings
        self._quiet.acquire()

    def ring(self) -> None:
        """Any thread may call it, and a signal handler. If the bell has rung already, it costs next to nothing."""
        if self._quiet.locked():
            try:
                self._quiet.release()
            except RuntimeError:  # another thread has rung since
                return

    def hush(self) -> bool:
        """Returns whether it had rung."""
        return self._quiet.acquire(blocking=False)

    def wait(self, timeout_s: float) -> bool:
        """Returns True once it has rung, which hushes it, or False after the time-out."""
        return self._quiet.acquire(timeout=timeout_s)


class StageThread:
    """Runs one stage until it is stopped. The first error is passed to `on_error` and ends the thread."""

    def __init__(
        self,
        name: str,
        stage: Stage,
        bell: Doorbell,
        on_error: Callable[[BaseException], None],
        on_idle: Callable[[float], None] | None = None,
        *,
        on_work: Callable[[], None] = lambda: None,
        polls: Callable[[], bool] | None = None,
    ) -> None:
        """`on_work` is called after each `advance` that did something. `polls` returns whether the stage now waits for
        something that rings no bell; None: it never does.
        """
        self._bell = bell
        self._on_error = on_error
        self._on_work = on_work
        self._stopped = threading.Event()
        # arguments, so that what the stage holds can be freed once its thread has ended
        self._thread = threading.Thread(target=self._run, args=(stage, polls, on_idle), name=name, daemon=True)

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

    def _wait(self, polls: Callable[[], bool] | None, on_idle: Callable[[float], None] | None) -> None:
        began_s = time.perf_counter()
        self._bell.wait(POLL_S if polls is not None and polls() else IDLE_WAIT_S)
        if on_idle is not None:
            on_idle(time.perf_counter() - began_s)

    def _run(self, stage: Stage, polls: Callable[[], bool] | None, on_idle: Callable[[float], None] | None) -> None:
        try:
            while True:
                self._bell.hush()
                if self._stopped.is_set():
                    return
                if stage.advance():
                    self._on_work()
                else:
                    self._wait(polls, on_idle)
        except BaseException as error:  # noqa: BLE001 - the process must hear of any error
            self._on_error(error)
