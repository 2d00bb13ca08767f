"""Defines stages, the threads that run them, and the bells that wake these threads.

Every stage of both processes has one non-blocking `advance()`. In a process, a thread per stage calls it in a loop and
waits on the stage's bell. In a test, one thread advances all stages of both sides, in an order that a seed decides.

No wake-up is lost. A producer changes the state first and then rings; the thread hushes its bell before it looks:

    change, ring | hush, advance: sees the change
    hush, advance | change, ring | wait: returns at once
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

IDLE_WAIT_S = 0.05  # an idle stage looks again after this time: clocks do not ring
POLL_S = 0.0002  # between looks at sources without a bell: a device's events, a slow store's tickets

# what happened -> the threads that it may unblock: their bells are rung
Wakes = Mapping[object, tuple[str, ...]]


class Stage(Protocol):
    def advance(self) -> bool:
        """Does what it can without waiting; returns whether it did anything."""


class FunctionStage:
    """A stage made of one function, such as one of an engine's."""

    def __init__(self, advance: Callable[[], bool]) -> None:
        self.advance = advance


class Doorbell:
    """Wakes the one thread that waits on it. It stays rung until that thread hushes it or has waited."""

    def __init__(self) -> None:
        self._quiet = threading.Lock()  # held until it is rung
        self._quiet.acquire()

    def ring(self) -> None:
        """Any thread or signal handler may call it. Ringing a rung bell costs next to nothing."""
        if self._quiet.locked():
            try:
                self._quiet.release()
            except RuntimeError:  # another thread has rung since
                return

    def hush(self) -> bool:
        """Silences the bell. Returns whether it had rung."""
        return self._quiet.acquire(blocking=False)

    def wait(self, timeout_s: float) -> bool:
        """Waits for a ring, then hushes the bell. Returns False after the time-out."""
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
        """`on_work` runs after each `advance` that did something. `polls` returns whether the stage now waits for
        something without a bell; None: it never does."""
        self._bell = bell
        self._on_error = on_error
        self._on_work = on_work
        self._stopped = threading.Event()
        # arguments, so that the stage's objects can be freed once its thread has ended
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
        except BaseException as error:  # noqa: BLE001 - the process must get any error
            self._on_error(error)
