"""Implements `rowcast import` and `prefetcher run --from`: starts a run from another run or an exported file.

Both make one checkpoint before the run's first train step, from one of

- the newest or best checkpoint of another run: rows and their state, dense weights, their optimizer's state, losses;
  its count of train steps continues
- or a file as `rowcast export` writes it:

embedding_bags.<table>.weight     required; f32, f16 or bf16 [num_embeddings, embedding_dim]; converted to the table's
optimizer.<table>.master          weights before rounding; if missing, the weights above as they are in the file
optimizer.<table>.<state>         row state; if missing, its initial value
<name>                            dense weights under the model's names; the model initializes those that are missing
"""

import uuid
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import IO

import numpy as np
import xxhash

from rowcast.job.embedding_tables import LARGEST, RowType
from rowcast.job.file import parse_manifest_job
from rowcast.job.optimizers import ROW_OPTIMIZERS
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, RecordPart, TableSpec, groups_at, make_keys, whole_groups
from rowcast.prefetcher.checkpoints.export import DTYPES, MODEL, part_name, table_tensors
from rowcast.prefetcher.checkpoints.folder import IMPORT, Checkpoints, carry_out, softly
from rowcast.prefetcher.checkpoints.restore import saved_rows
from rowcast.prefetcher.checkpoints.writer import CheckpointWriter
from rowcast.prefetcher.stores.records import (
    ELEMENTS,
    Elements,
    FiniteRows,
    elements_of,
    first_records,
    rounded,
    widened,
)
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.runtime.checkpoint_manifest import IdType, Manifest, Position, checked_file
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.tensor_file import PlacedTensor, make_header, read_blocks, read_header

BLOCK_ROWS = 65536
TABLE_PREFIXES = ("embedding_bags.", "optimizer.")  # of names of rows and their state
OF_EVALUATIONS = ("evaluations", "metrics.")
ROW_TYPES: dict[str, RowType] = {words: dtype for dtype, words in DTYPES.items()}


def import_run(job: Job, source: Path, *, fresh: bool) -> Manifest:
    """Makes the checkpoint. Raises ConfigError if the source does not fit the job or the directory holds a run."""
    opened = open_source(job, source)
    with RunDirectory(job.run_dir, "prefetcher"):
        checkpoints = Checkpoints(job.run_dir, Disk())
        carry_out(checkpoints.settle())
        if fresh:
            carry_out(checkpoints.begin_fresh())
        elif checkpoints.candidates():
            raise ConfigError(
                f"{job.run_dir} holds a checkpoint; set another job.run_dir, or add --fresh to replace it"
            )
        manifest = import_into(checkpoints, job, opened)
        carry_out(checkpoints.take_over())
        carry_out(softly(checkpoints.remove_earlier()))
    return manifest


def import_into(checkpoints: Checkpoints, job: Job, source: "Source") -> Manifest:
    """Makes the first checkpoint of a run."""
    writer = CheckpointWriter(job, whole_groups(job), uuid.uuid4().hex[:12], None, checkpoints, None, keep=1)
    writer.id_types = source.id_types
    writer.begin(source.position, finished=False, reason=IMPORT)
    blocks = (
        (index, keys, records)
        for index, group in enumerate(whole_groups(job))
        for keys, records in checked(source, group, job)
    )
    writer.finish(offer_dense(writer, source), blocks)
    while writer.busy:
        writer.advance()
    assert writer.newest is not None, "a checkpoint must have been written"
    return writer.newest


def checked(source: "Source", group: GroupSpec, job: Job) -> Iterator[tuple[Keys, Records]]:
    """Yields the rows of a source. Raises DataError for the first that is not finite or has a negative sum of
    squares."""
    finite, states = FiniteRows(group), ROW_OPTIMIZERS[job.optimizer.sparse.kind].states
    unsigned = {state.name for state in states if not state.is_signed}
    sums = [part for part in group.parts if part.name in unsigned]
    for keys, records in source.rows(group, job.job.seed):
        fault = finite.fault(keys, records)
        for part in sums:
            values = widened(elements_of(records, part), part.dtype)
            if not fault and (values < 0).any():
                row, column = np.argwhere(values < 0)[0]
                fault = f"{group.row_name(int(keys[row]))}: {part.name}[{column}] is {values[row, column]}, below 0"
        if fault:
            raise DataError(f"--from {source.path}: {fault}; give a file of rows that can be trained")
        yield keys, records


def open_source(job: Job, path: Path) -> "Source":
    """Opens a run directory or a file. Raises ConfigError if it does not fit the job."""
    if path.is_dir():
        return EarlierRun(job, path)
    exported = ExportedFile(path)
    exported.check(whole_groups(job))
    return exported


class EarlierRun:
    """The newest or best checkpoint of a run with the job's tables, model and kinds of optimizers. Its data may
    differ."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        """Raises ConfigError if there is no checkpoint or its rows are not the job's, DataError if all are damaged."""
        self.path = run_dir
        checkpoints = Checkpoints(run_dir, Disk())
        self._root, self._manifest = checkpoints.root, checkpoints.choose(None)
        self._saved = groups_at(job, self._manifest.points)
        earlier = parse_manifest_job(self._manifest.job, f"{self._root / self._manifest.name}/manifest.json")
        if earlier.job.seed != job.job.seed:
            raise ConfigError(
                f"--from {run_dir}: its untrained rows have the first values of job.seed = {earlier.job.seed}; "
                f"set that instead of {job.job.seed}"
            )
        self.id_types = self._manifest.id_types
        was, columns = earlier.data.columns, job.data.columns
        if was.hash_by_value and columns.hash_by_value and was.value_rule != columns.value_rule:
            raise ConfigError(
                f"--from {run_dir}: its rows are those of ids by data.columns.value_rule = {was.value_rule}; set that "
                f"instead of {columns.value_rule}"
            )
        for theirs, ours in zip_longest(tables_of(earlier), tables_of(job)):
            if theirs != ours:
                raise ConfigError(
                    f"--from {run_dir}: its rows are of {theirs}, but the job file has {ours}; make them equal"
                )

    @property
    def position(self) -> Position:
        """The start of the data, with steps counted from the earlier run's."""
        return Position(step=self._manifest.position.step, train_step=self._manifest.train_steps)

    def rows(self, group: GroupSpec, seed: int) -> Iterator[tuple[Keys, Records]]:
        return saved_rows(self._root, group, self._saved, self._manifest.layers)

    def dense_content(self) -> Iterator[bytes]:
        """Leaves out evaluations, which are of the earlier run's samples."""
        if self._manifest.dense is not None:
            path = checked_file(self._root, self._manifest.dense)
            tensors = read_header(path).items()
            yield from selected(path, {name: tensor for name, tensor in tensors if not name.startswith(OF_EVALUATIONS)})


def tables_of(job: Job) -> Iterator[str]:
    for group in whole_groups(job):
        for table in group.tables:
            linear = ", linear" if table.linear else ""
            yield (
                f"table {table.name} [{table.num_embeddings}, {table.embedding_dim}{linear}] {table.dtype}, "
                f"number {table.index}, init {table.init}, in records of {', '.join(part.name for part in group.parts)}"
            )


class ExportedFile:
    """A file that `rowcast export` wrote. Raises ConfigError if it does not exist, DataError if it is not one."""

    position = Position()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id_types: dict[str, IdType] = {}  # not in the file
        try:
            self._tensors = read_header(path)
        except OSError as error:
            raise ConfigError(
                f"--from {path} cannot be read ({error.strerror}); name a run directory, or a "
                "file that `rowcast export` wrote"
            ) from None

    @property
    def dense(self) -> dict[str, PlacedTensor]:
        return {name: tensor for name, tensor in self._tensors.items() if not name.startswith(TABLE_PREFIXES)}

    def check(self, groups: tuple[GroupSpec, ...]) -> None:
        """Raises ConfigError for the first table tensor that is missing, unknown or of another shape."""
        expected = table_tensors(groups)
        for name, spec in expected.items():
            tensor = self._tensors.get(name)
            if tensor is None and name.startswith("embedding_bags."):
                raise ConfigError(
                    f"{self.path}: {name} is missing; remove its table from the job file, or name a file that has it"
                )
            if tensor is not None and (tensor.shape != spec.shape or not may_become(tensor.dtype, spec.dtype, name)):
                raise ConfigError(
                    f"{self.path}: {name} is {tensor.dtype} {list(tensor.shape)}, but the job file needs "
                    f"{spec.dtype} {list(spec.shape)}; change num_embeddings, embedding_dim, dtype or optimizer.sparse"
                )
        for name in self._tensors:
            if name.startswith(TABLE_PREFIXES) and name not in expected:
                raise ConfigError(
                    f"{self.path}: the job file has nothing for {name}; "
                    "add its table, or the optimizer that has this state"
                )
        missing = [name for name in expected if name not in self._tensors and not name.endswith(".master")]
        if missing:
            get_logger().warning(
                "optimizer state is missing and begins at its first value", file=str(self.path), of=", ".join(missing)
            )
        for group in groups:
            for table in group.tables:
                self._check_range(part_name(table, "weight"), table.dtype)

    def _check_range(self, name: str, dtype: RowType) -> None:
        """Raises ConfigError if rounding would turn a weight into an infinity."""
        tensor = self._tensors[name]
        if dtype == "fp32" or tensor.dtype == DTYPES[dtype]:
            return
        with self.path.open("rb") as file:
            for block in read_blocks(file, tensor):
                values = widened(np.frombuffer(block, ELEMENTS[ROW_TYPES[tensor.dtype]]), ROW_TYPES[tensor.dtype])
                if (np.isfinite(values) & (np.abs(values) > LARGEST[dtype])).any():
                    raise ConfigError(
                        f"{self.path}: {name} has values beyond {LARGEST[dtype]:.6g}, the largest of {dtype}; "
                        "set another dtype"
                    )

    def rows(self, group: GroupSpec, seed: int) -> Iterator[tuple[Keys, Records]]:
        for table in group.tables:
            yield from self._rows_of(group, table, seed)

    def _rows_of(self, group: GroupSpec, table: TableSpec, seed: int) -> Iterator[tuple[Keys, Records]]:
        sources = [(part, tensor) for part in group.parts if (tensor := self._source(table, part)) is not None]
        with self.path.open("rb") as file:
            for first in range(0, table.num_embeddings, BLOCK_ROWS):
                keys = make_keys(
                    table.index, np.arange(first, min(first + BLOCK_ROWS, table.num_embeddings), dtype=np.int64)
                )
                initial = first_records(group, seed, keys)
                records = initial.copy()
                for part, tensor in sources:
                    values = self._read(file, tensor, first, len(keys))
                    elements_of(records, part)[:] = converted(values, ROW_TYPES[tensor.dtype], part.dtype)
                changed = (records != initial).any(axis=1)
                if changed.any():
                    yield keys[changed], records[changed]

    def _source(self, table: TableSpec, part: RecordPart) -> PlacedTensor | None:
        """Returns the tensor that a field is read from; None: the field keeps its first value."""
        tensor = self._tensors.get(part_name(table, part.name))
        return self._tensors[part_name(table, "weight")] if tensor is None and part.name == "master" else tensor

    def _read(self, file: IO[bytes], tensor: PlacedTensor, first: int, rows: int) -> Elements:
        row_bytes = tensor.nbytes // tensor.shape[0]
        file.seek(tensor.start + first * row_bytes)
        content = file.read(rows * row_bytes)
        if len(content) < rows * row_bytes:
            raise DataError(f"{self.path}: the file became shorter while it was read")
        elements: Elements = np.frombuffer(content, ELEMENTS[ROW_TYPES[tensor.dtype]]).reshape(rows, -1)
        return elements

    def dense_content(self) -> Iterator[bytes]:
        if self.dense:
            yield from selected(self.path, {f"{MODEL}{name}": tensor for name, tensor in self.dense.items()})


def selected(path: Path, tensors: Mapping[str, PlacedTensor]) -> Iterator[bytes]:
    """Yields a safetensors file of these tensors of the file `path`."""
    header, _ = make_header(tensors)
    yield header
    with path.open("rb") as file:
        for tensor in tensors.values():
            yield from read_blocks(file, tensor)


Source = EarlierRun | ExportedFile


def may_become(saved: str, needed: str, name: str) -> bool:
    """Returns whether a tensor of dtype `saved` (safetensors' name) may fill a field of dtype `needed`. Only weights
    are converted."""
    return saved == needed or (name.startswith("embedding_bags.") and saved in ROW_TYPES)


def converted(elements: Elements, dtype: RowType, needed: RowType) -> Elements:
    return elements if dtype == needed else rounded(widened(elements, dtype), needed)


def offer_dense(writer: CheckpointWriter, source: Source) -> str | None:
    """Returns the checksum, or None if there are no dense weights."""
    hasher = None
    for content in source.dense_content():
        hasher = hasher or xxhash.xxh3_64()
        hasher.update(content)
        while not writer.offer_dense(content):
            writer.advance()
    return None if hasher is None else hasher.hexdigest()
