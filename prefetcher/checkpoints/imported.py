"""`prefetcher import`: a run directory with one checkpoint, at which nothing was trained, from a file as `prefetcher export` writes it.

embedding_bags.<table>.weight     required, f32, f16 or bf16 [num_embeddings, embedding_dim]; as the table's dtype, rounded if it must be
optimizer.<table>.master          weights before rounding; where they are missing, those of the line above, as the file has them
optimizer.<table>.<state>         row state; what is missing has its initial value
<name>                            dense weights, as the model names them; what the file has not the model makes
"""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import xxhash

from prefetcher.checkpoints.folder import Checkpoints
from prefetcher.checkpoints.tensors import PlacedTensor, TensorSpec, make_header, read_blocks, read_header
from prefetcher.checkpoints.writer import CheckpointWriter
from prefetcher.export import DTYPES, MODEL, part_name, table_tensors
from prefetcher.readers.base import open_reader
from prefetcher.stores.base import Keys, Records
from prefetcher.stores.elements import ELEMENTS, Elements, elements_of, rounded, widened
from prefetcher.stores.initializer import first_records
from protocol.disk import RealDisk
from protocol.errors import ConfigError, DataError
from protocol.job import LARGEST, Job, RowType
from protocol.manifest import Manifest
from protocol.position import Position
from protocol.rundir import RunDirectory
from protocol.tables import GroupSpec, RecordPart, TableSpec, group_specs, make_keys

BLOCK_ROWS = 65536
OF_TABLES = ("embedding_bags.", "optimizer.")  # how names of rows and their state begin
REASON = "import"
ROW_TYPES: dict[str, RowType] = {words: dtype for dtype, words in DTYPES.items()}


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
        for group in groups:
            for table in group.tables:
                self._check_range(part_name(table, "weight"), table.dtype)

    def _check_tensor(self, name: str, spec: TensorSpec) -> None:
        found = self._tensors.get(name)
        if found is None:
            if name.startswith("embedding_bags."):
                raise ConfigError(f"{self._path}: {name} is missing; take its table out of the job file, or name a file that has it")
        elif found.shape != spec.shape or not may_become(found.dtype, spec.dtype, name):
            raise ConfigError(
                f"{self._path}: {name} is {found.dtype} {list(found.shape)}, but the job file needs {spec.dtype} {list(spec.shape)}; "
                f"change num_embeddings, embedding_dim, dtype or optimizer.sparse"
            )

    def _check_range(self, name: str, dtype: RowType) -> None:
        """Raises ConfigError where rounding would make an infinity of a weight."""
        tensor = self._tensors[name]
        if dtype == "fp32" or tensor.dtype == DTYPES[dtype]:
            return
        with self._path.open("rb") as file:
            for block in read_blocks(file, tensor):
                values = widened(np.frombuffer(block, ELEMENTS[ROW_TYPES[tensor.dtype]]), ROW_TYPES[tensor.dtype])
                if (np.isfinite(values) & (np.abs(values) > LARGEST[dtype])).any():
                    raise ConfigError(f"{self._path}: {name} has values beyond {LARGEST[dtype]:.6g}, where {dtype} ends; set another dtype")

    def rows(self, group: GroupSpec, table: TableSpec, seed: int) -> Iterator[tuple[Keys, Records]]:
        """The rows, in blocks, that are not what they would be without a checkpoint."""
        places = [(part, tensor) for part in group.parts if (tensor := self._source(table, part)) is not None]
        with self._path.open("rb") as file:
            for first in range(0, table.num_embeddings, BLOCK_ROWS):
                keys = make_keys(table.index, np.arange(first, min(first + BLOCK_ROWS, table.num_embeddings), dtype=np.int64))
                initial = first_records(group, seed, keys)
                records = initial.copy()
                for part, tensor in places:
                    found = self._read(file, tensor, first, len(keys))
                    elements_of(records, part)[:] = converted(found, ROW_TYPES[tensor.dtype], part.dtype)
                changed = (records != initial).any(axis=1)
                if changed.any():
                    yield keys[changed], records[changed]

    def _source(self, table: TableSpec, part: RecordPart) -> PlacedTensor | None:
        """What a part is read from; None: nothing, it keeps its first value."""
        found = self._tensors.get(part_name(table, part.name))
        return self._tensors[part_name(table, "weight")] if found is None and part.name == "master" else found

    def _read(self, file: IO[bytes], tensor: PlacedTensor, first: int, rows: int) -> Elements:
        """`rows` rows of a tensor, from row `first` on."""
        row_bytes = tensor.nbytes // tensor.shape[0]
        file.seek(tensor.start + first * row_bytes)
        content = file.read(rows * row_bytes)
        if len(content) < rows * row_bytes:
            raise DataError(f"{self._path}: the file became shorter while it was read")
        elements: Elements = np.frombuffer(content, ELEMENTS[ROW_TYPES[tensor.dtype]]).reshape(rows, -1)
        return elements

    def dense_content(self) -> Iterator[bytes]:
        """The dense side of a checkpoint, as a safetensors file in pieces."""
        dense = self.dense
        header, _ = make_header({f"{MODEL}{name}": tensor for name, tensor in dense.items()})
        yield header
        with self._path.open("rb") as file:
            for tensor in dense.values():
                yield from read_blocks(file, tensor)


def may_become(found: str, needed: str, name: str) -> bool:
    """Whether a tensor of one dtype, in safetensors' words, may fill a part of another: weights are rounded or widened, nothing else is."""
    return found == needed or (name.startswith("embedding_bags.") and found in ROW_TYPES)


def converted(elements: Elements, dtype: RowType, needed: RowType) -> Elements:
    return elements if dtype == needed else rounded(widened(elements, dtype), needed)


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
