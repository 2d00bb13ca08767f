"""A checkpoint at a barrier: the trainer saves the dense side, this side the rows that were ever trained, the manifest comes last."""

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save

from prefetcher.stores.base import Store
from protocol.errors import RowcastError
from protocol.job import Job
from protocol.manifest import MANIFEST_VERSION, DenseFile, Manifest, ShardFile, file_checksum, sync_folder, write_durably, write_manifest
from protocol.messages import EndOfData, Saved
from protocol.plan import BarrierPlan, StepPlan
from protocol.tables import GroupSpec

SHARD_BYTES = 64 * 2**20


class RunCheckpointer:
    """Implements `fetcher.Checkpointer` on the file system. Called by the fetcher's thread; `accept` by the mail's."""

    def __init__(self, job: Job, groups: tuple[GroupSpec, ...], stores: tuple[Store, ...], run_id: str, training_digest: str) -> None:
        self.train_steps = 0  # planned so far
        self.num_files = 0  # written so far
        self._job = job
        self._groups = groups
        self._stores = stores
        self._run_id = run_id
        self._training_digest = training_digest
        self._folder: Path | None = None
        self._saved: Saved | None = None

    def planned(self, plan: StepPlan) -> None:
        if plan.kind == "train":
            self.train_steps = plan.train_step + 1

    def accept(self, message: Saved) -> None:
        self._saved = message

    def begin(self, barrier: BarrierPlan) -> str:
        name = "step-" + f"{0 if barrier.after_step is None else barrier.after_step + 1:012d}"
        self._folder = (self._job.run_dir / "checkpoints" / name).absolute()
        try:
            if self._folder.exists():
                shutil.rmtree(self._folder)
            self._folder.mkdir(parents=True)
        except OSError as error:
            raise RowcastError(f"{self._folder}: the checkpoint's folder cannot be made ({error.strerror}); make room for it") from None
        return str(self._folder)

    def saved(self) -> bool:
        return self._saved is not None

    def finish(self, barrier: BarrierPlan) -> None:
        assert self._folder is not None, "finish comes after begin"
        assert self._saved is not None, "finish comes after saved"
        try:
            self._write(self._folder, barrier, self._saved)
        except OSError as error:
            raise RowcastError(
                f"{self._folder}: the checkpoint could not be written ({error.strerror}); free space and run again"
            ) from None
        self._saved = None

    def _write(self, folder: Path, barrier: BarrierPlan, saved: Saved) -> None:
        shards: list[ShardFile] = []
        for group, store in zip(self._groups, self._stores, strict=True):
            for shard in write_shards(folder, group, store):
                shards.append(shard)
                self.num_files += 1
        sync_folder(folder)
        manifest = Manifest(
            version=MANIFEST_VERSION,
            run_id=self._run_id,
            step=barrier.after_step,
            train_steps=self.train_steps,
            finished=barrier.finished,
            reason=barrier.reason,
            world_size=1,
            job=msgspec.to_builtins(self._job),
            training_digest=self._training_digest,
            shards=tuple(shards),
            dense=DenseFile(file=saved.file, nbytes=saved.nbytes, checksum=saved.checksum),
        )
        write_manifest(folder, manifest)
        sync_folder(folder.parent)

    def end_of_data(self, barrier: BarrierPlan) -> EndOfData:
        return EndOfData(
            last_step=barrier.after_step,
            finished=barrier.finished,
            host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )


def write_shards(folder: Path, group: GroupSpec, store: Store) -> Iterator[ShardFile]:
    """Every row of the group that was ever trained, in files of about 64 MiB."""
    block = max(1, SHARD_BYTES // (group.record_bytes + 8))
    blocks = (rows for table in group.tables for rows in store.scan(table.index, block))
    for number, (keys, records) in enumerate(blocks):
        name = f"{group.name}-{number:05d}.safetensors"
        write_durably(folder / name, save({"keys": keys, "records": np.ascontiguousarray(records)}))
        nbytes, checksum = file_checksum(folder / name)
        yield ShardFile(
            group=group.name,
            file=name,
            first_key=int(keys[0]),
            last_key=int(keys[-1]),
            num_rows=len(keys),
            nbytes=nbytes,
            checksum=checksum,
        )
