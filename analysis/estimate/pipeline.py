"""Models a run's pipeline as tasks on threads, with the dependencies of both engines.

    decoders   decode p             a few batches ahead of their use
    planning   read p + horizon, plan p        at most 2 * depth + 2 steps ahead of the trainer
    fetcher    fetch p, send p      once rows of earlier steps are home, the ring has room, step p - depth - 1 is done
    main       copy in p, fill p, step p       moves come first: a turn that moved rows computes nothing
               exchange p       all exchanges of a step, here before the step
    sender     copy out p           victims, once the ring has room
    write-back write back p
    mail       deliver              hand-overs between threads, mostly messages

Where the trainer is a CPU, one thread moves rows and computes. On a device these are streams beside the thread that
issues the work.

Computes when each task of a pipeline runs, and what it waits for.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
        # ends all finished tasks before it starts new ones, so that the order of threads does not matter
        affected = dict.fromkeys(ended)
        affected |= dict.fromkeys(task.thread for thread in ended for task in thread.end(now_s))
        working = [thread for thread in working if thread.task is not None]
        working += [thread for thread in affected if thread.task is None and thread.begin_next(now_s)]
    stuck = [lane[0] for thread in threads for lane in thread.lanes if lane]
    assert not stuck, f"tasks wait for each other: {', '.join(f'{task.name} {task.step}' for task in stuck)}"
    return now_s


def waits(thread: Thread) -> Iterator[tuple[str, float, float]]:
    """Yields the waits of a thread that has run: reason, from, to."""
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


# task -> its thread, and the lane there; a fetcher announces what was read before it reads on, and a trainer moves rows
# before it computes
LANES = {
    "read": ("planning", 0),
    "plan": ("planning", 0),
    "send": ("fetcher", 0),
    "fetch": ("fetcher", 1),
    "barrier": ("fetcher", 1),
    "copy in": ("main", 0),
    "fill": ("main", 1),
    "exchange": ("main", 2),
    "step": ("main", 2),
    "copy out": ("sender", 0),
    "write back": ("write-back", 0),
    "write": ("checkpoint", 0),
}
# a hand-over -> the overhead that it is; messages go from one process to the other
HANDOVERS = {
    "rows sent": "message",
    "rows filled": "wait",
    "rows back": "message",
    "rows home": "wait",
    "ring room": "message",
    "step done": "message",
}
Durations = Callable[[str, int], float]  # seconds of a step's task, in all its pieces, or of one hand-over


class KernelCall(NamedTuple):
    task: str
    kernel: str
    counts: dict[str, float]
    calls: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPiece:
    """One message of a plan."""

    ring_bytes: int  # rows and arrays
    row_bytes: int
    back_bytes: int  # its dirty victims'


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """The waits, moves and kernels of a step of the plan stream."""

    step: int
    known_through: int  # the last step whose batch is in the horizon when this one is planned
    after_step: int | None
    fill_after: int | None
    pieces: tuple[PlannedPiece, ...]
    barrier: bool  # a barrier follows
    batch: int = 0  # samples of this trainer
    calls: tuple[KernelCall, ...] = ()
    decode_s: float = 0.0  # processor seconds, as measured here
    plan_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """The job's settings of the pipeline."""

    depth: int
    num_decoders: int
    decoded_ahead: int  # batches of each decoder
    measured: int  # batches that are read before there is a planner
    ring_bytes: int
    staging_bytes: int
    num_ranks: int = 1


def room(sizes: Sequence[int], nbytes: int) -> list[int | None]:
    """Returns the last piece that must have left a staging of `nbytes` before each piece has a place, or None.

    A piece is contiguous: one that does not fit before the end starts at the beginning."""
    last_before: list[int | None] = []
    begins: list[int] = []
    end, left = 0, 0
    for size in sizes:
        begin = end if end % nbytes + size <= nbytes else -(-end // nbytes) * nbytes
        end = begin + size
        while left < len(begins) and begins[left] < end - nbytes:
            left += 1
        begins.append(begin)
        last_before.append(left - 1 if left else None)
    return last_before


def at(tasks: Sequence[Task], index: int | None) -> Task | None:
    """Returns a task; None before the first step."""
    return None if index is None or index < 0 else tasks[index]


class Pipeline:
    """All tasks of a run. Steps are numbered from 0 here."""

    def __init__(
        self, plan: Sequence[PlannedStep], wiring: Wiring, durations: Durations, begins: dict[str, float]
    ) -> None:
        """`begins`: seconds until the threads "planning" and "main" begin their first task."""
        self._wiring, self._seconds = wiring, durations
        threads = {
            name: Thread(name, 1 + max(lane for own, lane in LANES.values() if own == name))
            for name, _ in LANES.values()
        }
        self._named = threads
        self._decoders = [Thread(f"decoder {number}") for number in range(wiring.num_decoders)]
        self.threads = (*self._decoders, *threads.values())
        for name in ("planning", "main"):
            threads[name].add("start", None, begins.get(name, 0.0))
        pieces = [piece for planned in plan for piece in planned.pieces]
        self._fetch_ring, self._back_ring = Ring(wiring.ring_bytes), Ring(wiring.ring_bytes)
        self._fill_room = room([piece.row_bytes for piece in pieces], wiring.staging_bytes)
        self._evict_room = room([piece.back_bytes for piece in pieces], wiring.staging_bytes)
        self._read: list[Task] = []
        self.done: list[Task] = []  # the end of each step
        self._reported: list[Task] = []  # the prefetcher knows that it is done
        self._home: list[Task] = []
        self._filled: list[Task] = []  # pieces of all steps, as the list below
        self._copied_out: list[Task] = []
        self._barrier: Task | None = None
        self._durable: Task | None = None
        for planned in plan:
            self._add_step(len(self.done), planned)

    def _add(
        self,
        name: str,
        step: int,
        after: Sequence[Wait],
        pieces: int = 1,
        takes: tuple[Ring, int] | None = None,
        gives: Ring | None = None,
    ) -> Task:
        """This task does one of the `pieces` that the step is cut into."""
        thread, lane = LANES[name]
        seconds = self._seconds(name, step) / pieces
        return self._named[thread].add(name, step, seconds, after, lane=lane, takes=takes, gives=gives)

    def _hand_over(self, what: str, step: int, done: Task, reason: str, *, gives: Ring | None = None) -> Task:
        """A hand-over delays nothing else, so each has a separate thread."""
        return Thread("mail").add("deliver", step, self._seconds(what, step), [(done, reason)], gives=gives)

    def _add_step(self, step: int, planned: PlannedStep) -> None:
        depth, pieces = self._wiring.depth, len(planned.pieces)
        while len(self._read) <= planned.known_through:
            self._add_batch(len(self._read))
        plan = self._add("plan", step, [(at(self._reported, step - 2 * depth - 3), "ahead")])
        home = [(at(self._home, step - depth - 1), "write_back"), (at(self._home, planned.after_step), "write_back")]
        needed: list[Wait] = [(plan, "plans"), *home, (self._barrier, "barrier")]
        for piece in planned.pieces:
            index = len(self._filled)
            fetch = self._add("fetch", step, needed, pieces, takes=(self._fetch_ring, piece.ring_bytes))
            credit = (at(self._reported, step - depth - 1), "credit")
            send = self._add("send", step, [(fetch, "store"), credit], pieces)
            arrive = self._hand_over("rows sent", step, send, "rows")
            staged = [(arrive, "rows"), (at(self._filled, self._fill_room[index]), "staging")]
            copy_in = self._add("copy in", step, staged, pieces)
            left = (at(self._copied_out, self._evict_room[index]), "staging")
            free = [(copy_in, "rows"), (at(self.done, planned.fill_after), "fill_after"), left]
            fill = self._add("fill", step, free, pieces)
            self._hand_over("ring room", step, copy_in, "ring", gives=self._fetch_ring)
            self._filled.append(fill)
            self._add_way_home(step, piece, fill, pieces)
        before: Wait = (self._filled[-1], "rows")
        if self._wiring.num_ranks > 1:
            before = (self._add("exchange", step, [before]), "ranks")
        self.done.append(self._add("step", step, [before]))
        self._reported.append(self._hand_over("step done", step, self.done[-1], "credit"))
        if planned.barrier:  # all before is done and home, then dirty rows come home; the checkpoint before is durable
            after = [(self._reported[step], "barrier"), (self._home[step], "barrier"), (self._durable, "checkpoint")]
            self._barrier = self._add("barrier", step, after)
            self._durable = self._add("write", step, [(self._barrier, "barrier")])

    def _add_batch(self, step: int) -> None:
        wiring = self._wiring
        in_queue = step - wiring.num_decoders * (wiring.decoded_ahead + 2)
        taken = self._read[in_queue] if in_queue >= wiring.measured else None
        decoder = self._decoders[step % wiring.num_decoders]
        decode = decoder.add("decode", step, self._seconds("decode", step), [(taken, "queue")])
        self._read.append(self._add("read", step, [(decode, "batches")]))

    def _add_way_home(self, step: int, piece: PlannedPiece, fill: Task, pieces: int) -> None:
        """Rows of a piece are home once they are written; a step's are home with its last piece's."""
        back, home = fill, fill
        if piece.back_bytes:
            filled = self._hand_over("rows filled", step, fill, "rows")
            back = self._add("copy out", step, [(filled, "rows")], pieces, takes=(self._back_ring, piece.back_bytes))
            arrive = self._hand_over("rows back", step, back, "rows")
            written = self._add("write back", step, [(arrive, "rows")], pieces, gives=self._back_ring)
            home = self._hand_over("rows home", step, written, "write_back")
        self._copied_out.append(back)
        self._home[step:] = [home]
