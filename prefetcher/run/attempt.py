"""Implements `prefetcher run`: `PrefetcherRun` locks the pair's folder, finds where the run begins, and makes attempts.

An attempt runs from the first batches to the last goodbye, or to the loss of its trainer.
It starts from the newest checkpoint, with a cold cache, new rings and a new conversation. It always closes its
parts in the reverse order of opening.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, cached_property, partial

import msgspec
import numpy as np

from rowcast.job.file import with_ports_of_pair, with_tables_of_pair
from rowcast.job.schema import Job, Transport
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import group_specs, points_in
from rowcast.job.training_identity import check_can_evaluate
from rowcast.job.units import parse_bytes, parse_seconds
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.restore import OwnShard, dense_content
from rowcast.prefetcher.checkpoints.writer import BarrierCheckpointer, CheckpointWriter, NoCheckpoints
from rowcast.prefetcher.pipeline.barrier import Checkpointer
from rowcast.prefetcher.pipeline.batch_checksums import first_checksums
from rowcast.prefetcher.pipeline.engine import PrefetcherEngine
from rowcast.prefetcher.pipeline.key_exchange import KeyLinks, NoLinks
from rowcast.prefetcher.pipeline.metrics import new_counters
from rowcast.prefetcher.pipeline.planning import CheckpointClock
from rowcast.prefetcher.planner.first_batches import MEASURED_BATCHES, counted, short_of_memory
from rowcast.prefetcher.planner.planner import RowPlanner, job_planner
from rowcast.prefetcher.readers.data_files import files_text, in_recorded_order, with_recorded_rule
from rowcast.prefetcher.readers.id_check import check_id_types
from rowcast.prefetcher.readers.workers import WorkerSource
from rowcast.prefetcher.run.all_ranks import AllRanks, check_options
from rowcast.prefetcher.run.connection import Rings, TrainerConnection
from rowcast.prefetcher.run.scrape import PrefetcherCollector, PrefetcherGauges, SlotStates, gauges_of
from rowcast.prefetcher.run.sizing import (
    Decisions,
    check_continues,
    data_checksums,
    decide,
    placed,
    stage_threads,
    training_data,
)
from rowcast.prefetcher.run.starting_point import RunOptions, StartingPoint, Tables, checksum_of, look, settle_run
from rowcast.prefetcher.run.warm_up import warm_up
from rowcast.prefetcher.stores.redis_store import remove_left_keys
from rowcast.protocol.attempts import Attempts, transport_of_ranks
from rowcast.protocol.batch import Samples, ScheduledBatch
from rowcast.protocol.messages import PROTOCOL_VERSION, DataDelay, Welcome
from rowcast.protocol.parts import InputSpec, batch_specs, belonging, rank_of
from rowcast.protocol.scrape import serve_metrics
from rowcast.protocol.transport.rank_links import RankLinks
from rowcast.protocol.transport.ring_file import remove_leftovers, shared_memory
from rowcast.runtime.checkpoint_manifest import NOTHING_READ, Position, TrainingData
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, PeerLost, RowcastError
from rowcast.runtime.machine import UNRECORDED, Machine
from rowcast.runtime.process import Signals
from rowcast.runtime.run_directory import Completion, RunDirectory, pair_folder
from rowcast.runtime.stages import IDLE_WAIT_S, Crew
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.metrics import build_info
from rowcast.runtime.telemetry.timeline import Timeline


class PrefetcherAttempt:
    def __init__(
        self,
        run: "PrefetcherRun",
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
        self.finished = False  # the run is complete, everything is durable and the trainer has said goodbye
        self.ended_early = ""  # why it was complete before the data ended
        self._run = run
        self._job = run.job if newest is None else with_recorded_rule(run.job, newest)
        self._recorded = self._job  # in checkpoints
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
            rank=run.rank,
            num_whole=MEASURED_BATCHES,
            on_arrival=partial(crew.wake, "planning"),
            timeline=run.counters.timeline,
            trained_on=NOTHING_READ if newest is None or newest.trained_on is None else newest.trained_on,
        )
        self._writer: CheckpointWriter | None = None
        self._connection = TrainerConnection(
            run.directory.path, transport, crew, run.signals, run.health, run.counters.timeline
        )

    def live(self) -> None:
        """Returns when the run finished or was stopped in order. Raises the first error of any stage, or PeerLost."""
        connection = self._connection
        with connection.stack as stack:
            connection.open()
            stack.callback(self._source.close)
            try:
                connection.watch(self._followed_work if self._job.data.follow else self._work)
                self._source.start()
                measured = self._measure()
                if self._run.signals.stop_reason is None:
                    self._check_belongs(measured)
                    asked, count = self._job, cache(partial(counted, self._job, measured))
                    self._job = self._run.place(placed(asked, self.newest, count))
                    if short := short_of_memory(asked, self._job, count):
                        self._log.warning(short)
                    self._source.place(self._job, measured[-1].following if measured else self._start)
                    self._run.tables.restore(self.newest)
                    self._serve(measured)
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

    def _work(self) -> int:
        return self._source.counters.batches + (0 if self._writer is None else self._writer.work)

    def _followed_work(self) -> int:
        """Notes each second which files are trained."""
        engine = self._connection.engine
        assert engine is not None, "the watch asks for the progress of an engine"
        position = engine.planning.due.position_after(engine.fetcher.step_done)
        self._source.read.trained(position.train_batch * self._job.data.batch_size)
        return self._work()

    def _data_delay(self) -> DataDelay:
        self._followed_work()
        return self._source.read.delay(self._job)

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
        engine = self._connection.engine
        if self._job.data.follow:
            delay = self._source.read.delay(self._job)
            idle = replace(idle, data_waiting_files=delay.waiting_files, data_delay_seconds=delay.last_s)
        return idle if engine is None else gauges_of(engine, idle, self._source.counters.queue_depth)

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

    def _measure(self) -> list[ScheduledBatch]:
        has_tier = isinstance(self._job.store, StoreWithTier)
        folder = self._run.tables.folder if has_tier else None
        warm_up(tiers_in=folder, is_divided=self._run.rank.is_divided)  # while the child starts
        measured: list[ScheduledBatch] = []
        num_measured, told = self._num_measured, -1
        while len(measured) < num_measured and not self._source.ended and self._run.signals.stop_reason is None:
            self._crew.check()
            try:
                batch = self._source.poll()
            except RowcastError:
                if not measured:
                    raise
                break  # the plan stream ends there, after these batches
            if batch is None:
                if self._source.counters.awaits_file and told < len(measured):
                    told = len(measured)
                    here = f"{told} of the first {num_measured} batches are here; training waits for all"
                    self._log.info(here, batch_size=self._job.data.batch_size, shuffle=self._job.data.shuffle)
                self._run.signals.bell.wait(IDLE_WAIT_S)
            else:
                measured.append(batch)
            self._run.signals.bell.hush()
        self._source.put_back(measured)
        return measured

    @property
    def _num_measured(self) -> int:
        """A restart with data.follow awaits only what its checkpoint's run had read ahead, which is there."""
        if self.newest is None or not self._job.data.follow:
            return MEASURED_BATCHES
        ahead = {(batch.train_step, batch.eval_batch) for batch in self.newest.known_ahead(self._run.rank.parts)}
        return max(1, min(len(ahead), MEASURED_BATCHES))

    def _check_belongs(self, measured: list[ScheduledBatch]) -> None:
        """Raises if the checkpoint belongs to another job or to other data, or if there is nothing to evaluate."""
        info = self._source.info()
        if self.newest is not None:
            check_id_types(self.newest, info.id_types, info.paths)
        if self.newest is not None and self._run.options.mode == "eval":
            check_can_evaluate(self.newest, self._job, info.dense_names)
        elif self.newest is not None:
            check_continues(self.newest, self._job, self._training_data, measured, self._run.rank)
        needs_some = self._run.options.mode == "eval" or self._job.eval.patience or self._job.eval.keep == "best"
        if needs_some and info.num_eval == 0:
            raise ConfigError("there are no evaluation batches; set data.eval_fraction or data.eval_path")

    @cached_property
    def _training_data(self) -> TrainingData:
        info = self._source.info()
        if self._job.data.follow:
            return self._followed(self._start)
        return training_data(info.dense_names, info.paths)

    def _followed(self, position: Position) -> TrainingData:
        """Returns what a checkpoint at `position` records about the files that arrive."""
        names, data = tuple(self._source.info().dense_names), self._job.data
        row, window = position.train_batch * data.batch_size, data.shuffle_window or 1
        read = self._source.read.trained_on(row // window * window)
        return msgspec.structs.replace(read, num_dense=len(names), dense_columns=names)

    def _serve(self, batches: list[ScheduledBatch]) -> None:
        run, connection = self._run, self._connection
        start = decide(self._job, run.groups, batches, run.rank)
        rings = connection.open_rings(start.sizes.ring_bytes)
        for in_memory in start.memory_rows:
            run.tables.begin(in_memory)
        planner = self._planner(start, batches)
        restore = b"" if self.newest is None else b"".join(dense_content(run.checkpoints.root, self.newest))
        engine = PrefetcherEngine(
            job=self._job,
            welcome=self._welcome(start, rings, len(restore), batches),
            source=self._source,
            planner=planner,
            stores=run.tables.stores,
            conversation=connection.conversation,
            rings=(rings.fetch, rings.back),
            checkpointer=self._checkpointer(),
            counters=run.counters,
        )
        engine.mode = run.options.mode
        engine.planning.keys.links = self._links()
        if self.newest is not None:
            engine.planning.checksums.expect(self.newest.known_ahead(run.rank.parts))
        if self._job.data.follow:
            engine.data_delay = self._data_delay
        if restore:
            engine.barrier.restore(restore)
        every_seconds = self._job.checkpoint.every_seconds
        if every_seconds is not None and self._run.shard.number == 0 and self._run.options.mode != "eval":
            engine.planning.due.clock = CheckpointClock(every_seconds)
        connection.start(engine, {} if self._writer is None else {"checkpoint": self._writer.advance})
        connection.drive(engine, run.on_training, self._is_over)
        if self._writer is not None:
            self.newest = self._writer.newest
        self.finished, end = engine.finished and engine.barrier.finished, engine.barrier.early_end
        self.ended_early = end[1].reason if end is not None and end[1].finished else ""
        run.health.state = "stopped"
        self._log_end(engine)

    def _links(self) -> KeyLinks:
        """Lets the prefetchers of the other ranks connect."""
        rank, ranks = self._run.rank, self._job.ranks
        if rank.count == 1:
            return NoLinks()
        links = RankLinks(
            self._job.run_dir,
            rank,
            start=f"{self._run.options.mode} {self._run_id} {checksum_of(self.newest)} {self._start.step}",
            is_only_host=ranks.on_host == ranks.count,
            timeout_s=parse_seconds(ranks.timeout),
            may_wait=lambda: self.connected,
            on_receive=partial(self._crew.wake, "planning"),
        )
        links.open()
        self._connection.stack.callback(links.close)
        return links

    def _checkpointer(self) -> Checkpointer:
        run = self._run
        if run.options.mode == "eval":
            return NoCheckpoints()
        self._writer = CheckpointWriter(
            self._recorded,
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
        if self._job.data.follow:
            self._writer.trained_on = self._followed
        known = {} if self.newest is None else self.newest.id_types
        self._writer.id_types = {**known, **self._source.info().id_types}
        aside_bytes = parse_bytes(self._job.checkpoint.memory)
        return BarrierCheckpointer(run.groups, run.tables.stores, self._writer, aside_bytes)

    def _machine(self) -> Machine:
        """The trainer's machine, with the run's number of threads."""
        engine = self._connection.engine
        assert engine is not None, "a checkpoint comes after the first message of a trainer"
        assert engine.hello is not None, "a checkpoint comes after the first message of a trainer"
        own = engine.hello.machine
        return Machine(threads=engine.welcome.machine.threads or own.threads, facts=own.facts)

    def _planner(self, start: Decisions, measured: Sequence[ScheduledBatch]) -> RowPlanner:
        return job_planner(
            self._job,
            self._run.groups,
            start.levels,
            measured,
            num_threads=stage_threads(self._job),
            rank=self._run.rank,
        )

    def _welcome(self, start: Decisions, rings: Rings, restore_bytes: int, measured: list[ScheduledBatch]) -> Welcome:
        info, lookahead, data = self._source.info(), self._job.lookahead, files_text(self._ordered)
        if lookahead.horizon != "auto" and lookahead.horizon < lookahead.depth:
            self._log.warning("the horizon was raised to the depth", horizon=lookahead.horizon, depth=lookahead.depth)
        fetch_ring, back_ring = rings.specs
        self._log.info(
            "ready",
            run_dir=str(self._job.run_dir.resolve()),
            data=data,
            slots=" ".join(f"{group.name}={n}" for group, n in zip(self._run.groups, start.slots, strict=True)),
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
            incarnation=self._connection.incarnation,
            pid=os.getpid(),
            slots=start.slots,
            inputs=self._inputs(measured),
            depth=lookahead.depth,
            fetch_ring=fetch_ring,
            back_ring=back_ring,
            staging_bytes=start.sizes.staging_bytes,
            train_steps=info.expected_train_steps,
            first_train_step=self.train_steps,
            restore_bytes=restore_bytes,
            start=self._start,
            fresh=self._run.checkpoints.are_fresh,
            replaces=self._run.checkpoints.replaced_run_id(),
            placements=tuple(table.placement for table in self._job.tables),
            epoch_batches=info.epoch_batches,
            pairing=info.pairing,
            data=data,
            rank=self._run.rank.number,
            checkpoint="" if self.newest is None else self.newest.checksum,
            machine=UNRECORDED if self.newest is None else self.newest.machine,
            data_checksums=tuple(data_checksums(self._training_data, info).items()),
            first_batches=tuple(first_checksums(self._job.features, measured).items()),
        )

    def _inputs(self, measured: list[ScheduledBatch]) -> tuple[InputSpec, ...]:
        """Returns the arrays of the first batch; dense features and labels if no batch is left."""
        shape = self._job.data.columns.label_shape
        none = Samples(
            dense=np.zeros((0, len(self._source.info().dense_names)), np.float32),
            labels=np.zeros((0, *shape), np.float32),
        )
        first = measured[0].batch.samples if measured else none
        return batch_specs(first, belonging(self._job).arrays)

    def _log_end(self, engine: PrefetcherEngine) -> None:
        self._run.tables.log_counts()
        steps = self.train_steps
        if not engine.finished and self._is_over():
            self._log.info("the run has ended without this prefetcher's trainer, which was lost after its last step")
        elif engine.finished and engine.barrier.finished:
            self._log.info("finished", after_train_steps=steps, invalid_ids=self._source.counters.invalid_ids)
        elif engine.finished:
            self._log.info("stopped in order", after_train_steps=steps, reason=engine.planning.due.stop_reason)


class PrefetcherRun:
    """One run, with the lock on its directory."""

    def __init__(self, job: Job, options: RunOptions, signals: Signals) -> None:
        number, count = options.rank or 0, job.ranks.count
        self.job = with_ports_of_pair(job, number)
        self.options = options
        self.signals = signals
        self.rank = rank_of(job.ranks, number)
        self.shard = OwnShard(number=number, count=count)
        self.directory = RunDirectory(pair_folder(job.run_dir, number, count), "prefetcher")
        self.checkpoints = Checkpoints(job.run_dir, Disk())
        self.groups = group_specs(job)
        own, ranks = self.job.transport, self.job.ranks
        transport = own if count == 1 else transport_of_ranks(own, ranks.timeout)
        self._attempts: Attempts[PrefetcherAttempt] = Attempts("prefetcher", "trainer", transport, signals)
        self.health = self._attempts.health
        self.counters = new_counters(self.groups, number)
        self.tables = Tables(with_tables_of_pair(self.job, number), self.groups, self.checkpoints, self.shard)

    def place(self, job: Job) -> Job:
        """Settles which rank owns which rows, the same in every attempt, and returns `job`."""
        self.groups = group_specs(job)
        self.counters.place(self.groups)
        self.shard = replace(self.shard, points=points_in(self.groups))
        self.tables.place(job, self.groups, self.shard)
        return job

    def run(self) -> bool:
        """Returns whether the run finished; False: it was stopped in order. Raises the first error of any stage."""
        if self.job.prefetcher.background:
            move_to_background()
        with ExitStack() as stack:
            stack.enter_context(self.directory)
            self.directory.clear_failure()
            try:
                build = build_info("prefetcher", self.job.job.name)
                collector = PrefetcherCollector(self.counters, self._gauges, build, self.health)
                serve_metrics(stack, collector, self.job.metrics)
                return self._run(stack)
            except BaseException as error:
                self.health.state = "failed"
                self.directory.note_failure(error)
                raise

    def _gauges(self) -> PrefetcherGauges:
        size_bytes, free_bytes = shared_memory()
        interval = self.job.checkpoint.interval
        idle = PrefetcherGauges(
            depth_plans=self.job.lookahead.depth,
            checkpoint_every_steps=interval if isinstance(interval, int) else 0,  # 0: by another rule
            checkpoint_every_seconds=self.job.checkpoint.every_seconds or 0.0,
            slots=[SlotStates(0, 0, 0)] * len(self.groups),
            stores=self.tables.counts,
            shared_memory_size_bytes=size_bytes,
            shared_memory_free_bytes=free_bytes,
        )
        attempt = self._attempts.current
        return idle if attempt is None else attempt.gauges(idle)

    def _run(self, stack: ExitStack) -> bool:
        point = None
        if self.shard.count == 1:
            point = settle_run(self.job, self.options, self.checkpoints, self.directory, self.shard)
        if self.options.timeline:
            self.counters.timeline = stack.enter_context(Timeline(self.directory.path, "prefetcher", self.shard.number))
        remove_leftovers()
        remove_left_keys(self.job, self.directory.path)
        stack.callback(self.tables.close)
        return self._live(point)

    def _live(self, first: StartingPoint | None) -> bool:
        def begin(before: PrefetcherAttempt | None, transport: Transport, crew: Crew) -> PrefetcherAttempt | None:
            point = first if before is None else before.point
            if first is None:
                known, stopped = None if before is None else before.newest, lambda: self.signals.stop_reason is not None
                point = look(self.job, self.options, self.checkpoints, known, self.shard, stopped)
            at_end = self.shard.count > 1 and before is not None and before.reached_end
            directory = RunDirectory(self.job.run_dir, "prefetcher")
            over = (lambda: directory.completion() is not None) if at_end else lambda: False
            return None if point is None else PrefetcherAttempt(self, point, transport, crew, over)

        last = self._attempts.run(begin)
        if last is None or self.options.mode == "eval" or not last.connected:
            return False
        self.tables.close()
        # with a fresh run that has no checkpoint, the run in the directory is the earlier one
        if last.finished and not self.checkpoints.are_fresh and self.shard.number == 0:
            crash_point("run not marked complete")
            max_steps = self.options.max_steps
            completion = Completion(
                train_steps=last.train_steps,
                epochs=self.job.data.epochs,
                max_steps=max_steps if max_steps == last.train_steps else None,
                patience=self.job.eval.patience if last.ended_early else 0,
                reason=last.ended_early,
            )
            RunDirectory(self.job.run_dir, "prefetcher").mark_complete(completion)
        return last.finished

    def on_training(self) -> None:
        """Marks a complete run as incomplete once it trains again. A fresh run does not change the earlier one."""
        self.signals.left_undone = ""
        if self.options.mode == "train" and not self.checkpoints.are_fresh and self.shard.number == 0:
            RunDirectory(self.job.run_dir, "prefetcher").go_on()


def run_prefetcher(job: Job, options: RunOptions, signals: Signals, arguments: Sequence[str] = ()) -> bool:
    """Returns whether the run finished; False: it was stopped in order. `arguments`: of the command line, which the
    prefetchers of several ranks are started with."""
    check_options(job, options)
    if job.ranks.count > 1 and options.rank is None:
        return AllRanks(job, options, signals, arguments).run()
    return PrefetcherRun(job, options, signals).run()


def move_to_background() -> None:
    """Lets the prefetcher yield to a trainer that computes on the same cores. Warns if the system refuses.

    Torch divides an operation on the CPU among threads that wait for each other at its end: if the prefetcher holds one
    thread's core, all wait. As background work (Linux: SCHED_IDLE, see sched(7)) all its threads and their children run
    on idle cores, and any other process preempts them at once. It cannot fall far behind its trainer, which needs no
    core while it waits for rows. But it can starve beside other processes, and leaving the policy needs privileges. So
    it is off by default.
    """
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError) as error:  # not Linux; a sandbox
        get_logger().warning("prefetcher.background has no effect here", reason=str(error))
