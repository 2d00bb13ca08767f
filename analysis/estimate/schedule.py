"""Computes when each task of a pipeline runs, and what it waits for.

    thread     one task at a time; of several lanes, the first whose next task may begin
    lane       tasks in order
    task       may begin once the tasks before it (`after`) have ended, and the ring that it needs has room

    planning   | plan 0 | plan 1 | plan 2 |
    fetcher             | fetch 0 | fetch 1 | fetch 2 |
    main                          | step 0          | step 1          | ...

A task that begins late has one cause: the task that ended at that moment, on its own thread or before it. The causes,
followed back from the last task, are the critical path: no task on it can take longer without the end moving.

Where more threads work than there are cores, each gets an equal share of them.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

BUSY = "busy"  # the cause is the task before on the same thread


class Ring:
    """Bytes that tasks of one lane allocate at their start, and tasks of a different lane free in order at their end.

    Its places are those of `protocol.transport.ring`: a piece is contiguous, and an empty ring starts over at byte 0.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._end = 0  # where the newest piece ends
        self._free_from = 0  # everything before it is free
        self._ends: deque[int] = deque()
        self.waiting: Task | None = None  # it found no room

    def take(self, nbytes: int) -> bool:
        """Returns False if there is no room."""
        if not self._ends:
            self._end = self._free_from = -(-self._end // self._nbytes) * self._nbytes
        fits = self._end % self._nbytes + nbytes <= self._nbytes
        end = nbytes + (self._end if fits else -(-self._end // self._nbytes) * self._nbytes)
        if end - self._free_from > self._nbytes:
            return False
        self._end = end
        self._ends.append(end)
        return True

    def give_back(self) -> None:
        self._free_from = self._ends.popleft()


@dataclass(slots=True, eq=False)
class Task:
    name: str
    step: int | None
    seconds: float  # on an exclusive core
    thread: "Thread"
    takes: tuple[Ring, int] | None = None  # bytes, when it begins
    gives: Ring | None = None  # its oldest piece's bytes, when it ends
    missing: int = 0  # predecessors that have not ended
    followers: list[tuple["Task", str]] = field(default_factory=list)
    ready_s: float = 0.0  # end of its last predecessor
    awaited: tuple["Task", str] | None = None  # its last predecessor to end, and the reason of the wait
    began_s: float = math.nan
    ended_s: float = math.nan
    cause: tuple["Task", str] | None = None  # None: it began at 0


Wait = tuple[Task | None, str]  # a task that must end before, or None; why, in the words of the stall metrics


class Thread:
    def __init__(self, name: str, lanes: int = 1) -> None:
        self.name = name
        self.lanes: list[deque[Task]] = [deque() for _ in range(lanes)]  # earlier lanes come first
        self.task: Task | None = None  # in progress
        self.left_s = 0.0  # its remaining seconds, on an exclusive core
        self.done: list[Task] = []  # in the order in which they ran

    def add(
        self,
        name: str,
        step: int | None,
        seconds: float,
        after: Iterable[Wait] = (),
        *,
        lane: int = 0,
        takes: tuple[Ring, int] | None = None,
        gives: Ring | None = None,
    ) -> Task:
        task = Task(name, step, seconds, self, takes, gives)
        for before, reason in after:
            if before is not None:
                task.missing += 1
                before.followers.append((task, reason))
        self.lanes[lane].append(task)
        return task

    def begin_next(self, now_s: float) -> bool:
        """Begins the next task of the first lane that has one ready."""
        lane = next((lane for lane in self.lanes if lane and may_begin(lane[0])), None)
        if lane is None:
            return False
        task = self.task = lane.popleft()
        self.left_s, task.began_s = task.seconds, now_s
        task.cause = task.awaited
        if self.done and self.done[-1].ended_s >= task.ready_s:
            task.cause = self.done[-1], BUSY
        return True

    def end(self, now_s: float) -> list[Task]:
        """Ends the task in progress. Returns the tasks that waited only for it."""
        task, self.task = self.task, None
        assert task is not None, f"thread {self.name} has nothing to end"
        task.ended_s = now_s
        self.done.append(task)
        freed = []
        for follower, reason in task.followers:
            follower.missing -= 1
            if not follower.missing:
                follower.ready_s, follower.awaited = now_s, (task, reason)
                freed.append(follower)
        if task.gives is not None:
            task.gives.give_back()
            if (waiting := task.gives.waiting) is not None:
                waiting.ready_s, waiting.awaited = now_s, (task, "ring")
                freed.append(waiting)
        return freed


def may_begin(task: Task) -> bool:
    """If so, the task has taken its bytes."""
    if task.missing or task.takes is None:
        return not task.missing
    ring, nbytes = task.takes
    has_room = ring.take(nbytes)
    ring.waiting = None if has_room else task
    return has_room


def run(threads: Sequence[Thread], cores: float = math.inf) -> float:
    """Runs all tasks. Returns the seconds until the last one ends."""
    now_s = 0.0
    working = [thread for thread in threads if thread.begin_next(now_s)]
    while working:
        share = min(1.0, cores / len(working))  # each thread gets this share of a core
        least_s = min(thread.left_s for thread in working)
        now_s += least_s / share
        ended = [thread for thread in working if thread.left_s <= least_s]
        for thread in working:
            thread.left_s -= least_s
        # first all that end now, then what they let begin, so that the order of threads does not matter
        affected = dict.fromkeys(ended)
        affected |= dict.fromkeys(task.thread for thread in ended for task in thread.end(now_s))
        working = [thread for thread in working if thread.task is not None]
        working += [thread for thread in affected if thread.task is None and thread.begin_next(now_s)]
    stuck = [lane[0] for thread in threads for lane in thread.lanes if lane]
    assert not stuck, f"tasks wait for each other: {', '.join(f'{task.name} {task.step}' for task in stuck)}"
    return now_s


def waits(thread: Thread) -> Iterator[tuple[str, float, float]]:
    """What a thread that has run waited for: reason, from, to."""
    ended_s = 0.0
    for task in thread.done:
        if task.began_s > ended_s and task.cause is not None:
            yield task.cause[1], ended_s, task.began_s
        ended_s = task.ended_s


def critical_path(last: Task) -> list[tuple[Task, str]]:
    """From the first task to `last`, each with why the next one waited for it."""
    path = [(last, "end")]
    while (cause := path[-1][0].cause) is not None:
        path.append(cause)
    return path[::-1]
