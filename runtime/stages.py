"""Defines stages, the threads and the crew that run them, the bells that wake them, and how a stage shares its work.

A stage of either process is a function that does not block. In a process, a thread per stage calls it in a loop and
waits on the stage's bell. In a test, one thread advances all stages of both sides, in an order that a seed decides.

No wake-up is lost: a producer changes the state and then rings; the thread hushes its bell and then looks:

    change, ring | hush, look: sees the change
    hush, look | change, ring | wait: returns at once
"""

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeVar

from rowcast.runtime.errors import LocalProtocolError, PeerLost, RowcastError, told
from rowcast.runtime.stops import leave_at_once

if TYPE_CHECKING:
    from rowcast.runtime.arrays import I32, I64


IDLE_WAIT_S = 0.2  # an idle stage looks again after this time: clocks do not ring
CALLERS = 3  # of a pool at a time: such as the fetcher, the write-back and the staging thread
POLL_S, MOST_POLL_S = 0.0002, 0.005  # between looks at sources without a bell

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


class Period:
    """The time between two steps or plans. A tenth of it, within limits, lies between a thread's looks at what rings no
    bell: a device's events, a slow store's tickets."""

    def __init__(self) -> None:
        self.look_s = POLL_S
        self._ended_s = -math.inf

    def ended(self, now_s: float) -> None:
        self.look_s = min(MOST_POLL_S, max(POLL_S, (now_s - self._ended_s) / 10))
        self._ended_s = now_s


def only_bells() -> float:
    """The wait of a stage whose work all rings its bell."""
    return IDLE_WAIT_S


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
        look_s: Callable[[], float] = only_bells,
    ) -> None:
        """`on_work` runs after each call that did something. `look_s` returns how long the idle stage may now wait."""
        self._bell = bell
        self._on_error = on_error
        self._on_work = on_work
        self._stopped = threading.Event()
        # arguments, so that the stage's objects can be freed once its thread has ended
        self._thread = threading.Thread(target=self._run, args=(stage, look_s, on_idle), name=name, daemon=True)

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

    def _run(self, stage: Stage, look_s: Callable[[], float], on_idle: Callable[[float], None] | None) -> None:
        try:
            while True:
                self._bell.hush()
                if self._stopped.is_set():
                    return
                if stage():
                    self._on_work()
                else:
                    began_s = time.perf_counter()
                    self._bell.wait(look_s())
                    if on_idle is not None:
                        on_idle(time.perf_counter() - began_s)
        except BaseException as error:  # noqa: BLE001 - the process must get any error
            self._on_error(error)


Part = TypeVar("Part")
Result = TypeVar("Result")


class ThreadPool:
    """Divides work by whole items, so that no result depends on the number of threads.

    It has the caller's thread and more: equally many for each of three callers, so that none waits for another's
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
        ranges = [ends for ends in pairwise(cuts(first, end, num_shares, starts)) if ends[0] < ends[1]]
        return self.over(ranges, lambda ends: work(*ends))


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
            allowed = ", ".join(f"'{event}'" for origin, event, _ in self.rows if origin is state) or "nothing"
            raise LocalProtocolError(
                f"'{event}' cannot happen in the {self.side}'s state '{state}'; {allowed} can: a bug of rowcast"
            )
        return following


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
        looks_s: Mapping[str, Callable[[], float]] = MappingProxyType({}),
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
                look_s=looks_s.get(name, only_bells),
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
        # a serving host imports this module without the packages that write logs
        from rowcast.runtime.telemetry.logs import get_logger, say

        get_logger().error("the main thread did not end; ending the process")
        code, sentence = told(error)
        say(self._process, sentence if isinstance(error, RowcastError) else f"unexpected error: {sentence}")
        leave_at_once(code)
