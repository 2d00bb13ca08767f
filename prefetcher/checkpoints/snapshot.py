"""Freezes changed rows and copies the model state at a barrier, so that training continues while both become durable.

fetcher's thread       begin
write-back's thread      take_dense: the model state's pieces ----> writer (a separate stage) -> files, manifest
                         with the last piece: freeze    frozen rows ->
"""

from collections.abc import Iterator

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.checkpoints.writer import CheckpointWriter, RowBlock
from rowcast.prefetcher.pipeline.fetcher import PlannedBarrier
from rowcast.prefetcher.stores.frozen_rows import FrozenRows
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.messages import Replica, Saved
from rowcast.runtime.crash_points import crash_point

BLOCK_BYTES = 8 * 2**20
NUMBER_BYTES = 8  # per row set aside, beside its record


class BarrierCheckpointer:
    """Implements `barrier.Checkpointer`."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        stores: tuple[TrackedStore, ...],
        writer: CheckpointWriter,
        aside_bytes: int,
    ) -> None:
        """`aside_bytes`: the most memory for copies of overwritten frozen rows, until they are collected."""
        self._groups = groups
        self._stores = stores
        self._writer = writer
        self._aside_bytes = aside_bytes

    @property
    def busy(self) -> bool:
        return self._writer.busy

    def begin(self, barrier: PlannedBarrier) -> bool:
        newest = self._writer.newest
        if newest is not None and newest.position == barrier.position:
            return False
        if newest is None and not barrier.position.step and not barrier.plan.finished:
            return False  # stopped before any training: this must not replace an earlier run
        self._writer.begin(
            barrier.position, finished=barrier.plan.finished, reason=barrier.plan.reason, ahead=barrier.ahead
        )
        return True

    def take_dense(self, message: Saved | Replica, content: bytes) -> bool:
        is_last = isinstance(message, Replica) or message.piece == message.num_pieces - 1
        if isinstance(message, Saved) and not self._writer.offer_dense(content):
            return False
        crash_point("dense piece taken")
        if is_last:
            is_best = isinstance(message, Saved) and message.is_best
            self._writer.finish(f"{message.checksum:016x}", collected(self._stores, self._freeze()), is_best=is_best)
        return True

    def _freeze(self) -> list[FrozenRows]:
        pairs = zip(self._groups, self._stores, strict=True)
        needed_bytes = sum(store.num_changed * (group.record_bytes + NUMBER_BYTES) for group, store in pairs)
        share = min(1.0, self._aside_bytes / max(1, needed_bytes))
        return [store.freeze(share) for store in self._stores]


def collected(stores: tuple[TrackedStore, ...], frozen: list[FrozenRows]) -> Iterator[RowBlock]:
    """Yields frozen rows on the writer's thread."""
    crash_point("rows not collected")
    for index, (store, rows) in enumerate(zip(stores, frozen, strict=True)):
        for keys, records in rows.blocks(BLOCK_BYTES):
            yield (index, keys, records)
        store.thaw()
    crash_point("rows collected")


class NoCheckpoints:
    """Implements `barrier.Checkpointer` for a run that trains nothing."""

    busy = False

    def begin(self, barrier: PlannedBarrier) -> bool:
        return False

    def take_dense(self, message: Saved | Replica, content: bytes) -> bool:
        raise AssertionError("no barrier has started a checkpoint")
