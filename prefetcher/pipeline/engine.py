"""The stages of the prefetcher, wired to each other and to one conversation. No thread, socket or clock lives here.

mail -> planning -> fetcher -> (ring, StepReady) ...... (ring, RowsBack) -> mail -> write-back -> store
"""

from dataclasses import dataclass

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.pipeline.fetcher import Checkpointer, Fetcher
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.pipeline.planning import BatchSource, Pace, PlanningStage
from rowcast.prefetcher.pipeline.writeback import Writeback
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.schedule import PlacedBatch
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.prefetcher.verify.verifier import Verifier
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import (
    Bye,
    Hello,
    Mode,
    Released,
    RowChecksums,
    RowsBack,
    Saved,
    StepDone,
    StopRequest,
    Welcome,
)
from rowcast.protocol.session import check_hello
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.runtime.position import Position
from rowcast.runtime.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """What an engine is made of; whoever makes them owns and closes them."""

    job: Job
    groups: tuple[GroupSpec, ...]
    source: BatchSource
    planner: RowPlanner
    measured: list[PlacedBatch]  # the first batches, read to divide the capacity
    stores: tuple[TrackedStore, ...]  # one a group
    conversation: Conversation
    fetch_ring: RingWriter
    back_ring: RingReader
    checkpointer: Checkpointer
    welcome: Welcome
    mode: Mode
    start: Position  # where this incarnation begins
    counters: PrefetcherCounters  # of the process
    restore: bytes  # the dense side that the trainer begins with; empty: as the job says
    pace: Pace | None = None  # see PlanningStage


class PrefetcherEngine:
    """`stages` are advanced by one thread each, or all by one thread in any order."""

    def __init__(self, parts: EngineParts) -> None:
        depth, welcome = parts.welcome.depth, parts.welcome
        self.hello: Hello | None = None
        self.peer_left = False
        self.counters = parts.counters
        self.welcome = welcome
        self.fetch_ring = parts.fetch_ring
        self.checkpointer = parts.checkpointer
        self.planner = parts.planner
        self.conversation = parts.conversation
        verifier = Verifier(parts.groups, parts.stores, welcome.verify, self.counters) if welcome.verify else None
        self.writeback = Writeback(
            parts.groups,
            parts.stores,
            parts.back_ring,
            self.counters,
            parts.conversation.send,
            parts.checkpointer.dense,
            verifier,
        )
        self.fetcher = Fetcher(
            groups=parts.groups,
            stores=parts.stores,
            depth=depth,
            first_step=parts.start.step,
            ring=parts.fetch_ring,
            writeback=self.writeback,
            checkpointer=parts.checkpointer,
            counters=self.counters,
            staging_bytes=welcome.staging_bytes,
            send=parts.conversation.send,
            restore=parts.restore,
            verifier=verifier,
        )
        self.planning = PlanningStage(
            source=parts.source,
            planner=self.planner,
            fetcher=self.fetcher,
            depth=depth,
            start=parts.start,
            measured=parts.measured,
            counters=self.counters,
            pace=parts.pace,
        )
        self._parts = parts
        parts.conversation.listen(
            {
                Hello: self._greet,
                Released: lambda message: parts.fetch_ring.release(message.position),
                RowsBack: self.writeback.accept,
                Saved: self.writeback.accept,
                **({} if verifier is None else {RowChecksums: verifier.reported}),
                StepDone: self._step_done,
                StopRequest: lambda message: self.planning.stop(message.reason, message.next_step),
                Bye: self._bye,
            }
        )

    @property
    def stages(self) -> dict[str, Stage]:
        return {
            "mail": self.conversation,
            "planning": self.planning,
            "fetcher": self.fetcher,
            "write-back": self.writeback,
        }

    @property
    def finished(self) -> bool:
        """The last barrier is done and the trainer has said good-bye."""
        return self.fetcher.ended and self.peer_left

    @property
    def waiting_for(self) -> str:
        if self.hello is None:
            return "a trainer"
        return WAITS.get(self.fetcher.stalled_by or "", "its own work")

    def _greet(self, hello: Hello) -> None:
        check_hello(hello, self._parts.job.session_digest(), self._parts.mode)
        self.hello = hello
        self.conversation.send(self._parts.welcome)
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
    "store": "the store",
    "barrier": "the barrier",
    "checkpoint": "a checkpoint to be on disk",
}
