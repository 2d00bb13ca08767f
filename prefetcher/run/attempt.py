"""Runs one attempt: from the first batches to the last goodbye, or to the loss of its trainer.

An attempt starts from the newest checkpoint, with a cold cache, new rings and a new conversation. It always closes its
parts in the reverse order of opening.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from rowcast.job.schema import Job, Transport
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import GroupSpec
from rowcast.job.training_identity import check_belongs, check_can_evaluate
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.own_shard import OwnShard
from rowcast.prefetcher.checkpoints.restore import dense_content
from rowcast.prefetcher.checkpoints.snapshot import BarrierCheckpointer, NoCheckpoints
from rowcast.prefetcher.checkpoints.writer import CheckpointWriter
from rowcast.prefetcher.pipeline.barrier import Checkpointer
from rowcast.prefetcher.pipeline.batch_checksums import BatchChecksums, check_first, first_checksums
from rowcast.prefetcher.pipeline.engine import PrefetcherEngine, PrefetcherParts
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters, PrefetcherGauges
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, job_slots
from rowcast.prefetcher.planner.job_planner import job_planner
from rowcast.prefetcher.planner.level import Slots
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.batch_parts import DenseBatch, join_parts
from rowcast.prefetcher.readers.data_files import files_text, in_recorded_order
from rowcast.prefetcher.readers.file_samples import sampled
from rowcast.prefetcher.readers.hot_samples import hot_rows_checksum
from rowcast.prefetcher.readers.pin_files import load_pins
from rowcast.prefetcher.readers.schedule import ReadBatch, placed
from rowcast.prefetcher.readers.worker import WorkerSource
from rowcast.prefetcher.run.checkpoint_interval import AttemptInterval
from rowcast.prefetcher.run.connection import Connection, Rings
from rowcast.prefetcher.run.gauges import engine_gauges
from rowcast.prefetcher.run.options import RunOptions
from rowcast.prefetcher.run.sizing import job_levels, sizes, stage_threads, tier_rows
from rowcast.prefetcher.run.starting_point import StartingPoint
from rowcast.prefetcher.run.tables import Tables
from rowcast.prefetcher.run.warm_up import warm_up
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.inputs import InputSpec, batch_specs, belonging
from rowcast.protocol.messages import PROTOCOL_VERSION, Welcome
from rowcast.protocol.parts import Rank
from rowcast.runtime.checkpoint_manifest import ManifestOfVersion3, Position, TrainingData
from rowcast.runtime.errors import ConfigError, PeerLost, RowcastError
from rowcast.runtime.machine import UNRECORDED, Machine
from rowcast.runtime.process import Crew, Signals
from rowcast.runtime.stages import IDLE_WAIT_S
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.metrics import Health


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetcherRunParts:
    """Everything common to the attempts of a run."""

    job: Job
    groups: tuple[GroupSpec, ...]
    rank: Rank
    shard: OwnShard
    folder: Path  # of this pair of processes
    options: RunOptions
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
        the run has ended, so that no trainer will connect."""
        self._is_over = is_over
        newest = point.newest
        self.newest = newest  # the newest checkpoint on disk
        self._run_id = point.run_id
        self.finished = False  # the data has ended, everything is durable and the trainer has said goodbye
        self._run = run
        self._job = run.job
        self._crew = crew
        self._log = get_logger()
        self._start = Position() if newest is None else newest.position
        max_steps = run.options.max_steps
        if run.options.mode == "eval":
            self._start, max_steps = Position(eval_batch=0), 0
        scores = run.options.mode == "eval" and self._job.data.eval_path == self._job.data.path  # samples of no run
        self._ordered = self._job if newest is None or scores else in_recorded_order(self._job, newest)
        self._source = WorkerSource(
            self._ordered,
            max_steps,
            self._start,
            on_arrival=partial(crew.wake, "planning"),
            timeline=run.counters.timeline,
        )
        self._writer: CheckpointWriter | None = None
        self._connection = Connection(run.folder, transport, crew, run.signals, run.health, run.counters.timeline)
        self._interval = AttemptInterval(run.job, run.checkpoints, run.shard.number, run.options.mode)

    def live(self) -> None:
        """Returns when the run finished or was stopped in order. Raises the first error of any stage, or PeerLost."""
        connection = self._connection
        with connection.stack as stack:
            connection.open()
            stack.callback(self._source.close)
            try:
                connection.watch(self._work)
                self._source.start()
                measured = self._measure()
                if self._run.signals.stop_reason is None:
                    self._check_belongs(measured)
                    self._run.tables.restore(self.newest)
                    self._serve(connection, measured)
                connection.say_bye()
            except BaseException as error:
                connection.fail(error)
                try:
                    self._settle_checkpoint()
                except RowcastError as later:
                    if isinstance(error, PeerLost):
                        raise
                    # both processes end with the first error's sentence; it usually caused this one
                    self._log.warning("the checkpoint in progress was lost", error=str(later))
                raise

    @property
    def point(self) -> StartingPoint:
        """Where the next attempt begins."""
        return StartingPoint(newest=self.newest, run_id=self._run_id)

    @property
    def reached_end(self) -> bool:
        """Whether everything is durable and only the good-byes are missing."""
        engine = self._connection.engine
        return engine is not None and engine.barrier.ended and engine.barrier.finished

    @property
    def connected(self) -> bool:
        return self._connection.met

    def gauges(self, idle: PrefetcherGauges) -> PrefetcherGauges:
        idle, engine = replace(idle, stores=self._run.tables.counts), self._connection.engine
        return idle if engine is None else engine_gauges(idle, engine, self._source)

    @property
    def train_steps(self) -> int:
        """Train steps at the newest checkpoint."""
        return 0 if self.newest is None else self.newest.train_steps

    def _settle_checkpoint(self) -> None:
        """Finishes a checkpoint that was handed over completely, although its attempt is over."""
        if self._writer is None:
            return
        self._writer.abandon()
        while self._writer.busy:
            if not self._writer.advance():
                time.sleep(IDLE_WAIT_S)  # other ranks write
        self.newest = self._writer.newest
        self._run.tables.attempt_ended(self.newest, gave_up=self._writer.gave_up)

    def _work(self) -> int:
        return self._source.counters.batches + (0 if self._writer is None else self._writer.work)

    def _measure(self) -> list[ReadBatch]:
        has_tier = isinstance(self._job.store, StoreWithTier)
        folder = self._run.tables.folder if has_tier else None
        warm_up(tiers_in=folder)  # while the child starts
        measured: list[ReadBatch] = []
        while len(measured) < MEASURED_BATCHES and not self._source.ended and self._run.signals.stop_reason is None:
            self._crew.check()
            try:
                batch = self._source.poll()
            except RowcastError:
                if not measured:
                    raise
                break  # the plan stream ends there, after these batches
            if batch is None:
                self._run.signals.bell.wait(IDLE_WAIT_S)
            else:
                measured.append(batch)
            self._run.signals.bell.hush()
        return measured

    def _check_belongs(self, measured: list[ReadBatch]) -> None:
        """Raises if the checkpoint belongs to another job or to other data, or if there is nothing to evaluate."""
        if self.newest is not None and not self.newest.is_import and not self.newest.machine.threads:
            self._log.warning("an older version made this checkpoint: its number of torch threads is not known")
        if self.newest is not None and self._run.options.mode == "eval":
            check_can_evaluate(self.newest, self._job, self._source.info().dense_names)
        elif self.newest is not None:
            check_belongs(self.newest, self._job, self._training_data)
            if isinstance(self.newest, ManifestOfVersion3):
                self._log.warning("an older version made this checkpoint: only the sizes of data files are compared")
            check_first(measured, self.newest.ahead)
        if self._run.options.mode == "eval" and self._source.info().num_eval == 0:
            raise ConfigError("there are no evaluation batches; set data.eval_fraction or data.eval_path")

    @cached_property
    def _training_data(self) -> TrainingData:
        info, hot_rows = self._source.info(), hot_rows_checksum(self._job)
        names = tuple(info.dense_names)
        return TrainingData(files=sampled(info.paths), hot_rows=hot_rows, num_dense=len(names), dense_columns=names)

    def _serve(self, connection: Connection, measured: list[ReadBatch]) -> None:
        run, batches = self._run, [placed(ids.point, join_parts(ids.batch, dense)) for ids, dense in measured]
        slots = job_slots(self._job, run.groups, batches, run.rank)
        own = sizes(self._job, run.groups, batches, self._job.lookahead.depth, run.rank)
        rings = connection.open_rings(own.ring_bytes)
        levels = job_levels(self._job, run.groups, batches, slots, run.rank)
        for in_memory in levels[1:]:
            run.tables.begin(tier_rows(self._job, run.groups, batches, in_memory, run.rank))
        planner = self._planner(levels, batches)
        restore = b"" if self.newest is None else b"".join(dense_content(run.checkpoints.root, self.newest))
        engine = PrefetcherEngine(
            PrefetcherParts(
                job=self._job,
                groups=run.groups,
                source=self._source,
                planner=planner,
                measured=measured,
                checksums=BatchChecksums(self._job.lookahead.depth, () if self.newest is None else self.newest.ahead),
                stores=run.tables.stores,
                conversation=connection.conversation,
                fetch_ring=rings.fetch,
                back_ring=rings.back,
                checkpointer=self._checkpointer(),
                welcome=self._welcome(connection, slots, rings, own.staging_bytes, len(restore), measured),
                mode=run.options.mode,
                start=self._start,
                counters=run.counters,
                restore=restore,
                pace=self._interval.pace(self.train_steps),
                rank=run.rank,
            )
        )
        engine.planning.on_interval = self._interval.keep
        connection.start(engine, {} if self._writer is None else {"checkpoint": self._writer})
        connection.drive(engine, run.on_training, self._is_over)
        if self._writer is not None:
            self.newest = self._writer.newest
        self.finished = engine.finished and engine.barrier.finished
        run.health.state = "stopped"
        self._log_end(engine)

    def _checkpointer(self) -> Checkpointer:
        run = self._run
        if run.options.mode == "eval":
            return NoCheckpoints()
        self._writer = CheckpointWriter(
            self._job,
            run.groups,
            self._run_id,
            self._training_data,
            run.checkpoints,
            self.newest,
            self._job.checkpoint.keep,
            run.counters.checkpointed,
            run.shard,
        )
        self._writer.on_offer = partial(self._crew.wake, "checkpoint")
        self._writer.machine = self._machine
        aside_bytes = parse_bytes(self._job.checkpoint.memory)
        return BarrierCheckpointer(run.groups, run.tables.stores, self._writer, aside_bytes)

    def _machine(self) -> Machine:
        """The trainer's machine, with the run's number of threads."""
        engine = self._connection.engine
        assert engine is not None, "a checkpoint comes after the first message of a trainer"
        assert engine.hello is not None, "a checkpoint comes after the first message of a trainer"
        own = engine.hello.machine
        return Machine(threads=engine.welcome.machine.threads or own.threads, facts=own.facts)

    def _planner(self, slots: Sequence[Slots], measured: Sequence[ScheduledBatch]) -> RowPlanner:
        pin = self._job.cache.pin
        return job_planner(
            self._job,
            self._run.groups,
            slots,
            measured,
            pinned=None if pin is None else load_pins(Path(pin), self._run.groups),
            num_threads=stage_threads(self._job),
            checkpoint_every=self._interval.known,
            rank=self._run.rank,
        )

    def _welcome(
        self,
        connection: Connection,
        slots: tuple[int, ...],
        rings: Rings,
        staging_bytes: int,
        restore_bytes: int,
        measured: list[ReadBatch],
    ) -> Welcome:
        info, lookahead, data = self._source.info(), self._job.lookahead, files_text(self._ordered)
        if lookahead.horizon != "auto" and lookahead.horizon < lookahead.depth:
            self._log.warning("the horizon was raised to the depth", horizon=lookahead.horizon, depth=lookahead.depth)
        fetch_ring, back_ring = rings.specs
        self._log.info(
            "ready",
            run_dir=str(self._job.run_dir.resolve()),
            data=data,
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
            incarnation=connection.incarnation,
            pid=os.getpid(),
            slots=slots,
            inputs=self._inputs(measured),
            depth=lookahead.depth,
            fetch_ring=fetch_ring,
            back_ring=back_ring,
            staging_bytes=staging_bytes,
            train_steps=info.expected_train_steps,
            first_train_step=self.train_steps,
            restore_bytes=restore_bytes,
            start=self._start,
            fresh=self._run.checkpoints.are_fresh,
            replaces=self._run.checkpoints.replaced_run_id(),
            epoch_batches=info.epoch_batches,
            pairing=info.pairing,
            data=data,
            rank=self._run.rank.number,
            checkpoint="" if self.newest is None else self.newest.checksum,
            machine=UNRECORDED if self.newest is None else self.newest.machine,
            first_batches=tuple(first_checksums(self._job.features, measured).items()),
        )

    def _inputs(self, measured: list[ReadBatch]) -> tuple[InputSpec, ...]:
        """Returns the arrays of the first batch; dense features and labels if no batch is left."""
        shape = self._job.data.columns.label_shape
        none = DenseBatch(
            dense=np.zeros((0, len(self._source.info().dense_names)), np.float32),
            labels=np.zeros((0, *shape), np.float32),
        )
        first = measured[0][1] if measured else none
        return batch_specs(first, belonging(self._job).arrays)

    def _log_end(self, engine: PrefetcherEngine) -> None:
        self._run.tables.log_counts()
        reason, steps = self._run.signals.stop_reason, self.train_steps
        if not engine.finished and self._is_over():
            self._log.info("the run has ended without this prefetcher's trainer, which was lost after its last step")
        elif not engine.finished:
            self._log.info("stopped before a trainer came; nothing was trained", reason=reason)
        elif engine.barrier.finished:
            self._log.info("finished", after_train_steps=steps, invalid_ids=self._source.counters.invalid_ids)
        else:
            self._log.info("stopped in order", after_train_steps=steps, reason=engine.planning.stop_reason)
