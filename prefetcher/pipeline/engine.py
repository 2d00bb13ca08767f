"""Connects the prefetcher's stages with each other and with one conversation, without threads, sockets or clocks.

The life of plan p; `PrefetcherEngine.advance` is the code:

    thread      function          what it passes on
    planning    read_ids_ahead    ids of the batches of plan p        -> the planner's horizon
                plan_next         plan p: slots, rows, victims        -> the plan stream, the stores
    staging     stage_rows        rows of plan p, from below          -> the store's memory
    fetcher     read_rows         rows of plan p, from the store      -> the fetch ring
                announce_read     PlanReady(p)                        -> the trainer
    ...                           the trainer trains its steps (`rowcast.trainer.step.loop`)
    mail        conversation      RowsBack(p), PlanDone(p), Released  -> write-back, fetcher, fetch ring
    write-back  write_arrived     victims of plan p, from the ring    -> the store
                release_written   Released                            -> the trainer
                note_home         "home through p"                    -> the fetcher

A barrier (`barrier.py`) replaces the fetcher's work between two plans; the write-back receives its model state.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.pipeline.barrier import Checkpointer, PrefetcherBarrier
from rowcast.prefetcher.pipeline.fetcher import Fetcher, Limits, PlanStream
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.pipeline.planning import PlanningStage
from rowcast.prefetcher.pipeline.writeback import Writeback
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.source import RankSource, Source
from rowcast.prefetcher.stores.store import StoreCounts, described, totals
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.attempts import check_hello
from rowcast.protocol.conversation import Conversation, ProcessProgress
from rowcast.protocol.messages import (
    Ask,
    Bye,
    DataDelay,
    Hello,
    Ids,
    Mode,
    PlanDone,
    Released,
    Replica,
    Returned,
    RowsBack,
    Save,
    Saved,
    StopRequest,
    Welcome,
)
from rowcast.protocol.parts import belonging
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.runtime.stages import IDLE_WAIT_S, Period, Stage, Wakes

Thread = Literal["mail", "planning", "staging", "fetcher", "write-back"]

# a message, what a thread has done, or any turn of it -> the threads that it may unblock; no other thread waits for it
WAKES: Wakes = {
    Hello: ("fetcher", "main"),  # rows may be sent
    PlanDone: ("planning", "fetcher"),  # plans and rows may run one plan further ahead
    Released: ("fetcher",),  # room in the fetch ring
    RowsBack: ("write-back",),
    Returned: ("write-back",),
    Ask: ("write-back",),
    Save: ("write-back",),
    Saved: ("write-back",),
    Replica: ("write-back",),
    StopRequest: ("planning",),
    Ids: ("planning",),  # a script's next batch
    Bye: ("main",),
    "plan made": ("fetcher", "staging"),
    "staging": ("fetcher",),  # rows that a ticket waits for
    "no rows return": ("write-back",),  # a plan without any is home; a barrier takes the model state
    "write-back": ("fetcher", "staging"),  # rows are home
    "checkpoint": ("fetcher", "write-back"),  # room for rows and model state; the checkpoint is durable
}


class PrefetcherEngine:
    """Each of the `stages` may have a separate thread, or one thread may advance all of them in any order."""

    mode: Mode = "train"

    def __init__(
        self,
        *,
        job: Job,
        welcome: Welcome,
        source: Source,
        planner: RowPlanner,
        stores: tuple[TrackedStore, ...],
        conversation: Conversation,
        rings: tuple[RingWriter, RingReader],
        checkpointer: Checkpointer,
        counters: PrefetcherCounters,
    ) -> None:
        """`stores`: one per group. `rings`: fetch and back. `counters`: of the process. The caller closes these.

        A checkpoint adds its model state (`barrier.restore`) and the batches that its run had read ahead
        (`planning.checksums.expect`). Other ranks are reached by `planning.keys.links`."""
        groups, send = group_specs(job), conversation.send
        self.hello: Hello | None = None
        self.peer_left = False
        self.wake_after: Callable[[object], None] = lambda cause: None
        self.data_delay: Callable[[], DataDelay | None] = lambda: None
        self._period = Period()  # of plans
        self._data_waits = 0  # how often the watch found nothing to do but wait for a file
        self.counters, self.welcome, self.planner, self.conversation = counters, welcome, planner, conversation
        self.fetch_ring, back_ring = rings
        self.checkpointer = checkpointer
        self._job, self._stores = job, stores
        self.plans: PlanStream = deque()
        self.writeback = Writeback(groups, stores, back_ring, counters, send, welcome.start.train_step)
        self.fetcher = Fetcher(
            plans=self.plans,
            groups=groups,
            stores=stores,
            ring=self.fetch_ring,
            writeback=self.writeback,
            counters=counters,
            limits=Limits(depth=welcome.depth, first_plan=welcome.start.step, staging_bytes=welcome.staging_bytes),
            send=send,
        )
        self.barrier = PrefetcherBarrier(
            plans=self.plans,
            fetcher=self.fetcher,
            writeback=self.writeback,
            checkpointer=checkpointer,
            rings=rings,
            counters=counters,
            send=send,
            takes_model_state=welcome.rank == 0,
            last_figures=lambda: {"tier": totals(self._store_counts()), "data_delay": self.data_delay()},
        )
        self.planning = PlanningStage(
            source=RankSource(source, planner.rank, belonging(job)),
            planner=planner,
            stores=stores,
            plans=self.plans,
            fetcher=self.fetcher,
            barrier=self.barrier,
            welcome=welcome,
            counters=counters,
        )
        ahead = any(store.store.works_ahead for store in stores)
        self.stages: dict[str, Stage] = {
            thread: partial(self.advance, thread) for thread in get_args(Thread) if thread != "staging" or ahead
        }
        conversation.listen(
            {
                Hello: self._greet,
                Released: lambda message: self.fetch_ring.release(message.position),
                RowsBack: self.writeback.accept,
                Returned: self.writeback.accept,
                Ask: self.writeback.accept,
                Save: self.writeback.accept,
                Saved: self.barrier.accept_dense,
                Replica: self.barrier.accept_dense,
                PlanDone: self._plan_done,
                StopRequest: self.planning.due.stop,
                Bye: self._bye,
            }
        )

    def advance(self, thread: Thread) -> bool:
        """Does all that this thread can do now without waiting. Returns whether it did anything.

        The cases follow the life of a plan from top to bottom. All threads run in parallel on different plans: ids of a
        batch far ahead are read, plan p + 2 * depth + 1 is made and staged, rows of plan p + depth enter the ring, and
        victims of plan p are written.
        """
        match thread:
            case "planning":
                if self.planning.plan_next():
                    self.wake_after("plan made")
                    return True
                return self.planning.read_ids_ahead()
            case "staging":
                return self.stage_rows()
            case "fetcher":
                self.fetcher.stalled_by = None
                answered = self.fetcher.answer_asked()
                announced = self.fetcher.announce_read()
                in_barrier = self.barrier.due
                begun = self.barrier.advance() if in_barrier else self.fetcher.read_rows()
                if begun and (in_barrier or not self.fetcher.rows_return):
                    self.wake_after("no rows return")
                return answered or announced or begun
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
        worked = [store.store.advance(home_through) for store in self._stores]  # each has its turn
        return any(worked)

    def stop(self, reason: str) -> None:
        """Stops in order, once a trainer has connected. Ranks agree on the last step, which the trainer then sends."""
        if self.planner.rank.count == 1:
            self.planning.due.stop(StopRequest(reason=reason))
        else:
            self.conversation.send(StopRequest(reason=reason))

    @property
    def looks_s(self) -> dict[str, Callable[[], float]]:
        """By thread, how long it may wait while it is idle: the tickets of a store ring no bell."""
        return {
            "fetcher": lambda: self._period.look_s if self.fetcher.awaits_store else IDLE_WAIT_S,
            "write-back": lambda: self._period.look_s if self.writeback.is_writing else IDLE_WAIT_S,
        }

    @property
    def finished(self) -> bool:
        return self.barrier.ended and self.peer_left

    @property
    def rows_home_queued(self) -> int:
        """Returns the messages with rows or model state that the write-back has not finished."""
        return self.writeback.queued + self.barrier.queued

    @property
    def waiting_for(self) -> str:
        if self.hello is None:
            return "a trainer"
        if self.waits_for_data:
            return "files that arrive"
        if self.fetcher.stalled_by == "store":
            return described(self._store_counts())
        if self.fetcher.stalled_by == "plans" and (ranks := self.planning.keys.awaited):
            return f"the keys of {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        return WAITS.get(self.fetcher.stalled_by or "", "its own work")

    @property
    def waits_for_data(self) -> bool:
        """Whether all steps of the files that have arrived are done (data.follow)."""
        planned = self.planning.due.planned_through
        is_idle = not self.barrier.due and (planned is None or planned == self.fetcher.step_done)
        return is_idle and self.planning.waits_for_data

    def progress(self, work: int) -> ProcessProgress:
        """`work` grows with all progress except steps and rows written back. To wait for a file is progress."""
        self._data_waits += self.waits_for_data
        return ProcessProgress(
            step_begun=self.fetcher.step_sent,
            step_done=self.fetcher.step_done,
            work=work + self._data_waits + self.counters.total("rows_written_back"),
            waiting_for=self.waiting_for,
            ended=self.peer_left,
        )

    def stall_clocks(self) -> dict[str, Callable[[float], None]]:
        """Returns counters for the idle seconds of the threads."""
        counters = self.counters

        def planning(seconds: float) -> None:
            if self.planning.waits_for_batches:
                counters.stalled("data" if self.waits_for_data else "batches", seconds)
                counters.blocked("batches", "consumer", seconds)
            elif self.planning.waits_for_credit:
                counters.blocked("plans", "producer", seconds)
                counters.show("wait", "ahead", seconds)

        def fetcher(seconds: float) -> None:
            reason = self.fetcher.stalled_by
            if reason is None or self.hello is None:
                return
            if self.writeback.waits_for_checkpoint:
                reason = "checkpoint"  # the fetcher's wait is due to rows that cannot be written
            counters.stalled("data" if self.waits_for_data else reason, seconds)
            if reason == "plans":
                counters.blocked("plans", "consumer", seconds)
            elif reason in ("credit", "ring"):
                counters.blocked("pieces", "producer", seconds)

        def write_back(seconds: float) -> None:
            if not self.rows_home_queued:
                counters.blocked("rows_back", "consumer", seconds)

        return {"planning": planning, "fetcher": fetcher, "write-back": write_back}

    def _store_counts(self) -> list[StoreCounts | None]:
        return [store.store.counts() for store in self._stores]

    def _greet(self, hello: Hello) -> None:
        rank = self.planner.rank
        check_hello(hello, self._job.session_digest(), self.mode, rank.count, rank.number)
        self.hello = hello
        self.conversation.send(self.welcome)
        self.fetcher.connected = True

    def _plan_done(self, message: PlanDone) -> None:
        self.fetcher.plan_done(message.plan)
        self._period.ended(time.perf_counter())
        self.counters.progressed()

    def _bye(self, message: Bye) -> None:
        self.peer_left = True


WAITS = {
    "plans": "batches from the reader",
    "credit": "the trainer to finish a plan",
    "write_back": "rows to come home",
    "ring": "space in the ring",
    "barrier": "the barrier",
    "checkpoint": "a checkpoint to be on disk",
}
