"""What a checkpoint takes at a barrier: copies, so that training goes on while they become durable.

fetcher's thread       begin -> collect: rows that changed ------> writer (a stage of its own) -> files, manifest
write-back's thread             dense: pieces of the trainer's ->
"""

from collections.abc import Iterator

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.checkpoints.writer import CheckpointWriter
from rowcast.prefetcher.pipeline.fetcher import PlannedBarrier
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.messages import Saved
from rowcast.runtime.crash_points import crash_point

BLOCK_BYTES = 8 * 2**20

Block = tuple[int, Keys, Records]  # group


class BarrierCheckpointer:
    """Implements `fetcher.Checkpointer`. The queue of the writer bounds what is copied and not yet written; a barrier waits for it."""

    def __init__(
        self, groups: tuple[GroupSpec, ...], stores: tuple[TrackedStore, ...], writer: CheckpointWriter
    ) -> None:
        self._groups = groups
        self._stores = stores
        self._writer = writer
        self._blocks: Iterator[Block] = iter(())
        self._waiting: Block | None = None  # copied, and there was no room for it
        self._rows_collected = self._collected = False

    @property
    def busy(self) -> bool:
        return self._writer.busy

    def begin(self, barrier: PlannedBarrier) -> bool:
        newest = self._writer.newest
        if newest is not None and newest.position == barrier.position:
            return False
        if newest is None and not barrier.position.step and not barrier.plan.finished:
            return False  # stopped before anything was trained: nothing is worth the place of an earlier run
        self._writer.begin(barrier.position, finished=barrier.plan.finished, reason=barrier.plan.reason)
        self._blocks, self._rows_collected, self._collected = self._changed(), False, False
        return True

    def collect(self) -> bool:
        crash_point("rows not collected")
        self._waiting = self._waiting or next(self._blocks, None)
        while self._waiting is not None:
            if not self._writer.offer(*self._waiting):
                return False
            self._waiting = next(self._blocks, None)
        crash_point("rows collected")
        self._rows_collected = True
        return True

    def dense(self, message: Saved, content: bytes) -> bool:
        if not self._rows_collected or not self._writer.offer_dense(content):
            return False
        crash_point("dense piece taken")
        if message.piece == message.num_pieces - 1:
            for store in self._stores:
                store.settle()
            self._writer.finish(f"{message.checksum:016x}")
            self._collected = True
        return True

    def collected(self) -> bool:
        return self._collected

    def _changed(self) -> Iterator[Block]:
        for index, (group, store) in enumerate(zip(self._groups, self._stores, strict=True)):
            for table in group.tables:
                for keys, records in store.changed_rows(table.index, max(1, BLOCK_BYTES // group.record_bytes)):
                    yield index, keys, records


class NoCheckpoints:
    """Implements `fetcher.Checkpointer` for a run that trains nothing."""

    busy = False

    def begin(self, barrier: PlannedBarrier) -> bool:
        return False

    def collect(self) -> bool:
        return True

    def dense(self, message: Saved, content: bytes) -> bool:
        raise AssertionError("a dense side comes only where a barrier has begun a checkpoint")

    def collected(self) -> bool:
        return True
