"""Connects the prefetcher's stages with each other and with one conversation, without threads, sockets or clocks.

The life of step p; `PrefetcherEngine.advance` is the code:

    thread      function          what it passes on
    planning    read_ids_ahead    ids of batch p                      -> the planner's horizon
                plan_next         plan p: slots, rows, victims        -> the plan stream, the stores
    staging     stage_rows        rows of plan p, from below          -> the store's memory
    fetcher     read_rows         rows of plan p, from the store      -> the fetch ring
                announce_read     StepReady(p)                        -> the trainer
    ...                           the trainer trains step p (`rowcast.trainer.step.loop`)
    mail        conversation      RowsBack(p), StepDone(p), Released  -> write-back, fetcher, fetch ring
    write-back  write_arrived     victims of plan p, from the ring    -> the store
                release_written   Released                            -> the trainer
                note_home         "home through p"                    -> the fetcher

A barrier (`barrier.py`) replaces the fetcher's work between two plans; the write-back receives its model state.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.pipeline.barrier import Checkpointer, PrefetcherBarrier
from rowcast.prefetcher.pipeline.batch_checksums import BatchChecksums
from rowcast.prefetcher.pipeline.fetcher import Fetcher, Limits
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.pipeline.plan_stream import PlanStream
from rowcast.prefetcher.pipeline.planning import BatchSource, Pace, PlanningStage
from rowcast.prefetcher.pipeline.writeback import Writeback
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.schedule import ReadBatch
from rowcast.prefetcher.stores.store_counts import StoreCounts, described, totals
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.inputs import belonging
from rowcast.protocol.messages import (
    Bye,
    Hello,
    Mode,
    Released,
    Replica,
    RowsBack,
    Saved,
    StepDone,
    StopRequest,
    Welcome,
)
from rowcast.protocol.parts import UNDIVIDED, Rank
from rowcast.protocol.session import check_hello
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.stages import FunctionStage, Stage, Wakes

Thread = Literal["mail", "planning", "staging", "fetcher", "write-back"]

# a message, or a turn of a thread -> the threads that it may unblock; no other thread waits for it
WAKES: Wakes = {
    Hello: ("fetcher", "main"),  # rows may be sent
    StepDone: ("planning", "fetcher"),  # plans and rows may run one step further ahead
    Released: ("fetcher",),  # room in the fetch ring
    RowsBack: ("write-back",),
    Saved: ("write-back",),
    Replica: ("write-back",),
    StopRequest: ("planning",),
    Bye: ("main",),
    "planning": ("fetcher", "staging"),  # a plan
    "staging": ("fetcher",),  # rows that a ticket waits for
    "fetcher": ("write-back",),  # a plan that returns no rows is home; a barrier takes the model state
    "write-back": ("fetcher", "staging"),  # rows are home
    "checkpoint": ("fetcher", "write-back"),  # room for rows and model state; the checkpoint is durable
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetcherParts:
    """Everything that an engine is built from. The caller closes these."""

    job: Job
    groups: tuple[GroupSpec, ...]
    source: BatchSource
    planner: RowPlanner
    measured: list[ReadBatch]  # the first batches, read to divide the capacity
    checksums: BatchChecksums
    stores: tuple[TrackedStore, ...]  # one per group
    conversation: Conversation
    fetch_ring: RingWriter
    back_ring: RingReader
    checkpointer: Checkpointer
    welcome: Welcome
    mode: Mode
    start: Position  # where this incarnation begins
    counters: PrefetcherCounters  # of the process
    restore: bytes  # the model state that the trainer starts from; empty: the job's initial state
    pace: Pace | None = None  # see PlanningStage
    rank: Rank = UNDIVIDED


class PrefetcherEngine:
    """Each of the `stages` may have a separate thread, or one thread may advance all of them in any order."""

    def __init__(self, parts: PrefetcherParts) -> None:
        welcome = parts.welcome
        self.hello: Hello | None = None
        self.peer_left = False
        self.counters = parts.counters
        self.welcome = welcome
        self.fetch_ring = parts.fetch_ring
        self.checkpointer = parts.checkpointer
        self.planner = parts.planner
        self.conversation = parts.conversation
        self.plans: PlanStream = deque()
        self.writeback = Writeback(
            parts.groups,
            parts.stores,
            parts.back_ring,
            self.counters,
            parts.conversation.send,
            parts.start.train_step,
        )
        self.fetcher = Fetcher(
            plans=self.plans,
            groups=parts.groups,
            stores=parts.stores,
            ring=parts.fetch_ring,
            writeback=self.writeback,
            counters=self.counters,
            limits=Limits(depth=welcome.depth, first_step=parts.start.step, staging_bytes=welcome.staging_bytes),
            send=parts.conversation.send,
        )
        self.barrier = PrefetcherBarrier(
            plans=self.plans,
            fetcher=self.fetcher,
            writeback=self.writeback,
            checkpointer=parts.checkpointer,
            fetch_ring=parts.fetch_ring,
            back_ring=parts.back_ring,
            counters=self.counters,
            send=parts.conversation.send,
            restore=parts.restore,
            takes_model_state=parts.rank.number == 0,
            tier=lambda: totals(self._store_counts()),
        )
        self.planning = PlanningStage(
            source=parts.source,
            planner=self.planner,
            stores=parts.stores,
            plans=self.plans,
            fetcher=self.fetcher,
            barrier=self.barrier,
            depth=welcome.depth,
            start=parts.start,
            measured=parts.measured,
            checksums=parts.checksums,
            counters=self.counters,
            pace=parts.pace,
            rank=parts.rank,
            belonging=belonging(parts.job),
            announced=welcome.inputs,
        )
        ahead = any(store.store.works_ahead for store in parts.stores)
        self.stages: dict[str, Stage] = {
            thread: FunctionStage(partial(self.advance, thread))
            for thread in get_args(Thread)
            if thread != "staging" or ahead
        }
        self._parts = parts
        parts.conversation.listen(
            {
                Hello: self._greet,
                Released: lambda message: parts.fetch_ring.release(message.position),
                RowsBack: self.writeback.accept,
                Saved: self.barrier.accept_dense,
                Replica: self.barrier.accept_dense,
                StepDone: self._step_done,
                StopRequest: lambda message: self.planning.stop(message.reason, message.next_step, message.after_step),
                Bye: self._bye,
            }
        )

    def advance(self, thread: Thread) -> bool:
        """Does all that this thread can do now without waiting. Returns whether it did anything.

        The cases follow the life of a step from top to bottom. All threads run in parallel on different steps: ids of a
        batch far ahead are read, plan p + 2 * depth is made and staged, rows of plan p + depth enter the ring, and
        victims of plan p are written.
        """
        match thread:
            case "planning":
                return self.planning.plan_next() or self.planning.read_ids_ahead()
            case "staging":
                return self.stage_rows()
            case "fetcher":
                self.fetcher.stalled_by = None
                announced = self.fetcher.announce_read()
                begun = self.barrier.advance() if self.barrier.due else self.fetcher.read_rows()
                return announced or begun
            # here the trainer trains the step; its reports arrive by mail
            case "mail":
                return self.conversation.advance()
            case "write-back":
                written = self.writeback.write_arrived()
                released = self.writeback.release_written()
                home = self.writeback.note_home()
                saved = self.barrier.take_dense()
                return written or released or home or saved

    def stage_rows(self) -> bool:
        home_through = self.writeback.applied_through
        worked = [store.advance(home_through) for store in self._parts.stores]  # each has its turn
        return any(worked)

    def stop(self, reason: str) -> None:
        """Stops in order, once a trainer has connected. Ranks agree on the last step, which the trainer then sends."""
        if self._parts.rank.count == 1:
            self.planning.stop(reason)
        else:
            self.conversation.send(StopRequest(reason=reason))

    @property
    def polls(self) -> dict[str, Callable[[], bool]]:
        """Whether a thread waits for the tickets of a store, which ring no bell."""
        return {
            "fetcher": lambda: self.fetcher.awaits_store,
            "write-back": lambda: self.writeback.is_writing,
        }

    @property
    def finished(self) -> bool:
        return self.barrier.ended and self.peer_left

    @property
    def rows_home_queued(self) -> int:
        """Messages with rows or model state that the write-back has not finished."""
        return self.writeback.queued + self.barrier.queued

    @property
    def waiting_for(self) -> str:
        if self.hello is None:
            return "a trainer"
        if self.fetcher.stalled_by == "store":
            return described(self._store_counts())
        return WAITS.get(self.fetcher.stalled_by or "", "its own work")

    def _store_counts(self) -> list[StoreCounts | None]:
        return [store.store.counts() for store in self._parts.stores]

    def _greet(self, hello: Hello) -> None:
        parts = self._parts
        check_hello(hello, parts.job.session_digest(), parts.mode, parts.rank.count, parts.rank.number)
        self.hello = hello
        self.conversation.send(parts.welcome)
        self.fetcher.connected = True

    def _step_done(self, message: StepDone) -> None:
        self.fetcher.step_done(message.step)
        self.counters.progressed()

    def _bye(self, message: Bye) -> None:
        self.peer_left = True


WAITS = {
    "plans": "batches from the reader",
    "credit": "the trainer to finish a step",
    "write_back": "rows to come home",
    "ring": "space in the ring",
    "barrier": "the barrier",
    "checkpoint": "a checkpoint to be on disk",
}
