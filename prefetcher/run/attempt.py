"""Runs one attempt: from the first batches to the last goodbye, or to the loss of its trainer.

An attempt starts from the newest checkpoint, with a cold cache and with rings and a conversation of its own. Whatever
happens, it closes its parts in the reverse of the order in which it opened them.
"""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rowcast.job.schema import Job, Transport, parse_bytes
from rowcast.job.stores import STORES
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.own_shard import OwnShard
from rowcast.prefetcher.checkpoints.restore import dense_content
from rowcast.prefetcher.checkpoints.snapshot import BarrierCheckpointer, NoCheckpoints
from rowcast.prefetcher.checkpoints.writer import CheckpointWriter
from rowcast.prefetcher.pipeline.barrier import Checkpointer
from rowcast.prefetcher.pipeline.engine import WAKES, PrefetcherEngine, PrefetcherParts
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters, PrefetcherGauges
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, job_slots
from rowcast.prefetcher.planner.job_planner import job_planner
from rowcast.prefetcher.planner.pin_files import load_pins
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.hot_samples import hot_rows_checksum
from rowcast.prefetcher.readers.schedule import PlacedBatch
from rowcast.prefetcher.readers.worker import WorkerSource
from rowcast.prefetcher.run.checkpoint_interval import AttemptInterval
from rowcast.prefetcher.run.gauges import engine_gauges, stall_clocks
from rowcast.prefetcher.run.sizing import (
    automatic_threads,
    check_shared_memory,
    job_tier_slots,
    sizes,
    tier_rows,
)
from rowcast.prefetcher.run.starting_point import StartingPoint
from rowcast.prefetcher.run.tables import Tables
from rowcast.prefetcher.run.warm_up import warm_up
from rowcast.prefetcher.stores.store_counts import described
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import PROTOCOL_VERSION, Bye, Mode, RingSpec, Welcome
from rowcast.protocol.parts import Rank
from rowcast.protocol.peer_watch import PeerWatch, ProcessProgress, tell_peer
from rowcast.protocol.session import Session
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.protocol.transport.ring_file import RingFile, RingMemory, create_ring
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import ConfigError, Mismatch, PeerLost, RowcastError
from rowcast.runtime.position import Position
from rowcast.runtime.process import STOPPING, Crew, Signals
from rowcast.runtime.run_directory import failure_since
from rowcast.runtime.stages import IDLE_WAIT_S, Stage
from rowcast.runtime.telemetry.health import Health
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.timeline import recorded_stages


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetcherRunParts:
    """What all attempts of a run share."""

    job: Job
    groups: tuple[GroupSpec, ...]
    rank: Rank | None  # None: the trainer is alone and computes whole batches
    shard: OwnShard
    folder: Path  # of this pair of processes
    mode: Mode
    max_steps: int | None
    save_trace: Path | None
    verify: float  # share of the rows whose checksums are followed
    signals: Signals
    health: Health
    counters: PrefetcherCounters  # over all attempts
    checkpoints: Checkpoints
    tables: Tables
    on_training: Callable[[], None]  # called when training begins, also from a checkpoint of a complete run


class PrefetcherAttempt:
    def __init__(
        self,
        run: PrefetcherRunParts,
        point: StartingPoint,
        transport: Transport,
        crew: Crew,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`point`: where it begins. `transport`: the job's, with this attempt's connect time-out. `is_over`: whether
        the run has ended, so that no trainer will come."""
        self._is_over = is_over
        newest = point.newest
        self.newest = newest  # the newest checkpoint on disk
        self._run_id = point.run_id
        self.finished = False  # the data has ended, everything is durable and the trainer has said goodbye
        self._run = run
        self._job = run.job
        self._transport = transport
        self._crew = crew
        self._bell = run.signals.bell
        self._log = get_logger()
        self._start = Position() if newest is None else newest.position
        max_steps = run.max_steps
        if run.mode == "eval":
            self._start, max_steps = Position(eval_batch=0), 0
        self._source = WorkerSource(
            self._job,
            max_steps,
            self._start,
            on_arrival=partial(crew.wake, "planning"),
            timeline=run.counters.timeline,
        )
        self._writer: CheckpointWriter | None = None
        self._engine: PrefetcherEngine | None = None
        self._tier_slots: tuple[int, ...] | None = None
        self._interval = AttemptInterval(run.job, run.checkpoints, run.shard.number, run.mode)

    def live(self) -> None:
        """Returns when the run finished or was stopped in order. Raises the first error of any stage, or PeerLost."""
        with ExitStack() as stack:
            incarnation = 1 + secrets.randbelow(2**31)  # random, so that frames of an earlier attempt are recognized
            run = self._run
            link = ZmqLink.prefetcher(
                run.folder, on_receive=partial(self._crew.wake, "mail"), transport=self._transport
            )
            stack.callback(link.close)
            link.start()
            conversation = Conversation(Session("prefetcher", incarnation), link)
            conversation.on_message = self._crew.wake_after
            stack.callback(self._source.close)
            try:
                self._converse(stack, conversation, link)
                self._crew.stop()  # nothing may follow the goodbye, not even a heartbeat
                if not self.connected or self._ended():
                    conversation.send(Bye())
            except BaseException as error:
                tell_peer(conversation, error)
                try:
                    self._settle_checkpoint()
                except RowcastError as later:
                    if isinstance(error, PeerLost):
                        raise
                    # both processes end with the sentence of the first error; it usually caused this one
                    self._log.warning("the checkpoint in progress was lost", error=str(later))
                raise

    @property
    def point(self) -> StartingPoint:
        """Where the next attempt begins."""
        return StartingPoint(newest=self.newest, run_id=self._run_id)

    @property
    def reached_end(self) -> bool:
        """Whether everything was durable, and only the good-byes were missing."""
        return self._engine is not None and self._engine.barrier.ended and self._engine.barrier.finished

    @property
    def connected(self) -> bool:
        return self._engine is not None and self._engine.hello is not None

    def gauges(self, idle: PrefetcherGauges) -> PrefetcherGauges:
        idle = replace(idle, stores=self._run.tables.counts)
        return idle if self._engine is None else engine_gauges(idle, self._engine, self._source)

    @property
    def train_steps(self) -> int:
        """Train steps at the newest checkpoint."""
        return 0 if self.newest is None else self.newest.train_steps

    def _settle_checkpoint(self) -> None:
        """Makes a checkpoint durable that was handed over completely, although its attempt is over."""
        self._crew.stop()
        if self._writer is None:
            return
        self._writer.abandon()
        while self._writer.busy:
            if not self._writer.advance():
                time.sleep(IDLE_WAIT_S)  # other ranks write
        self.newest = self._writer.newest
        self._run.tables.attempt_ended(self.newest, gave_up=self._writer.gave_up)

    def _converse(self, stack: ExitStack, conversation: Conversation, link: ZmqLink) -> None:
        """Runs from the first batches to the last goodbye. The watch answers a trainer that connects meanwhile."""
        watch = PeerWatch(
            "trainer",
            conversation,
            link,
            self._transport,
            self._progress,
            lambda: self.connected,
            self._trainer_failure,
        )
        self._crew.start({"watch": watch}, {})
        stack.callback(self._crew.stop)
        self._source.start()
        measured = self._measure()
        if self._run.signals.stop_reason is None:
            self._check_belongs()
            self._run.tables.restore(self.newest)
            self._serve(stack, conversation, measured)

    def _trainer_failure(self) -> RowcastError | None:
        return failure_since(self._run.folder, "trainer", self._run.signals.began_s)

    def _progress(self) -> ProcessProgress:
        batches, engine, writer = self._source.counters.batches, self._engine, self._writer
        if engine is None:
            return ProcessProgress(
                step_begun=None, step_done=None, work=batches, waiting_for="the first batches", ended=False, ready=False
            )
        return ProcessProgress(
            step_begun=engine.fetcher.sent_through,
            step_done=engine.fetcher.done_through,
            work=batches + engine.counters.total("rows_written_back") + (0 if writer is None else writer.work),
            waiting_for=engine.waiting_for,
            ended=engine.peer_left,
        )

    def _ended(self) -> bool:
        return self._engine is not None and self._engine.finished

    def _measure(self) -> list[PlacedBatch]:
        has_tier = STORES[self._job.store.kind].has_tier
        folder = self._run.tables.folder if has_tier else None
        warm_up(verify=self._run.verify > 0, tiers_in=folder)  # while the child starts
        measured: list[PlacedBatch] = []
        while len(measured) < MEASURED_BATCHES and not self._source.ended and self._run.signals.stop_reason is None:
            self._crew.check()
            batch = self._source.poll()
            if batch is None:
                self._bell.wait(IDLE_WAIT_S)
            else:
                measured.append(batch)
            self._bell.hush()
        return measured

    def _check_belongs(self) -> None:
        """Raises if the checkpoint belongs to another job, or if there is nothing to evaluate."""
        if self.newest is not None and self.newest.training_digest not in ("", self._training_digest()):
            hot = "" if self._job.data.hot is None else f" the rows of data.hot = {self._job.data.hot!r},"
            raise Mismatch(
                f"the checkpoint after {self.newest.train_steps} train steps in {self._job.run_dir} is of another job: "
                f"data,{hot} tables, model, optimizers or seed differ; use the job file that wrote it, or set another "
                f"job.run_dir, and add --from {self._job.run_dir} to train its model on new data"
            )
        if self._run.mode == "eval" and self._source.info().num_eval == 0:
            raise ConfigError("there are no evaluation batches; set data.eval_fraction or data.eval_path")

    def _training_digest(self) -> str:
        return self._job.training_digest(self._source.info().file_sizes, hot_rows_checksum(self._job))

    def _serve(self, stack: ExitStack, conversation: Conversation, measured: list[PlacedBatch]) -> None:
        run = self._run
        slots = job_slots(self._job, run.groups, measured, run.rank)
        own = sizes(self._job, run.groups, measured, self._job.lookahead.depth, run.rank)
        rings = self._make_rings(stack, own.ring_bytes)
        is_tcp = self._transport.is_tcp
        fetch_ring, back_ring = (
            RingWriter(rings[0].buffer, always_checksum=is_tcp),
            RingReader(rings[1].buffer, mirror=is_tcp),
        )
        if is_tcp:
            conversation.carry(fetch_ring, back_ring)
        self._tier_slots = tier_slots = job_tier_slots(self._job, run.groups, measured, slots, run.rank)
        if tier_slots is not None:
            run.tables.begin(tier_rows(self._job, run.groups, measured, tier_slots, run.rank))
        planner = self._planner(slots, tier_slots, measured)
        restore = b"" if self.newest is None else b"".join(dense_content(run.checkpoints.root, self.newest))
        engine = PrefetcherEngine(
            PrefetcherParts(
                job=self._job,
                groups=run.groups,
                source=self._source,
                planner=planner,
                measured=measured,
                stores=run.tables.stores,
                conversation=conversation,
                fetch_ring=fetch_ring,
                back_ring=back_ring,
                checkpointer=self._checkpointer(),
                welcome=self._welcome(conversation.session.incarnation, slots, rings, own.staging_bytes, len(restore)),
                mode=run.mode,
                start=self._start,
                counters=run.counters,
                restore=restore,
                pace=self._interval.pace(self.train_steps, has_trace=run.save_trace is not None),
                rank=run.rank,
            )
        )
        engine.planning.on_interval = self._interval.keep
        self._run_stages(stack, engine)

    def _make_rings(self, stack: ExitStack, nbytes: int) -> list[RingFile | RingMemory]:
        if not self._transport.is_tcp:
            check_shared_memory(nbytes)
        rings = []
        for name in ("fetch", "back"):
            rings.append(create_ring(self._transport, nbytes, name))
            stack.callback(rings[-1].close)
        return rings

    def _checkpointer(self) -> Checkpointer:
        run = self._run
        if run.mode == "eval":
            return NoCheckpoints()
        self._writer = CheckpointWriter(
            self._job,
            run.groups,
            self._run_id,
            self._training_digest(),
            run.checkpoints,
            self.newest,
            self._job.checkpoint.keep,
            run.counters.checkpointed,
            run.shard,
        )
        self._writer.on_offer = partial(self._crew.wake, "checkpoint")
        aside_bytes = parse_bytes(self._job.checkpoint.memory)
        return BarrierCheckpointer(run.groups, run.tables.stores, self._writer, aside_bytes)

    def _planner(
        self, slots: tuple[int, ...], tier_slots: tuple[int, ...] | None, measured: list[PlacedBatch]
    ) -> RowPlanner:
        pin, threads = self._job.cache.pin, self._job.prefetcher.threads
        return job_planner(
            self._job,
            self._run.groups,
            slots,
            measured,
            pinned=None if pin is None else load_pins(Path(pin), self._run.groups),
            num_threads=automatic_threads() if threads == "auto" else threads,
            keep_ids=self._run.save_trace is not None,
            checkpoint_every=self._interval.known,
            rank=self._run.rank,
            tier_slots=tier_slots,
        )

    def _welcome(
        self,
        incarnation: int,
        slots: tuple[int, ...],
        rings: Sequence[RingFile | RingMemory],
        staging_bytes: int,
        restore_bytes: int,
    ) -> Welcome:
        info, lookahead = self._source.info(), self._job.lookahead
        if lookahead.horizon != "auto" and lookahead.horizon < lookahead.depth:
            self._log.warning("the horizon was raised to the depth", horizon=lookahead.horizon, depth=lookahead.depth)
        fetch_ring, back_ring = (RingSpec(path=ring.path, nbytes=ring.nbytes) for ring in rings)
        self._log.info(
            "ready",
            run_dir=str(self._job.run_dir.resolve()),
            slots=" ".join(f"{group.name}={n}" for group, n in zip(self._run.groups, slots, strict=True)),
            depth=lookahead.depth,
            horizon=lookahead.horizon,
            policy=self._job.cache.policy,
            checkpoints=self._job.checkpoint.described,
            ring_bytes=fetch_ring.nbytes,
            after_train_steps=self.train_steps,
        )
        if info.pairing:
            self._log.info("ids come by position", pairing=info.pairing)
        return Welcome(
            protocol_version=PROTOCOL_VERSION,
            run_id=self._run_id,
            incarnation=incarnation,
            pid=os.getpid(),
            slots=slots,
            num_dense=info.num_dense,
            depth=lookahead.depth,
            fetch_ring=fetch_ring,
            back_ring=back_ring,
            staging_bytes=staging_bytes,
            train_steps=info.expected_train_steps,
            first_train_step=self.train_steps,
            restore_bytes=restore_bytes,
            verify=self._run.verify,
            start=self._start,
            fresh=self._run.checkpoints.are_fresh,
            replaces=self._run.checkpoints.replaced_run_id(),
            epoch_batches=info.epoch_batches,
            pairing=info.pairing,
            rank=0 if self._run.rank is None else self._run.rank.number,
            checkpoint="" if self.newest is None else self.newest.checksum,
        )

    def _run_stages(self, stack: ExitStack, engine: PrefetcherEngine) -> None:
        run = self._run
        run.health.state = "connecting"
        self._engine = engine
        finish_trace = self._trace(stack, engine)
        self._crew.start(self._stages(engine), stall_clocks(engine), WAKES, engine.polls)
        stack.callback(self._crew.stop)  # again, before the rings and stores are closed
        self._until_finished(engine)
        finish_trace()
        if self._writer is not None:
            self.newest = self._writer.newest
        self.finished = engine.finished and engine.barrier.finished
        run.health.state = "stopped"
        self._log_end(engine)

    def _stages(self, engine: PrefetcherEngine) -> dict[str, Stage]:
        """The stages that get a thread. Those without a clock of their own go on the timeline, if one is recorded."""
        stages = {**engine.stages, **({} if self._writer is None else {"checkpoint": self._writer})}
        timeline = self._run.counters.timeline
        if timeline is not None:
            timeline.incarnation(engine.welcome.incarnation)
            timeline.watch("fetch ring", "bytes", lambda: engine.fetch_ring.used_bytes)
        return recorded_stages(timeline, stages, mail="deliver", staging="stage", checkpoint="write")

    def _trace(self, stack: ExitStack, engine: PrefetcherEngine) -> Callable[[], None]:
        path = self._run.save_trace
        if path is None:
            return lambda: None
        from rowcast.prefetcher.run.saved_trace import save_plans  # only for a trace

        return save_plans(stack, path, self._job, self._run.groups, engine, self._tier_slots)

    def _log_end(self, engine: PrefetcherEngine) -> None:
        if self._run.verify:
            self._log.info("verified, in rows", **engine.counters.rows_verified)
        for group, counts in zip(self._run.groups, self._run.tables.counts, strict=True):
            if counts is not None:
                self._log.info(
                    "memory and cold tier",
                    group=group.name,
                    rows_from_cold=counts.loaded,
                    rows_read_past_memory=counts.cold_reads,
                    rows_to_cold=counts.spilled,
                    rows_never_trained=counts.untouched_loaded,
                    late_rows=counts.late,
                    disk_bytes=counts.disk_used_bytes,
                    garbage_bytes=counts.disk_garbage_bytes,
                )
                if not counts.keeps_up:
                    self._log.warning("steps may have waited for " + described([counts]), group=group.name)
        reason, steps = self._run.signals.stop_reason, self.train_steps
        if not engine.finished and self._is_over():
            self._log.info("the run has ended without this prefetcher's trainer, which was lost after its last step")
        elif not engine.finished:
            self._log.info("stopped before a trainer came; nothing was trained", reason=reason)
        elif engine.barrier.finished:
            self._log.info("finished", after_train_steps=steps, invalid_ids=self._source.counters.invalid_ids)
        else:
            self._log.info("stopped in order", after_train_steps=steps, reason=engine.planning.stop_reason)

    def _until_finished(self, engine: PrefetcherEngine) -> None:
        stopping, run = False, self._run
        health, signals = run.health, run.signals
        while True:
            self._bell.hush()
            if engine.finished or (engine.hello is None and self._is_over()):
                return
            self._crew.check()
            if engine.hello is not None and health.state == "connecting":
                crash_point("Welcome sent")
                health.state = "running"
                self._log.info("trainer connected", pid=engine.hello.pid, device=engine.hello.device)
                run.on_training()
            if signals.stop_reason is not None and not stopping:
                if engine.hello is None:
                    return
                stopping = True
                health.state = "stopping"
                self._log.info(STOPPING, reason=signals.stop_reason)
                engine.stop(f"{signals.stop_reason} to the prefetcher")
                self._crew.wake("planning")
            # the trainer's Bye may come just before the fetcher has ended the barrier, which rings no bell here
            self._bell.wait(IDLE_WAIT_S if engine.peer_left else 1.0)
