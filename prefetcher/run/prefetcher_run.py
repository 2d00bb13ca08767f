"""Implements `prefetcher run`: locks the run directory, restores the newest checkpoint and makes attempts."""

import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.checkpoints.folder import Checkpoints, carry_out
from rowcast.prefetcher.checkpoints.import_checkpoint import import_into, open_source
from rowcast.prefetcher.pipeline.metrics import PrefetcherCollector, PrefetcherGauges, new_counters
from rowcast.prefetcher.run.attempt import PrefetcherAttempt, PrefetcherRunParts, new_run_id
from rowcast.prefetcher.run.background import move_to_background
from rowcast.prefetcher.run.gauges import idle_gauges
from rowcast.prefetcher.run.tables import Tables
from rowcast.protocol.attempts import Attempts
from rowcast.protocol.counters import serve_metrics
from rowcast.protocol.messages import Mode
from rowcast.protocol.parts import rank_of
from rowcast.protocol.transport.ring_file import remove_leftovers
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.disk import RealDisk
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.process import Signals
from rowcast.runtime.run_directory import Completion, RunDirectory
from rowcast.runtime.telemetry.build import build_info
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The options of the command line."""

    max_steps: int | None = None
    fresh: bool = False
    source: Path | None = None  # a run directory or an exported file to start from
    save_trace: Path | None = None
    timeline: bool = False  # record one
    mode: Mode = "train"
    verify: float = 0.0  # share of the rows whose checksums are followed
    checkpoint: str | None = None  # eval: the name of the checkpoint to evaluate; None: the newest


class PrefetcherRun:
    """One run, which holds the lock on its directory."""

    def __init__(self, job: Job, options: RunOptions, signals: Signals) -> None:
        self._job = job
        self._options = options
        self._signals = signals
        self._rank = rank_of(job.ranks, 0)
        self._directory = RunDirectory(job.run_dir, "prefetcher")
        self._checkpoints = Checkpoints(job.run_dir, RealDisk())
        self._groups = group_specs(job)
        self._attempts: Attempts[PrefetcherAttempt] = Attempts("prefetcher", "trainer", job.transport, signals)
        self._health = self._attempts.health
        self._counters = new_counters(self._groups)

    def run(self) -> bool:
        """Returns whether the run finished; False: it was stopped in order. Raises the first error of any stage."""
        if self._job.ranks.count > 1:
            raise ConfigError(
                f"ranks.count = {self._job.ranks.count}, but the prefetchers of several ranks are not started yet; set "
                f"ranks.count = 1 and ranks.parts = {self._job.ranks.num_parts}, which gives the same bits"
            )
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
        newest = self._newest()
        if self._options.timeline:
            self._counters.timeline = stack.enter_context(Timeline(self._job.run_dir, "prefetcher"))
        remove_leftovers()
        tables = Tables(self._job, self._groups, self._checkpoints, 1 + secrets.randbelow(2**31))
        stack.callback(tables.close)
        parts = PrefetcherRunParts(
            job=self._job,
            groups=self._groups,
            rank=self._rank,
            folder=self._job.run_dir,
            mode=self._options.mode,
            run_id=new_run_id() if newest is None else newest.run_id,
            max_steps=self._options.max_steps,
            save_trace=self._options.save_trace,
            verify=self._options.verify,
            signals=self._signals,
            health=self._health,
            counters=self._counters,
            checkpoints=self._checkpoints,
            tables=tables,
            on_training=self._on_training,
        )
        return self._live(parts, newest)

    def _live(self, parts: PrefetcherRunParts, newest: Manifest | None) -> bool:
        last = self._attempts.run(
            lambda before, transport, crew: PrefetcherAttempt(
                parts, newest if before is None else before.newest, transport, crew
            )
        )
        if last is None or parts.mode == "eval" or not last.connected:
            return False
        parts.tables.close(at=last.newest)
        if last.finished and not self._checkpoints.are_fresh:  # otherwise the run in the directory is the earlier one
            crash_point("run not marked complete")
            self._directory.mark_complete(self._completion(last.train_steps))
        return last.finished

    def _completion(self, train_steps: int) -> Completion:
        max_steps = self._options.max_steps
        return Completion(
            train_steps=train_steps,
            epochs=self._job.data.epochs,
            max_steps=max_steps if max_steps == train_steps else None,
        )

    def _newest(self) -> Manifest | None:
        """Returns the checkpoint to continue from. Raises ConfigError if the run is complete, DataError if every
        checkpoint is damaged."""
        log = get_logger()
        carry_out(self._checkpoints.settle(log))
        if self._options.mode == "eval":
            return self._checkpoints.choose(self._options.checkpoint, log)
        if self._options.checkpoint is not None:
            raise ConfigError("--checkpoint chooses what --eval evaluates; a run continues from its newest checkpoint")
        if self._options.fresh:
            carry_out(self._checkpoints.begin_fresh())
            return self._first()
        self._directory.refuse_complete(self._job.data.epochs, self._options.max_steps)
        return self._checkpoints.newest_valid(log) or self._first()

    def _first(self) -> Manifest | None:
        if self._options.source is None:
            return None
        source = open_source(self._job, self._options.source)
        manifest = import_into(self._checkpoints, self._job, source)
        get_logger().info("begins with", source=str(self._options.source), after_train_steps=manifest.train_steps)
        return manifest

    def _on_training(self) -> None:
        """Marks a complete run as not complete once it trains again. A fresh run leaves the earlier one as it is."""
        if self._options.mode == "train" and not self._options.fresh:
            self._directory.go_on()


def run_prefetcher(job: Job, options: RunOptions, signals: Signals) -> bool:
    """Returns whether the run finished; False: it was stopped in order."""
    return PrefetcherRun(job, options, signals).run()
