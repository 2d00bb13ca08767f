"""Defines stages, the threads that run them, the bells that wake these threads, and how a stage shares its work.

A stage of either process is a function that does not block. In a process, a thread per stage calls it in a loop and
waits on the stage's bell. In a test, one thread advances all stages of both sides, in an order that a seed decides.

No wake-up is lost. A producer changes the state first and then rings; the thread hushes its bell before it looks:

    change, ring | hush, look: sees the change
    hush, look | change, ring | wait: returns at once
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

from rowcast.runtime.errors import LocalProtocolError

if TYPE_CHECKING:
    from rowcast.runtime.arrays import I32, I64

IDLE_WAIT_S = 0.2  # an idle stage looks again after this time: clocks do not ring
CALLERS = 3  # of a pool at a time: such as the fetcher, the write-back and the staging thread
POLL_S = 0.0002  # between looks at sources without a bell: a device's events, a slow store's tickets

# what happened -> the threads that it may unblock: their bells are rung
Wakes = Mapping[object, tuple[str, ...]]
Stage = Callable[[], bool]  # does what it can without waiting; returns whether it did anything


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
        """`on_work` runs after each call that did something. `polls` returns whether the stage now waits for
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
        """Ends the loop after the current call and joins the thread."""
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
                if stage():
                    self._on_work()
                else:
                    self._wait(polls, on_idle)
        except BaseException as error:  # noqa: BLE001 - the process must get any error
            self._on_error(error)


Part = TypeVar("Part")
Result = TypeVar("Result")


class ThreadPool:
    """Divides work by whole items, so that no result depends on the number of threads.

    It has the caller's thread and more threads: as many for each of three callers, so that none waits for another's
    work. A thread starts when it is first needed."""

    def __init__(self, num_threads: int = 1, *, name: str = "shares", least: int = 1) -> None:
        """`num_threads`: of one caller. `least`: the size of an item range that is worth waking a thread for."""
        self.num_threads, self._least = num_threads, least
        self._others = ThreadPoolExecutor(CALLERS * (num_threads - 1), name) if num_threads > 1 else None

    def over(self, parts: Sequence[Part], work: Callable[[Part], Result]) -> list[Result]:
        """Returns work(part) for each part. The first is this thread's."""
        if self._others is None or len(parts) <= 1:
            return list(map(work, parts))
        running = [self._others.submit(work, part) for part in parts[1:]]
        return [work(parts[0]), *(task.result() for task in running)]

    def num_shares(self, size: int) -> int:
        """Returns how many threads divide work of this size."""
        return max(1, min(self.num_threads, size // self._least))

    def share(
        self,
        work: Callable[[int, int], Result],
        first: int,
        end: int,
        item_size: int = 1,
        starts: "I32 | I64 | None" = None,
    ) -> list[Result]:
        """Returns work(from, to) of ranges that cover the items from `first` to `end` - 1.

        starts: for items of different sizes, the start of each item, and the end of the last item. item_size: per unit
        of `starts`, or per item."""
        if self._others is None:
            return [work(first, end)] if first < end else []
        num_units = end - first if starts is None else int(starts[end]) - int(starts[first])
        num_shares = self.num_shares(num_units * item_size)
        ranges = [own for own in pairwise(cuts(first, end, num_shares, starts)) if own[0] < own[1]]
        return self.over(ranges, lambda own: work(*own))


def cuts(first: int, end: int, num_shares: int, starts: "I32 | I64 | None") -> list[int]:
    """Returns the start of each range, and the end of the last; ranges have about the same size."""
    if starts is None:
        return [first + (end - first) * share // num_shares for share in range(num_shares + 1)]
    low, size = int(starts[first]), int(starts[end]) - int(starts[first])
    inner = (bisect_left(starts, low + size * share / num_shares, first, end) for share in range(1, num_shares))
    return [first, *inner, end]


S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class StateTable(Generic[S, E]):
    """A state machine as rows of state, event and following state."""

    def __init__(self, side: str, rows: Sequence[tuple[S, E, S]]) -> None:
        """The machine starts in the first row's state. Raises ValueError if two rows share state and event."""
        self.side = side
        self.first = rows[0][0]
        self.rows = tuple(rows)
        self._following = {(state, event): after for state, event, after in rows}
        if len(self._following) < len(rows):
            raise ValueError(f"the {side}'s table of states has two rows for the same state and event")

    def after(self, state: S, event: E) -> S:
        """Returns the next state. Raises LocalProtocolError if the event cannot happen in this state."""
        following = self._following.get((state, event))
        if following is None:
            allowed = ", ".join(f"'{event}'" for own, event, _ in self.rows if own is state) or "nothing"
            raise LocalProtocolError(
                f"'{event}' cannot happen in the {self.side}'s state '{state}'; {allowed} can: a bug of rowcast"
            )
        return following
