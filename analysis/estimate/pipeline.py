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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rowcast.analysis.estimate.schedule import Ring, Task, Thread, Wait

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
class Planned:
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
    """What a job decides of the pipeline."""

    depth: int
    num_decoders: int
    decoded_ahead: int  # batches of each decoder
    measured: int  # batches that are read before there is a planner
    ring_bytes: int
    staging_bytes: int
    num_ranks: int = 1


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

    def _add_step(self, step: int, planned: Planned) -> None:
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
