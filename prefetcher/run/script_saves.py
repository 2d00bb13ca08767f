"""Writes the checkpoints of a training script that saves itself, with the writer of job runs.

write-back's thread    take: all rows before are in the stores | changed rows are frozen, the model state is queued
checkpoint's thread    advance: files, manifest, old ones go   | Answer
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.snapshot import collected
from rowcast.prefetcher.checkpoints.tensor_files import BLOCK_BYTES
from rowcast.prefetcher.checkpoints.writer import CheckpointWriter
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.messages import Answer, Save
from rowcast.protocol.script_setup import SaveRequest
from rowcast.runtime.checkpoint_manifest import Manifest, Position
from rowcast.runtime.disk import Disk
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.stages import POLL_S


class ScriptWriter(CheckpointWriter):
    def __init__(self, job: Job, groups: tuple[GroupSpec, ...], request: SaveRequest) -> None:
        checkpoints = Checkpoints(Path(request.folder), Disk())
        newest = next((own for own in known(checkpoints) if own.checksum == request.after), None)
        super().__init__(job, groups, request.run_id, None, checkpoints, newest, request.keep)
        self.request = request

    def content(self) -> dict[str, Any]:
        return {"job": {}, "script": self.request.script}


def known(checkpoints: Checkpoints) -> list[Manifest]:
    return [own for name in checkpoints.candidates() if (own := checkpoints.readable(name)) is not None]


class ScriptSaves:
    def __init__(
        self, job: Job, groups: tuple[GroupSpec, ...], stores: tuple[TrackedStore, ...], send: Callable[[Answer], None]
    ) -> None:
        self.wake: Callable[[], None] = lambda: None  # of the checkpoint's thread
        self._job, self._groups, self._stores, self._send = job, groups, stores, send
        self._locked = ExitStack()
        self._saving: tuple[Save, CheckpointWriter] | None = None

    def take(self, message: Save) -> None:
        """Raises RowcastError."""
        while self._saving is not None:  # an interrupt has ended the script's wait for the last one
            time.sleep(POLL_S)
        if not message.request:
            for store in self._stores:
                store.settle()
            return
        request = msgspec.json.decode(message.request, type=SaveRequest)
        self._locked.close()
        self._locked.enter_context(RunDirectory(Path(request.folder), "prefetcher"))
        writer = ScriptWriter(self._job, self._groups, request)
        writer.begin(Position(step=request.step, train_step=request.step), finished=False, reason="rowcast.save")
        self._saving = message, writer
        self.wake()
        hasher = xxhash.xxh3_64()
        with Path(request.objects).open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                hasher.update(block)
                while self._saving is not None and not writer.offer_dense(block):
                    time.sleep(POLL_S)
        frozen = [store.freeze(1.0) for store in self._stores]
        writer.finish(hasher.hexdigest(), collected(self._stores, frozen))
        self.wake()

    def advance(self) -> bool:
        if self._saving is None:
            return False
        message, writer = self._saving
        try:
            progress = writer.advance()
        except BaseException:
            self._saving = None  # nobody waits for room
            raise
        if not writer.busy:
            self._saving = None
            self._send(Answer(number=message.number, records=b""))
        return progress

    def close(self) -> None:
        self._locked.close()
