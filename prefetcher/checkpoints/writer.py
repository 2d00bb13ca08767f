"""Freezes changed rows and copies the model state at a barrier, and makes both durable while training continues.

fetcher's thread      begin
write-back's thread            take_dense: offer_dense ... offer_dense  freeze  finish
                                 v  at most QUEUE_BYTES wait
checkpoint's thread   folder | dense file | row files | merge of older layers, if many | manifest | drop old ones
                                                                                              ^ it exists from here on
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, groups_at
from rowcast.prefetcher.checkpoints.commit import Abandoned, await_manifest, gather_shards, publish, write_shard_file
from rowcast.prefetcher.checkpoints.folder import IMPORT, Checkpoints, softly
from rowcast.prefetcher.checkpoints.restore import ALONE, OwnShard, saved_rows
from rowcast.prefetcher.checkpoints.row_files import (
    HashingWriter,
    RowFiles,
    Steps,
    by_age,
    layers_of,
    must_merge,
    new_path,
)
from rowcast.prefetcher.pipeline.fetcher import PlannedBarrier
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.prefetcher.stores.tracked_store import FrozenRows, TrackedStore
from rowcast.protocol.messages import Replica, Saved
from rowcast.runtime.checkpoint_manifest import (
    MANIFEST_VERSION,
    SHARD_VERSION,
    BatchChecksum,
    DenseFile,
    IdType,
    Manifest,
    Position,
    RowFile,
    RowLayer,
    ShardFile,
    ShardLayers,
    TrainingData,
    folder_name,
    run_of,
)
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.disk import seal
from rowcast.runtime.errors import RowcastError, advice
from rowcast.runtime.machine import UNRECORDED, Machine

QUEUE_BYTES = 256 * 2**20

RowBlock = tuple[int, Keys, Records]  # a group's index, and rows of it


class CompleteState(NamedTuple):
    """The last item of the queue."""

    dense_checksum: str | None  # xxh3_64 of all dense pieces; None if there are none
    rows: Iterable[RowBlock]  # read as they are written
    is_best: bool  # see `Saved`


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointStart:
    position: Position
    finished: bool
    reason: str
    ahead: tuple[BatchChecksum, ...]
    began_s: float


class CheckpointWriter:
    """A stage: its thread calls `advance`; others call `begin`, `offer_dense`, `finish` and `abandon`, one at a
    time."""

    def __init__(
        self,
        job: Job,
        groups: tuple[GroupSpec, ...],
        run_id: str,
        trained_on: TrainingData | None,
        checkpoints: Checkpoints,
        newest: Manifest | None,
        keep: int,
        on_durable: Callable[[float, int], None] = lambda seconds, nbytes: None,
        shard: OwnShard = ALONE,
    ) -> None:
        """`newest`: the checkpoint that the run continues from; the next one adds to its layers. `keep`: how many
        checkpoints to keep. `on_durable` gets each checkpoint's seconds from `begin` until durable, and its written
        bytes. `shard`: the one of these rows; several shards write one checkpoint."""
        assert keep >= 1, f"keep = {keep}: the newest checkpoint always stays"
        self.newest = newest
        self.on_offer: Callable[[], None] = lambda: None  # called when `advance` has something to do
        # that computes the run, once its trainer has connected
        self.machine: Callable[[], Machine] = lambda: UNRECORDED
        self.id_types: dict[str, IdType] = {}
        # the data that the steps before a position have read
        self.trained_on: Callable[[Position], TrainingData | None] = lambda position: trained_on
        self.work = 0  # grows with progress
        self.num_files = 0  # written for the last checkpoint, including a merge's
        self.bytes_written = 0  # of the last checkpoint, to those files
        self.seconds = 0.0  # of the last checkpoint, from `begin` until it was durable
        self.gave_up = False  # a checkpoint was not completed although its rows were handed over
        self._job = job
        self._groups = groups
        self._run_id = run_id
        self._checkpoints = checkpoints
        self._disk = checkpoints.disk
        self._keep = keep
        self._on_durable = on_durable
        self._shard = shard
        # of one thread that puts and one that takes: each counter has one writer, and a deque needs no lock
        self._queue = deque[bytes | CompleteState]()
        self._put_bytes = self._taken_bytes = 0
        self._work: Steps | None = None
        self._cleared = self._complete = self._abandoned = self._attempt_is_over = False

    @property
    def busy(self) -> bool:
        """Whether it is making a checkpoint, or removing old ones after it."""
        return self._work is not None

    def begin(self, position: Position, finished: bool, reason: str, ahead: tuple[BatchChecksum, ...] = ()) -> None:
        """`ahead`: of the batches after the checkpoint, as far as they are known."""
        assert not self.busy, f"a checkpoint at step {position.step} begins while another is being written"
        self._complete = self._abandoned = self._attempt_is_over = False
        self._queue.clear()
        self._put_bytes = self._taken_bytes = 0
        self._work = self._make(
            CheckpointStart(
                position=position, finished=finished, reason=reason, ahead=ahead, began_s=time.perf_counter()
            )
        )
        self.on_offer()

    def offer_dense(self, content: bytes) -> bool:
        """Queues the next piece of the dense safetensors file. Returns False while QUEUE_BYTES are waiting: try
        again. A larger piece is accepted when nothing waits."""
        waiting = self._put_bytes - self._taken_bytes
        if waiting and waiting + len(content) > QUEUE_BYTES:
            return False
        self._put_bytes += len(content)
        self._put(content)
        return True

    def finish(self, dense_checksum: str | None, rows: Iterable[RowBlock], *, is_best: bool = False) -> None:
        """Ends the checkpoint. The dense file must have this xxh3_64 (16 hex digits); None: it has no dense file.

        `rows`: rows of the shard that changed since the newest checkpoint, groups in order, keys ascending within a
        group. `advance` reads them as it writes; the writer owns their arrays. With several shards, the checksum is of
        the model state of the shard's trainer."""
        self._put(CompleteState(dense_checksum, rows, is_best))
        self._complete = True

    def abandon(self) -> None:
        """Gives up the checkpoint in progress unless `finish` was called. Gives up one that waits for other ranks once
        they write nothing for GIVE_UP_S. Either way, wait until not `busy`."""
        self._abandoned = self.busy and not self._complete
        self._attempt_is_over = self.busy

    def advance(self) -> bool:
        """Writes a little. Raises RowcastError if the disk fails; the run must end then."""
        if self._work is None:
            return False
        try:
            progress = next(self._work)
            self.work += progress
            return progress
        except Abandoned:
            self._work, self.gave_up = None, self._complete
            return True
        except StopIteration:
            self._work = None
            return True

    def _put(self, item: bytes | CompleteState) -> None:
        assert self.busy, "the model state must be offered after begin"
        assert not self._complete, "nothing may be offered after finish"
        self._queue.append(item)
        self.on_offer()

    def _take(self) -> bytes | CompleteState | None:
        if not self._queue:
            return None
        item = self._queue.popleft()
        if isinstance(item, bytes):
            self._taken_bytes += len(item)
        return item

    def _make(self, start: CheckpointStart) -> Steps:
        folder = self._checkpoints.root / folder_name(start.position)
        if not self._cleared:  # before the first checkpoint: files left by a crash take room
            self._cleared = yield from softly(self._checkpoints.collect_garbage(self._run_id, self._shard, folder.name))
        try:
            manifest = yield from self._write(start, folder)
            if start.reason != IMPORT and self._shard.number == 0:
                yield from self._checkpoints.take_over()
        except OSError as error:
            change = advice(error.errno, "let this user write there")
            raise RowcastError(
                f"{folder}: the checkpoint could not be written ({error.strerror}); {change}, and run again"
            ) from None
        self.newest, self.seconds = manifest, time.perf_counter() - start.began_s
        self._on_durable(self.seconds, self.bytes_written)
        crash_point("manifest durable")
        if self._shard.number == 0:
            yield from softly(self._checkpoints.keep(self._keep, manifest, self._shard))

    def _write(self, start: CheckpointStart, folder: Path) -> Generator[bool, None, Manifest]:
        replaced = self._checkpoints.readable(folder.name)
        if (run_id := run_of(folder)) not in (None, self._run_id):
            raise RowcastError(
                f"{folder} holds a checkpoint of run {run_id or '(unreadable)'}, which that of run {self._run_id} "
                "would replace; move that folder elsewhere and start again"
            )
        yield from self._make_folder(folder)
        dense, complete = yield from self._receive(folder)
        model_state, blocks = complete.dense_checksum, complete.rows
        rows = RowFiles(self._disk, folder, self._shard.tag)
        for index, keys, records in blocks:
            yield from rows.add(self._groups[index], keys, records)
            yield True
        yield from rows.flush()
        shard = ShardLayers(layers=(yield from self._layers(rows.files, folder)), ahead=start.ahead)
        yield from self._sync_folders(folder)
        self._count([*rows.files, *(file for layer in shard.layers for file in layer.files), dense], folder)
        if self._shard.count == 1:
            manifest = self._manifest(start, (shard,), dense, complete)
            yield from publish(self._disk, folder, manifest)
            return manifest
        assert model_state is not None, "the trainer of each rank says what model state it has"
        own = self._shard_file(start, shard, model_state)
        if self._shard.number:
            yield from write_shard_file(self._disk, folder, own)
            look = partial(self._checkpoints.committed, folder.name, replaced)
            manifest = yield from await_manifest(look, folder, own, lambda: self._attempt_is_over)
            self._checkpoints.taken_over()
            return manifest
        found = yield from gather_shards(self._disk, folder, own, lambda: self._attempt_is_over)
        manifest = self._manifest(start, tuple(file.shard for file in found), dense, complete)
        yield from publish(self._disk, folder, manifest)
        return manifest

    def _manifest(
        self, start: CheckpointStart, shards: tuple[ShardLayers, ...], dense: DenseFile | None, complete: CompleteState
    ) -> Manifest:
        best, forgot = ("", 0) if self.newest is None else (self.newest.best, self.newest.forgot)
        best = folder_name(start.position) if complete.is_best else best
        return seal(
            Manifest(
                version=MANIFEST_VERSION,
                run_id=self._run_id,
                position=start.position,
                finished=start.finished,
                reason=start.reason,
                trained_on=self.trained_on(start.position),
                shards=shards,
                points=self._shard.points,
                block_bits=self._shard.block_bits,
                dense=dense,
                machine=self.machine(),
                best=best if self._job.eval.keep == "best" else "",
                id_types=self.id_types,
                forgot=forgot,
                **self.content(),
            )
        )

    def content(self) -> dict[str, Any]:
        """Returns the manifest's fields about the tables."""
        return {"job": self._job.content()}

    def _shard_file(self, start: CheckpointStart, shard: ShardLayers, model_state: str) -> ShardFile:
        return seal(
            ShardFile(
                version=SHARD_VERSION,
                number=self._shard.number,
                count=self._shard.count,
                run_id=self._run_id,
                position=start.position,
                after=self._after,
                model_state=model_state,
                shard=shard,
            )
        )

    def _make_folder(self, folder: Path) -> Steps:
        """Makes the folder, which may exist: from the newest checkpoint at the same step, or from a crash."""
        for path in (folder.parent, folder):
            if not path.exists():
                with suppress(FileExistsError):  # another rank was faster
                    self._disk.mkdir(path)
                yield True

    def _sync_folders(self, folder: Path) -> Steps:
        for path in (folder, folder.parent, folder.parent.parent):
            self._disk.sync_folder(path)
            yield True

    def _receive(self, folder: Path) -> Generator[bool, None, tuple[DenseFile | None, CompleteState]]:
        """Writes the dense file. Returns it and what `finish` was given. Only rank 0 gets pieces of a dense file."""
        path = new_path(folder, "dense", count())
        with ExitStack() as stack:
            dense: HashingWriter | None = None
            while not isinstance(item := self._take(), CompleteState):
                if self._abandoned:
                    raise Abandoned
                if item is None:
                    yield False
                else:
                    dense = dense or stack.enter_context(closing(HashingWriter(self._disk, path)))
                    dense.write(item)
                    yield True
            if dense is None:
                assert item.dense_checksum is None or self._shard.number, (
                    f"no dense piece came, but its checksum {item.dense_checksum}"
                )
                return None, item
            dense.sync()
            crash_point("dense file synced")
            yield True
        if dense.checksum != item.dense_checksum:
            raise RowcastError(
                f"{path}: the model state arrived with checksum {dense.checksum}, "
                f"but the trainer sent {item.dense_checksum}"
            )
        file = DenseFile(file=f"{folder.name}/{path.name}", nbytes=dense.nbytes, checksum=dense.checksum)
        return file, item

    def _layers(self, written: list[RowFile], folder: Path) -> Generator[bool, None, tuple[RowLayer, ...]]:
        """Returns the layers of the shard. What was just written stays the newest; only older layers are merged."""
        parts = () if self.newest is None else tuple(self._shard.parts_of(self.newest))
        older = tuple(layer for part in parts for layer in part.layers)
        is_divided_anew = any(part.held != self._shard for part in parts)
        if is_divided_anew or (written and older and must_merge(older)):
            merged: list[RowLayer] = []
            for layers in by_age(older):
                is_one = len(layers) == 1 and not is_divided_anew
                merged.append(layers[0] if is_one else (yield from self._merge(layers, folder)))
            older = tuple(merged)
        return layers_of(older, written, self._after)

    def _merge(self, layers: tuple[RowLayer, ...], folder: Path) -> Generator[bool, None, RowLayer]:
        one, root = RowFiles(self._disk, folder, self._shard.tag), self._checkpoints.root
        saved = () if self.newest is None else groups_at(self._job, self.newest.points)
        for group in self._groups:
            for rows in saved_rows(root, group, saved, layers):
                yield from one.add(group, *self._shard.owned(group, rows))
                crash_point("merging")
                yield True
        yield from one.flush()
        num_rows = sum(file.num_rows for file in one.files)
        return RowLayer(kind="delta", num_rows=num_rows, files=tuple(one.files), until=layers[0].until)

    @property
    def _after(self) -> str:
        return "" if self.newest is None else self.newest.checksum

    def _count(self, files: list[RowFile | DenseFile | None], folder: Path) -> None:
        new = {file.file: file.nbytes for file in files if file is not None and file.file.startswith(f"{folder.name}/")}
        self.num_files, self.bytes_written = len(new), sum(new.values())


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
