"""Copies rows and model state at a barrier, so that training continues while the copies become durable.

fetcher's thread       begin -> copy_rows: changed rows ------------> writer (a stage of its own) -> files, manifest
write-back's thread             take_dense: the model state's pieces ->
"""

from collections.abc import Iterator

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.checkpoints.writer import CheckpointWriter
from rowcast.prefetcher.pipeline.plan_stream import PlannedBarrier
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.messages import Saved
from rowcast.runtime.crash_points import crash_point

BLOCK_BYTES = 8 * 2**20

Block = tuple[int, Keys, Records]  # group


class BarrierCheckpointer:
    """Implements `barrier.Checkpointer`. The writer's queue bounds what is copied but not written; a barrier waits
    for it."""

    def __init__(
        self, groups: tuple[GroupSpec, ...], stores: tuple[TrackedStore, ...], writer: CheckpointWriter
    ) -> None:
        self._groups = groups
        self._stores = stores
        self._writer = writer
        self._blocks: Iterator[Block] = iter(())
        self._waiting: Block | None = None  # copied, but the writer had no room for it

    @property
    def busy(self) -> bool:
        return self._writer.busy

    def begin(self, barrier: PlannedBarrier) -> bool:
        newest = self._writer.newest
        if newest is not None and newest.position == barrier.position:
            return False
        if newest is None and not barrier.position.step and not barrier.plan.finished:
            return False  # stopped before any training: this must not replace an earlier run
        self._writer.begin(barrier.position, finished=barrier.plan.finished, reason=barrier.plan.reason)
        self._blocks = self._changed()
        return True

    def copy_rows(self) -> bool:
        crash_point("rows not collected")
        self._waiting = self._waiting or next(self._blocks, None)
        while self._waiting is not None:
            if not self._writer.offer(*self._waiting):
                return False
            self._waiting = next(self._blocks, None)
        crash_point("rows collected")
        return True

    def take_dense(self, message: Saved, content: bytes) -> bool:
        if not self._writer.offer_dense(content):
            return False
        crash_point("dense piece taken")
        if message.piece == message.num_pieces - 1:
            for store in self._stores:
                store.settle()
            self._writer.finish(f"{message.checksum:016x}")
        return True

    def _changed(self) -> Iterator[Block]:
        for index, (group, store) in enumerate(zip(self._groups, self._stores, strict=True)):
            for table in group.tables:
                for keys, records in store.changed_rows(table.index, max(1, BLOCK_BYTES // group.record_bytes)):
                    yield index, keys, records


class NoCheckpoints:
    """Implements `barrier.Checkpointer` for a run that trains nothing."""

    busy = False

    def begin(self, barrier: PlannedBarrier) -> bool:
        return False

    def copy_rows(self) -> bool:
        raise AssertionError("no barrier has started a checkpoint")

    def take_dense(self, message: Saved, content: bytes) -> bool:
        raise AssertionError("no barrier has started a checkpoint")
