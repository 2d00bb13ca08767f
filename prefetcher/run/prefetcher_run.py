"""Implements `prefetcher run`: locks the pair's folder, finds where the run begins, and makes attempts."""

import secrets
from collections.abc import Sequence
from contextlib import ExitStack

from rowcast.job.pair import with_ports_of_pair, with_tables_of_pair
from rowcast.job.schema import Job, Transport
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.own_shard import OwnShard
from rowcast.prefetcher.pipeline.metrics import PrefetcherCollector, PrefetcherGauges, new_counters
from rowcast.prefetcher.run.all_ranks import AllRanks, check_options
from rowcast.prefetcher.run.attempt import PrefetcherAttempt, PrefetcherRunParts
from rowcast.prefetcher.run.background import move_to_background
from rowcast.prefetcher.run.gauges import idle_gauges
from rowcast.prefetcher.run.options import RunOptions
from rowcast.prefetcher.run.starting_point import StartingPoint, look, settle_run
from rowcast.prefetcher.run.tables import Tables
from rowcast.prefetcher.stores.left_tables import remove_left_keys
from rowcast.protocol.attempts import Attempts, transport_of_ranks
from rowcast.protocol.counters import serve_metrics
from rowcast.protocol.parts import rank_of
from rowcast.protocol.transport.ring_file import remove_leftovers
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.disk import Disk
from rowcast.runtime.process import Crew, Signals
from rowcast.runtime.run_directory import Completion, RunDirectory, pair_folder
from rowcast.runtime.telemetry.metrics import build_info
from rowcast.runtime.telemetry.timeline import Timeline


class PrefetcherRun:
    """One run, with the lock on its directory."""

    def __init__(self, job: Job, options: RunOptions, signals: Signals) -> None:
        number, count = options.rank or 0, job.ranks.count
        self._job = with_ports_of_pair(job, number)
        self._options = options
        self._signals = signals
        self._rank = rank_of(job.ranks, number)
        self._shard = OwnShard(number=number, count=count)
        self._directory = RunDirectory(pair_folder(job.run_dir, number, count), "prefetcher")
        self._checkpoints = Checkpoints(job.run_dir, Disk())
        self._groups = group_specs(job)
        own, ranks = self._job.transport, self._job.ranks
        transport = own if count == 1 else transport_of_ranks(own, ranks.timeout)
        self._attempts: Attempts[PrefetcherAttempt] = Attempts("prefetcher", "trainer", transport, signals)
        self._health = self._attempts.health
        self._counters = new_counters(self._groups, number)

    def run(self) -> bool:
        """Returns whether the run finished; False: it was stopped in order. Raises the first error of any stage."""
        if self._job.prefetcher.background:
            move_to_background()
        with ExitStack() as stack:
            stack.enter_context(self._directory)
            self._directory.clear_failure()
            try:
                build = build_info("prefetcher", self._job.job.name)
                collector = PrefetcherCollector(self._counters, self._gauges, build, self._health)
                serve_metrics(stack, collector, self._job.metrics)
                return self._run(stack)
            except BaseException as error:
                self._health.state = "failed"
                self._directory.note_failure(error)
                raise

    def _gauges(self) -> PrefetcherGauges:
        idle, attempt = idle_gauges(self._job, len(self._groups)), self._attempts.current
        return idle if attempt is None else attempt.gauges(idle)

    def _run(self, stack: ExitStack) -> bool:
        point = None
        if self._shard.count == 1:
            point = settle_run(self._job, self._options, self._checkpoints, self._directory, self._shard)
        if self._options.timeline:
            self._counters.timeline = stack.enter_context(
                Timeline(self._directory.path, "prefetcher", self._shard.number)
            )
        remove_leftovers()
        remove_left_keys(self._job, self._directory.path)
        own = with_tables_of_pair(self._job, self._shard.number)
        tables = Tables(own, self._groups, self._checkpoints, 1 + secrets.randbelow(2**31), self._shard)
        stack.callback(tables.close)
        parts = PrefetcherRunParts(
            job=self._job,
            groups=self._groups,
            rank=self._rank,
            shard=self._shard,
            folder=self._directory.path,
            options=self._options,
            signals=self._signals,
            health=self._health,
            counters=self._counters,
            checkpoints=self._checkpoints,
            tables=tables,
            on_training=self._on_training,
        )
        return self._live(parts, point)

    def _live(self, parts: PrefetcherRunParts, first: StartingPoint | None) -> bool:
        def begin(before: PrefetcherAttempt | None, transport: Transport, crew: Crew) -> PrefetcherAttempt | None:
            point = first if before is None else before.point
            if first is None:
                point = self._look(None if before is None else before.newest)
            at_end = self._shard.count > 1 and before is not None and before.reached_end
            over = self._is_complete if at_end else lambda: False
            return None if point is None else PrefetcherAttempt(parts, point, transport, crew, over)

        last = self._attempts.run(begin)
        if last is None or parts.options.mode == "eval" or not last.connected:
            return False
        parts.tables.close(at=last.newest)
        # with a fresh run that has no checkpoint, the run in the directory is the earlier one
        if last.finished and not self._checkpoints.are_fresh and self._shard.number == 0:
            crash_point("run not marked complete")
            RunDirectory(self._job.run_dir, "prefetcher").mark_complete(self._completion(last.train_steps))
        return last.finished

    def _is_complete(self) -> bool:
        return RunDirectory(self._job.run_dir, "prefetcher").completion() is not None

    def _look(self, known: Manifest | None) -> StartingPoint | None:
        return look(
            self._job,
            self._options,
            self._checkpoints,
            known,
            self._shard,
            lambda: self._signals.stop_reason is not None,
        )

    def _completion(self, train_steps: int) -> Completion:
        max_steps = self._options.max_steps
        return Completion(
            train_steps=train_steps,
            epochs=self._job.data.epochs,
            max_steps=max_steps if max_steps == train_steps else None,
        )

    def _on_training(self) -> None:
        """Marks a complete run as incomplete once it trains again. A fresh run does not change the earlier one."""
        if self._options.mode == "train" and not self._checkpoints.are_fresh and self._shard.number == 0:
            RunDirectory(self._job.run_dir, "prefetcher").go_on()


def run_prefetcher(job: Job, options: RunOptions, signals: Signals, arguments: Sequence[str] = ()) -> bool:
    """Returns whether the run finished; False: it was stopped in order. `arguments`: of the command line, which the
    prefetchers of several ranks are started with."""
    check_options(job, options)
    if job.ranks.count > 1 and options.rank is None:
        return AllRanks(job, options, signals, arguments).run()
    return PrefetcherRun(job, options, signals).run()
