"""Opens one store per group and restores their rows from a checkpoint."""

from pathlib import Path

from msgspec.structs import replace

from rowcast.job.schema import Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.restore import ALONE, OwnShard, is_cut_anew, restore_changed, restore_rows
from rowcast.prefetcher.run.sizing import stage_threads
from rowcast.prefetcher.stores.store import StoreCounts, described
from rowcast.prefetcher.stores.tracked_store import TrackedStore, open_row_store
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.stages import ThreadPool
from rowcast.runtime.telemetry.logs import get_logger

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
        """Says which rows are of this process, before `restore`. `job`: with every table placed."""
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
