"""Implements `prefetcher export`: writes a checkpoint as one safetensors file.

Tables are written one after the other, a block of rows at a time.

    embedding_bags.<table>.weight     f32, f16 or bf16 [num_embeddings, embedding_dim]: the table's dtype
    optimizer.<table>.master          f32 [num_embeddings, embedding_dim]: weights before rounding, where they are kept
    optimizer.<table>.<state>         f32 [num_embeddings, width of the state]
    <name>                            dense weights under the model's own names

A row that was never trained has its first value, which follows from the job in the manifest.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from rowcast.job.file import parse_job
from rowcast.job.schema import Job, RowType
from rowcast.job.tables import GroupSpec, TableSpec, group_specs, make_keys
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.merge_layers import merged
from rowcast.prefetcher.checkpoints.row_files import Rows
from rowcast.prefetcher.checkpoints.tensor_files import PlacedTensor, TensorSpec, make_header, read_blocks, read_header
from rowcast.prefetcher.stores.first_values import first_records
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.runtime.checkpoint_manifest import Manifest, RowLayer, checked_file, sync_folder
from rowcast.runtime.disk import RealDisk
from rowcast.runtime.errors import ConfigError

BLOCK_ROWS = 65536
MODEL = "model."  # the prefix of the model's tensors in the dense file
DTYPES: dict[RowType, str] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}  # safetensors' names


class ExportLog(Protocol):
    def info(self, event: str, *args: Any, **fields: Any) -> object: ...

    def warning(self, event: str, *args: Any, **fields: Any) -> object: ...


def export_run(run_dir: Path, out: Path, log: ExportLog, checkpoint: str | None = None) -> Manifest:
    """Writes a run's checkpoint, by default the newest valid one, to `out`. Raises ConfigError and DataError."""
    checkpoints = Checkpoints(run_dir, RealDisk())
    manifest = checkpoints.choose(checkpoint, log)
    job = parse_job(manifest.job, f"{checkpoints.root / manifest.name}/manifest.json")
    write_export(
        out,
        job,
        CheckpointRows(checkpoints.root, manifest.layers, job.job.seed),
        SavedModelState(checkpoints.root, manifest),
        log,
    )
    return manifest


def export_start(job: Job, out: Path, log: ExportLog) -> None:
    """Writes the tables that a run of this job starts from, without dense weights (the trainer makes those). Raises
    ConfigError."""
    write_export(out, job, CheckpointRows(Path(), (), job.job.seed), None, log)


def write_export(out: Path, job: Job, rows: "CheckpointRows", dense: "SavedModelState | None", log: ExportLog) -> None:
    """Writes the whole file or none."""
    if out.is_dir() or not out.name:
        raise ConfigError(f"--out {out} is a folder; name a file, such as {out / 'model.safetensors'}")
    partial = out.with_name(out.name + ".partial")
    try:
        with partial.open("wb") as file:
            write_safetensors(file, group_specs(job), rows, dense, log)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(out)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise ConfigError(
            f"{out}: the export could not be written ({error.strerror}); choose another --out or free space"
        ) from None
    finally:
        with suppress(OSError):  # renamed, or never made
            partial.unlink()


class SavedModelState:
    """The model's tensors by their own names, copied as they are."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.tensors: dict[str, PlacedTensor] = {}
        if manifest.dense is not None:
            self._path = checked_file(root, manifest.dense)
            found = read_header(self._path).items()
            self.tensors = {name.removeprefix(MODEL): tensor for name, tensor in found if name.startswith(MODEL)}

    def blocks(self, name: str) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            yield from read_blocks(file, self.tensors[name])


class CheckpointRows:
    """A checkpoint's rows by table, in blocks. Trained rows come from its layers, with one file of each in memory; the
    others are computed."""

    def __init__(self, root: Path, layers: tuple[RowLayer, ...], seed: int) -> None:
        self._root = root
        self._layers = layers
        self._seed = seed

    def tables(self, group: GroupSpec) -> Iterator[tuple[TableSpec, Iterator[Records]]]:
        """Yields each table with its blocks of at most BLOCK_ROWS rows, to be read before the next table."""
        trained = AscendingRows(merged(self._root, group, self._layers))
        for table in group.tables:
            yield table, self._blocks(group, table, trained)

    def _blocks(self, group: GroupSpec, table: TableSpec, trained: "AscendingRows") -> Iterator[Records]:
        for first in range(0, table.num_embeddings, BLOCK_ROWS):
            keys = make_keys(
                table.index, np.arange(first, min(first + BLOCK_ROWS, table.num_embeddings), dtype=np.int64)
            )
            records = first_records(group, self._seed, keys)
            for found, rows in trained.up_to(int(keys[-1])):
                records[found - keys[0]] = rows
            yield records


class AscendingRows:
    """Blocks of rows by ascending key, cut again to the ranges that a caller asks for."""

    def __init__(self, blocks: Iterator[Rows]) -> None:
        self._blocks = blocks
        self._keys: Keys | None = None
        self._records: Records | None = None

    def up_to(self, last_key: int) -> Iterator[Rows]:
        while (block := self._next()) is not None:
            keys, records = block
            end = int(np.searchsorted(keys, last_key, side="right"))
            self._keys, self._records = (keys[end:], records[end:]) if end < len(keys) else (None, None)
            if end:
                yield keys[:end], records[:end]
            if end < len(keys):
                return

    def _next(self) -> Rows | None:
        if self._keys is None or self._records is None:
            return next(self._blocks, None)
        return self._keys, self._records


def write_safetensors(
    file: IO[bytes], groups: tuple[GroupSpec, ...], rows: CheckpointRows, dense: SavedModelState | None, log: ExportLog
) -> None:
    """Writes the header, then every tensor at its offset; a table's parts are filled side by side, block by block."""
    header, at = make_header(table_tensors(groups) | ({} if dense is None else dense.tensors))
    file.write(header)
    for group in groups:
        for table, blocks in rows.tables(group):
            log.info("table", name=table.name)
            for records in blocks:
                for part in group.parts:
                    name = part_name(table, part.name)
                    content = np.ascontiguousarray(records[:, part.bytes])
                    file.seek(at[name])
                    file.write(content.data)
                    at[name] += content.nbytes
    if dense is not None:
        for name in dense.tensors:
            file.seek(at[name])
            for block in dense.blocks(name):
                file.write(block)


def table_tensors(groups: tuple[GroupSpec, ...]) -> dict[str, TensorSpec]:
    return {
        part_name(table, part.name): TensorSpec(
            dtype=DTYPES[part.dtype],
            shape=(table.num_embeddings, part.width),
            nbytes=table.num_embeddings * part.nbytes,
        )
        for group in groups
        for table in group.tables
        for part in group.parts
    }


def part_name(table: TableSpec, part: str) -> str:
    return f"embedding_bags.{table.name}.weight" if part == "weight" else f"optimizer.{table.name}.{part}"
