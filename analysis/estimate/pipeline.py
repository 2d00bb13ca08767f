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
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rowcast.analysis.estimate.schedule import Ring, Task, Thread, Wait
from rowcast.analysis.estimate.step_kernels import StepCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPiece:
    """One message of a plan."""

    ring_bytes: int  # rows and arrays
    row_bytes: int
    back_bytes: int  # its dirty victims'


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """The quantities that decide how long a step's tasks take."""

    counts: StepCounts
    first: tuple[int, ...]  # how many of each group's fetched rows were never fetched before
    decode_s: float  # processor seconds of decoding the batch, as measured here
    plan_s: float  # processor seconds of planning the step, as measured here
    flushed: tuple[int, ...] = ()  # dirty rows of each group that the barrier after it brings home


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The waits and moves of a step of the plan stream."""

    step: int
    known_through: int  # the last step whose batch is in the horizon when this one is planned
    after_step: int | None
    fill_after: int | None
    pieces: tuple[PlannedPiece, ...]
    barrier: bool  # a barrier follows
    counted: Counted | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """What a job decides of the pipeline."""

    depth: int
    num_decoders: int
    decoded_ahead: int  # batches of each decoder
    measured: int  # batches that are read before there is a planner
    ring_bytes: int
    staging_bytes: int
    num_ranks: int = 1


Handover = Literal["rows sent", "rows filled", "rows back", "rows home", "ring room", "step done"]


class Durations(Protocol):
    def __call__(self, name: str, step: int, pieces: int = 1) -> float:
        """The seconds that one piece of a step's task takes, if the task is done in `pieces` pieces. `name`: also a
        `Handover`."""


def room(sizes: Sequence[int], nbytes: int) -> list[int | None]:
    """The last piece that must have left a staging of `nbytes` before each piece has a place; None if none must.

    A piece is contiguous: one that does not fit before the end starts at the beginning."""
    found: list[int | None] = []
    begins: list[int] = []
    end, left = 0, 0
    for size in sizes:
        begin = end if end % nbytes + size <= nbytes else -(-end // nbytes) * nbytes
        end = begin + size
        while left < len(begins) and begins[left] < end - nbytes:
            left += 1
        begins.append(begin)
        found.append(left - 1 if left else None)
    return found


def at(tasks: Sequence[Task], index: int | None) -> Task | None:
    """Returns a task; None before the first step."""
    return None if index is None or index < 0 else tasks[index]


class Pipeline:
    """All tasks of a run. Steps are numbered from 0 here."""

    def __init__(self, plan: Sequence[Planned], wiring: Wiring, durations: Durations, begins: dict[str, float]) -> None:
        """`begins`: seconds until the threads "planning" and "main" begin their first task."""
        self._wiring, self._seconds = wiring, durations
        names = ("planning", "fetcher", "main", "sender", "write-back", "checkpoint")
        threads = {name: Thread(name) for name in names}
        decoders = [Thread(f"decoder {number}") for number in range(wiring.num_decoders)]
        self.threads = (*decoders, *threads.values())
        self._decode = [thread.lane() for thread in decoders]
        self._planning, self._checkpoint = threads["planning"].lane(), threads["checkpoint"].lane()
        self._copy_out, self._write_back = threads["sender"].lane(), threads["write-back"].lane()
        # a fetcher announces what was read before it reads on; a trainer moves rows before it computes
        self._send, self._fetch = threads["fetcher"].lane(), threads["fetcher"].lane()
        self._copy_in, self._fill, self._compute = (threads["main"].lane() for _ in range(3))
        for lane, name in ((self._planning, "planning"), (self._copy_in, "main")):
            lane.add("start", None, begins.get(name, 0.0))
        pieces = [piece for planned in plan for piece in planned.pieces]
        rows, back = [piece.row_bytes for piece in pieces], [piece.back_bytes for piece in pieces]
        self._fetch_ring, self._back_ring = Ring(wiring.ring_bytes), Ring(wiring.ring_bytes)
        self._fill_room, self._evict_room = room(rows, wiring.staging_bytes), room(back, wiring.staging_bytes)
        self._read: list[Task] = []
        self.done: list[Task] = []  # the end of each step
        self._reported: list[Task] = []  # the prefetcher knows that it is done
        self._home: list[Task] = []
        self._filled: list[Task] = []  # pieces of all steps, as the list below
        self._copied_out: list[Task] = []
        self._barrier: Task | None = None
        self._durable: Task | None = None
        for step, planned in enumerate(plan):
            self._add_step(step, planned)

    def _add_step(self, step: int, planned: Planned) -> None:
        depth, seconds = self._wiring.depth, self._seconds
        while len(self._read) <= planned.known_through:
            self._add_batch(len(self._read))
        plan = self._planning.add(
            "plan", step, seconds("plan", step), [(at(self._reported, step - 2 * depth - 3), "ahead")]
        )
        home = [(at(self._home, step - depth - 1), "write_back"), (at(self._home, planned.after_step), "write_back")]
        credit: list[Wait] = [(at(self._reported, step - depth - 1), "credit")]
        needed: list[Wait] = [(plan, "plans"), *home, (self._barrier, "barrier")]
        number = len(planned.pieces)
        for piece in planned.pieces:
            index = len(self._filled)
            in_ring = (self._fetch_ring, piece.ring_bytes)
            fetch = self._fetch.add("fetch", step, seconds("fetch", step, number), needed, takes=in_ring)
            send = self._send.add("send", step, seconds("send", step, number), [(fetch, "store"), *credit])
            arrive = self._hand_over("rows sent", step, send, "rows")
            staged = [(arrive, "rows"), (at(self._filled, self._fill_room[index]), "staging")]
            copy_in = self._copy_in.add("copy in", step, seconds("copy in", step, number), staged)
            free = [
                (copy_in, "rows"),
                (at(self.done, planned.fill_after), "fill_after"),
                (at(self._copied_out, self._evict_room[index]), "staging"),
            ]
            fill = self._fill.add("fill", step, seconds("fill", step, number), free)
            self._hand_over("ring room", step, copy_in, "ring", gives=self._fetch_ring)
            self._filled.append(fill)
            self._add_way_home(step, piece, fill, number)
        before: Wait = (self._filled[-1], "rows")
        if self._wiring.num_ranks > 1:
            before = (self._compute.add("exchange", step, seconds("exchange", step), [before]), "ranks")
        self.done.append(self._compute.add("step", step, seconds("step", step), [before]))
        self._reported.append(self._hand_over("step done", step, self.done[-1], "credit"))
        if planned.barrier:
            self._add_barrier(step)

    def _hand_over(self, what: Handover, step: int, done: Task, reason: str, *, gives: Ring | None = None) -> Task:
        """A hand-over delays nothing else, so each has a separate thread."""
        lane = Thread("mail").lane()
        return lane.add("deliver", step, self._seconds(what, step), [(done, reason)], gives=gives)

    def _add_batch(self, step: int) -> None:
        wiring = self._wiring
        in_queue = step - wiring.num_decoders * (wiring.decoded_ahead + 2)
        taken = self._read[in_queue] if in_queue >= wiring.measured else None
        lane = self._decode[step % wiring.num_decoders]
        decode = lane.add("decode", step, self._seconds("decode", step), [(taken, "queue")])
        self._read.append(self._planning.add("read", step, self._seconds("read", step), [(decode, "batches")]))

    def _add_way_home(self, step: int, piece: PlannedPiece, fill: Task, number: int) -> None:
        """Rows of a piece are home once they are written; a step's are home with its last piece's."""
        if piece.back_bytes:
            filled = self._hand_over("rows filled", step, fill, "rows")
            back = self._copy_out.add(
                "copy out",
                step,
                self._seconds("copy out", step, number),
                [(filled, "rows")],
                takes=(self._back_ring, piece.back_bytes),
            )
            arrive = self._hand_over("rows back", step, back, "rows")
            written = self._write_back.add(
                "write back", step, self._seconds("write back", step, number), [(arrive, "rows")], gives=self._back_ring
            )
            home = self._hand_over("rows home", step, written, "write_back")
        else:
            back, home = fill, fill
        self._copied_out.append(back)
        if len(self._home) == step:
            self._home.append(home)
        self._home[step] = home

    def _add_barrier(self, step: int) -> None:
        """Everything before is done and home, then dirty rows come home; the checkpoint before must be durable."""
        after = [(self._reported[step], "barrier"), (self._home[step], "barrier"), (self._durable, "checkpoint")]
        self._barrier = self._fetch.add("barrier", step, self._seconds("barrier", step), after)
        self._durable = self._checkpoint.add("write", step, self._seconds("write", step), [(self._barrier, "barrier")])
