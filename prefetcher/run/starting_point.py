"""Decides where a run begins, at its newest checkpoint, at a different run's, or at step 0, and restores its tables.

With several ranks, the parent of rank 0's prefetcher decides for all (`settle_run`). The prefetcher of a rank then
looks before each attempt (`look`). It may look too early, on a different host or during a checkpoint; the trainers
compare what their prefetchers found, and if it differs all look again.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rowcast.job.schema import Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import GroupSpec
from rowcast.job.training_identity import refuse_finished
from rowcast.job.units import parse_seconds
from rowcast.prefetcher.checkpoints.folder import Checkpoints, carry_out
from rowcast.prefetcher.checkpoints.import_checkpoint import import_into, open_source
from rowcast.prefetcher.checkpoints.restore import ALONE, OwnShard, is_cut_anew, restore_changed, restore_rows
from rowcast.prefetcher.run.sizing import stage_threads
from rowcast.prefetcher.stores.redis_store import remove_left_tables
from rowcast.prefetcher.stores.store import StoreCounts, described
from rowcast.prefetcher.stores.tracked_store import TrackedStore, open_row_store
from rowcast.protocol.messages import Mode
from rowcast.runtime.checkpoint_manifest import Manifest, write_durably
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.disk import unreadable
from rowcast.runtime.errors import ConfigError, PeerLost
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.stages import ThreadPool
from rowcast.runtime.telemetry.logs import get_logger

RUN_FILE = "run.json"  # in the run directory, only with several ranks
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    max_steps: int | None = None
    fresh: bool = False
    source: Path | None = None  # a run directory or an exported file to start from
    timeline: bool = False  # record one
    mode: Mode = "train"
    checkpoint: str | None = None  # eval: the name of the checkpoint to evaluate; None: see `Checkpoints.choose`
    host: int = 0  # which of the hosts that have ranks
    rank: int | None = None  # serve only this rank; None: all ranks of the host


class RunNote(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingPoint:
    newest: Manifest | None  # the checkpoint; None: step 0
    run_id: str


def settle_run(
    job: Job, options: RunOptions, checkpoints: Checkpoints, directory: RunDirectory, shard: OwnShard
) -> StartingPoint:
    """Finishes what a killed run has left, and begins a new one if the options ask for it.

    `directory`: the run directory, held by this process. `shard`: the first one. Raises ConfigError if the run is
    complete, DataError if every checkpoint is damaged."""
    newest = newest_of_run(job, options, checkpoints, directory, shard)
    remove_left_tables(job)
    point = StartingPoint(newest=newest, run_id=uuid.uuid4().hex[:12] if newest is None else newest.run_id)
    if shard.count > 1:
        write_durably(job.run_dir / RUN_FILE, msgspec.json.encode(RunNote(run_id=point.run_id)) + b"\n")
    return point


def newest_of_run(
    job: Job, options: RunOptions, checkpoints: Checkpoints, directory: RunDirectory, shard: OwnShard
) -> Manifest | None:
    carry_out(checkpoints.settle())
    if options.mode == "eval":
        return checkpoints.choose(options.checkpoint)
    if options.checkpoint is not None:
        raise ConfigError("--checkpoint chooses what --eval evaluates; a run continues from its newest checkpoint")
    if options.fresh:
        carry_out(checkpoints.begin_fresh(shard))
        return first_checkpoint(job, options, checkpoints)
    refuse_finished(directory, job, options.max_steps)
    return checkpoints.newest_valid() or first_checkpoint(job, options, checkpoints)


def first_checkpoint(job: Job, options: RunOptions, checkpoints: Checkpoints) -> Manifest | None:
    if options.source is None:
        return None
    source = open_source(job, options.source)
    manifest = import_into(checkpoints, job, source)
    get_logger().info("begins with", source=str(options.source), after_train_steps=manifest.train_steps)
    return manifest


def look(
    job: Job,
    options: RunOptions,
    checkpoints: Checkpoints,
    known: Manifest | None,
    shard: OwnShard,
    given_up: Callable[[], bool],
) -> StartingPoint | None:
    """Returns what one of several ranks finds; `known`: the newest checkpoint that it has seen. None if `given_up`.

    Raises PeerLost if no run has begun within transport.connect_timeout."""
    carry_out(checkpoints.withdraw(shard))
    deadline_s = time.monotonic() + parse_seconds(job.transport.connect_timeout)
    while (note := read_note(job.run_dir)) is None:
        if given_up():
            return None
        if time.monotonic() > deadline_s:
            raise PeerLost(
                f"{job.run_dir} holds no run: the prefetchers of rank 0's host did not begin one within "
                f"{job.transport.connect_timeout}; start them with the same job file, on a folder that all hosts share"
            )
        time.sleep(POLL_S)
    if options.mode == "eval":
        newest: Manifest | None = checkpoints.choose(options.checkpoint)
    else:
        newest = checkpoints.newest_for_ranks(known)
    return StartingPoint(newest=newest, run_id=note.run_id if newest is None else newest.run_id)


def read_note(run_dir: Path) -> RunNote | None:
    """Returns the note of the run that began there, if any. Raises Unreadable."""
    try:
        return msgspec.json.decode((run_dir / RUN_FILE).read_bytes(), type=RunNote)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    except OSError as error:
        raise unreadable(run_dir / RUN_FILE, error) from None


LEAST_ROWS = 4096  # fewer rows per thread are not worth waking it for


class Tables:
    """The stores of a process, for a shard of the rows. They outlive a lost trainer: their rows are rolled back."""

    def __init__(
        self,
        job: Job,
        groups: tuple[GroupSpec, ...],
        checkpoints: Checkpoints,
        shard: OwnShard = ALONE,
    ) -> None:
        self.stores: tuple[TrackedStore, ...] = ()
        self._job = job
        self._groups = groups
        self._checkpoints = checkpoints
        self._shard = shard
        self._pool = ThreadPool(stage_threads(job), name="rows", least=LEAST_ROWS)
        # checksum of the checkpoint since which changed rows are tracked completely; None: the start of the run
        self._since: str | None = None
        self._is_known = False  # whether that is known
        no_counts = StoreCounts() if isinstance(job.store, StoreWithTier) else None
        self._counts: tuple[StoreCounts | None, ...] = (no_counts,) * len(groups)  # before and after the stores

    def place(self, job: Job, groups: tuple[GroupSpec, ...], shard: OwnShard) -> None:
        """Sets which rows belong to this process, before `restore`. `job`: with every table placed."""
        if shard != self._shard:  # a first look found an earlier run
            self.close()
            self._is_known = False
        self._groups, self._shard, self._job = groups, shard, replace(self._job, tables=job.tables)

    @property
    def folder(self) -> Path:
        """The folder for stores with files."""
        return self._job.table_folder

    @property
    def counts(self) -> tuple[StoreCounts | None, ...]:
        """The counters of each group's store; None for stores without a memory tier. Any thread."""
        stores = self.stores
        return tuple(store.store.counts() for store in stores) if len(stores) == len(self._groups) else self._counts

    def restore(self, newest: Manifest | None) -> None:
        """Sets all rows to this checkpoint's; None: to the start of the run. Raises DataError."""
        is_cut_anew_now = newest is not None and is_cut_anew(newest, self._shard)
        if not self._is_known or self._since != checksum_of(newest) or is_cut_anew_now:
            self.close()
            self._open(newest)
        elif newest is None:
            for group, store in zip(self._groups, self.stores, strict=True):
                for table in group.tables:
                    store.forget(store.changed_keys(table.index))
                store.settle()
        else:
            restore_changed(self._checkpoints.root, newest, self._groups, self.stores, self._shard)
        crash_point("tables restored")
        self._since, self._is_known = checksum_of(newest), True

    def attempt_ended(self, newest: Manifest | None, *, gave_up: bool) -> None:
        """`newest`: the newest checkpoint with these stores' rows. `gave_up`: they handed rows to a later one that was
        given up, so the set of rows changed since is unknown."""
        self._since, self._is_known = checksum_of(newest), self._is_known and not gave_up

    def begin(self, memory_rows: tuple[int, ...]) -> None:
        """See `RowStore.begin`. `memory_rows`: of each group."""
        for store, rows in zip(self.stores, memory_rows, strict=True):
            store.store.begin(rows)

    def log_counts(self) -> None:
        """Logs what each memory tier has moved, and whether it kept up."""
        log = get_logger()
        for group, counts in zip(self._groups, self.counts, strict=True):
            if counts is not None:
                log.info(
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
                    log.warning("steps may have waited for " + described([counts]), group=group.name)

    def close(self) -> None:
        self._counts = self.counts
        for store in self.stores:
            store.close()
        self.stores = ()

    def _open(self, newest: Manifest | None) -> None:
        stores = []
        try:
            for group in self._groups:
                stores.append(TrackedStore(open_row_store(self._job, group), group, self._job.job.seed))
                stores[-1].numbers.pool = self._pool
        finally:
            self.stores = tuple(stores)
        if newest is not None:
            restore_rows(self._checkpoints.root, newest, self._groups, self.stores, self._shard)
            get_logger().info("restored", train_steps=newest.train_steps)


def checksum_of(checkpoint: Manifest | None) -> str | None:
    return None if checkpoint is None else checkpoint.checksum
