"""`prefetcher import`: a run directory with one checkpoint, at which nothing was trained, from a file as `prefetcher export` writes it.

embedding_bags.<table>.weight     required, f32 [num_embeddings, embedding_dim]
optimizer.<table>.<state>         row state; what is missing has its initial value
<name>                            dense weights, as the model names them; what the file has not the model makes
"""

import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from prefetcher.checkpoints.folder import Checkpoints
from prefetcher.checkpoints.tensors import PlacedTensor, TensorSpec, make_header, read_blocks, read_header
from prefetcher.checkpoints.writer import CheckpointWriter
from prefetcher.export import MODEL, part_name, table_tensors
from prefetcher.readers.base import open_reader
from prefetcher.stores.base import Keys, Records
from prefetcher.stores.initializer import first_records
from protocol.disk import RealDisk
from protocol.errors import ConfigError, DataError
from protocol.job import Job
from protocol.manifest import Manifest
from protocol.position import Position
from protocol.rundir import RunDirectory
from protocol.tables import GroupSpec, TableSpec, group_specs, make_keys

BLOCK_ROWS = 65536
OF_TABLES = ("embedding_bags.", "optimizer.")  # how names of rows and their state begin
REASON = "import"


def import_run(job: Job, source: Path, *, fresh: bool) -> Manifest:
    """Makes the checkpoint. Raises ConfigError where the file does not fit the job, or the directory holds a run already."""
    exported = ExportedFile(source)
    exported.check(group_specs(job))
    digest = job.training_digest(open_reader(job).file_sizes)
    with RunDirectory(job.run_dir, "prefetcher") as directory:
        checkpoints = Checkpoints(job.run_dir, RealDisk())
        if fresh:
            directory.remove_run()
        elif checkpoints.candidates():
            raise ConfigError(f"{job.run_dir} holds a checkpoint; add --fresh to give it up, or set another job.run_dir")
        writer = CheckpointWriter(job, group_specs(job), uuid.uuid4().hex[:12], digest, checkpoints, None, keep=1)
        writer.begin(Position(), finished=False, reason=REASON)
        offer_rows(writer, job, exported)
        writer.finish(offer_dense(writer, exported))
        while writer.busy:
            writer.advance()
    assert writer.newest is not None, "a checkpoint was written"
    return writer.newest


class ExportedFile:
    """Raises ConfigError where there is none, DataError where it is something else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._tensors = read_header(path)
        except OSError as error:
            raise ConfigError(f"--from {path} cannot be read ({error.strerror}); name a file that `prefetcher export` wrote") from None

    @property
    def dense(self) -> dict[str, PlacedTensor]:
        return {name: tensor for name, tensor in self._tensors.items() if not name.startswith(OF_TABLES)}

    def check(self, groups: tuple[GroupSpec, ...]) -> None:
        """Raises ConfigError for the first tensor of tables that is missing, superfluous or of another shape."""
        expected = table_tensors(groups)
        for name, spec in expected.items():
            self._check_tensor(name, spec)
        for name in self._tensors:
            if name.startswith(OF_TABLES) and name not in expected:
                raise ConfigError(f"{self._path}: the job file has nothing for {name}; add its table, or the optimizer that has this state")

    def _check_tensor(self, name: str, spec: TensorSpec) -> None:
        found = self._tensors.get(name)
        if found is None:
            if name.startswith("embedding_bags."):
                raise ConfigError(f"{self._path}: {name} is missing; take its table out of the job file, or name a file that has it")
        elif (found.dtype, found.shape) != (spec.dtype, spec.shape):
            raise ConfigError(
                f"{self._path}: {name} is {found.dtype} {list(found.shape)}, but the job file needs {spec.dtype} {list(spec.shape)}; "
                f"change num_embeddings, embedding_dim or optimizer.sparse"
            )

    def rows(self, group: GroupSpec, table: TableSpec, seed: int) -> Iterator[tuple[Keys, Records]]:
        """The rows, in blocks, that are not what they would be without a checkpoint."""
        places = [(part, self._tensors[name]) for part in group.parts if (name := part_name(table, part.name)) in self._tensors]
        with self._path.open("rb") as file:
            for first in range(0, table.num_embeddings, BLOCK_ROWS):
                keys = make_keys(table.index, np.arange(first, min(first + BLOCK_ROWS, table.num_embeddings), dtype=np.int64))
                initial = first_records(group, seed, keys)
                records = initial.copy()
                for part, tensor in places:
                    file.seek(tensor.start + 4 * part.width * first)
                    values = self._floats(file.read(4 * part.width * len(keys)), len(keys), part.width)
                    records.view(np.float32)[:, part.offset : part.offset + part.width] = values
                changed = (records != initial).any(axis=1)
                if changed.any():
                    yield keys[changed], records[changed]

    def _floats(self, content: bytes, rows: int, width: int) -> npt.NDArray[np.float32]:
        if len(content) < 4 * rows * width:
            raise DataError(f"{self._path}: the file became shorter while it was read")
        return np.frombuffer(content, np.float32).reshape(rows, width)

    def dense_content(self) -> Iterator[bytes]:
        """The dense side of a checkpoint, as a safetensors file in pieces."""
        dense = self.dense
        header, _ = make_header({f"{MODEL}{name}": tensor for name, tensor in dense.items()})
        yield header
        with self._path.open("rb") as file:
            for tensor in dense.values():
                yield from read_blocks(file, tensor)


def offer_rows(writer: CheckpointWriter, job: Job, exported: ExportedFile) -> None:
    for index, group in enumerate(group_specs(job)):
        for table in group.tables:
            for keys, records in exported.rows(group, table, job.job.seed):
                while not writer.offer(index, keys, records):
                    writer.advance()


def offer_dense(writer: CheckpointWriter, exported: ExportedFile) -> str | None:
    """Returns the checksum; None where the file has no dense weights."""
    if not exported.dense:
        return None
    hasher = xxhash.xxh3_64()
    for content in exported.dense_content():
        hasher.update(content)
        while not writer.offer_dense(content):
            writer.advance()
    return hasher.hexdigest()
