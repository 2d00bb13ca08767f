"""Implements `rowcast export`: writes a checkpoint as one safetensors file.

It writes table after table, a block of rows at a time.

    embedding_bags.<table>.weight     f32, f16 or bf16 [num_embeddings, embedding_dim]: the table's dtype
    optimizer.<table>.master          f32 [num_embeddings, embedding_dim]: weights before rounding, where they are kept
    optimizer.<table>.<state>         f32 [num_embeddings, width of the state]
    <name>                            dense weights under the model's names

An untrained row has its first value, computed from the job in the manifest. With `--trained-rows`, a table's tensors
hold only its trained rows, and one more tensor lists them:

    embedding_bags.<table>.rows       i64 [n]: the ids of these rows, ascending
"""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from rowcast.job.embedding_tables import RowType
from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec, TableSpec, make_keys, whole_groups
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.restore import AscendingRows, saved_rows
from rowcast.prefetcher.checkpoints.row_files import Rows
from rowcast.prefetcher.checkpoints.saved_tables import saved_tables
from rowcast.prefetcher.stores.records import FirstOf, of_seed
from rowcast.prefetcher.stores.store import Records
from rowcast.runtime.arrays import I64
from rowcast.runtime.checkpoint_manifest import Manifest, RowLayer, checked_file
from rowcast.runtime.disk import Disk, partial_of
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import human_bytes
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.tensor_file import PlacedTensor, TensorSpec, make_header, read_blocks, read_header

BLOCK_ROWS = 65536
MOST_ROWS = 2**48  # of a table
MODEL = "model."  # the prefix of the model's tensors in the dense file
DTYPES: dict[RowType, str] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}  # safetensors' names


def export_run(
    run_dir: Path, out: Path, checkpoint: str | None = None, *, trained_only: bool = False, above: int = 0
) -> Manifest:
    """Writes a run's checkpoint, by default the newest, to `out`. `above`: `trained_only` holds for tables of more
    rows, and for those whose first values are read or made on demand. Raises ConfigError and DataError."""
    checkpoints = Checkpoints(run_dir, Disk())
    manifest = checkpoints.choose(checkpoint)
    tables = saved_tables(checkpoints.root, manifest)
    whole = all_of(tables.groups, above) - tables.on_demand if trained_only else all_of(tables.groups)
    rows = CheckpointRows(checkpoints.root, manifest.layers, tables.written, tables.first, whole)
    write_export(out, tables.groups, rows, SavedModelState(checkpoints.root, manifest))
    return manifest


def export_start(job: Job, out: Path) -> None:
    """Writes the tables that a run of this job starts from, without dense weights (the trainer makes those). Raises
    ConfigError."""
    groups = whole_groups(job)
    write_export(out, groups, CheckpointRows(Path(), (), groups, of_seed(job.job.seed), all_of(groups)), None)


def all_of(groups: tuple[GroupSpec, ...], most: int = MOST_ROWS) -> frozenset[int]:
    """Returns the indices of the tables that have at most `most` rows."""
    return frozenset(table.index for group in groups for table in group.tables if table.num_embeddings <= most)


def write_export(
    out: Path, groups: tuple[GroupSpec, ...], rows: "CheckpointRows", dense: "SavedModelState | None"
) -> None:
    """Writes the whole file or none."""
    if out.is_dir() or not out.name:
        raise ConfigError(f"--out {out} is a folder; name a file, such as {out / 'model.safetensors'}")
    tensors = rows.tensors(groups) | ({} if dense is None else dense.tensors)
    check_space(out, sum(tensor.nbytes for tensor in tensors.values()), " or add --trained-rows")
    with whole_file(out) as file:
        write_safetensors(file, groups, tensors, rows, dense)


@contextmanager
def whole_file(out: Path) -> Iterator[IO[bytes]]:
    """Yields a file that is durable in its place once the block has ended. Raises as `in_place`."""
    with in_place(out) as partial, partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def in_place(out: Path) -> Iterator[Path]:
    """Yields where the block writes a file or a folder, and syncs it. Renames it to `out` once the block has ended.
    Raises ConfigError if it cannot be written."""
    partial = partial_of(out)
    try:
        yield partial
        partial.rename(out)
        Disk().sync_folder(out.absolute().parent)
    except OSError as error:
        raise ConfigError(
            f"--out {out} could not be written ({error.strerror}); choose another --out or free space"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):  # renamed, or never created
            partial.unlink()


def check_space(out: Path, nbytes: int, advice: str = "") -> None:
    folder = out.absolute().parent
    if folder.exists() and nbytes > (free := shutil.disk_usage(folder).free):
        raise ConfigError(
            f"--out {out} would take {human_bytes(nbytes)}, but {human_bytes(free)} are free; free space, "
            f"choose another --out{advice}"
        )


class SavedModelState:
    """The model's tensors under the model's names, copied unchanged."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.tensors: dict[str, PlacedTensor] = {}
        if manifest.dense is not None:
            self._path = checked_file(root, manifest.dense)
            found = read_header(self._path).items()
            self.tensors = {name.removeprefix(MODEL): tensor for name, tensor in found if name.startswith(MODEL)}

    def blocks(self, name: str) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            yield from read_blocks(file, self.tensors[name])


Block = tuple[I64, Records]  # row ids of one table, ascending, and their records


class CheckpointRows:
    """A checkpoint's rows by table, in blocks: all rows of some tables, and trained rows with their ids of others.
    Reads trained rows from its layers, with one file of each in memory."""

    def __init__(
        self,
        root: Path,
        layers: tuple[RowLayer, ...],
        saved: tuple[GroupSpec, ...],
        first: FirstOf,
        whole: Collection[int],
    ) -> None:
        """`saved`: the groups that were written. `first`: makes the other rows. `whole`: tables that are read
        whole, by index."""
        self._root = root
        self._layers = layers
        self._saved = saved
        self._first = first
        self._whole = whole

    def tensors(self, groups: tuple[GroupSpec, ...]) -> dict[str, TensorSpec]:
        tensors = dict[str, TensorSpec]()
        for group in groups:
            num_rows = self._num_rows(group)
            ids = {
                rows_name(table): TensorSpec(
                    dtype="I64", shape=(num_rows[table.index],), nbytes=8 * num_rows[table.index]
                )
                for table in group.tables
                if table.index not in self._whole
            }
            tensors |= ids | table_tensors((group,), num_rows)
        return tensors

    def tables(self, group: GroupSpec) -> Iterator[tuple[TableSpec, Iterator[Block]]]:
        """Yields each table with its blocks of at most BLOCK_ROWS rows, to be read before the next table."""
        trained = AscendingRows(self._merged(group))
        for table in group.tables:
            blocks = self._blocks if table.index in self._whole else self._trained_blocks
            yield table, blocks(group, table, trained)

    def _merged(self, group: GroupSpec) -> Iterator[Rows]:
        return saved_rows(self._root, group, self._saved, self._layers)

    def _num_rows(self, group: GroupSpec) -> dict[int, int]:
        """Counts each table's rows. Trained ones take a separate pass over the checkpoint, because a file begins with
        its sizes."""
        num_rows = {table.index: table.num_embeddings if table.index in self._whole else 0 for table in group.tables}
        for keys, _ in () if num_rows.keys() <= {*self._whole} else self._merged(group):
            for index, count in zip(*np.unique(keys >> KEY_SHIFT, return_counts=True), strict=True):
                num_rows[int(index)] += 0 if index in self._whole else int(count)
        return num_rows

    def _blocks(self, group: GroupSpec, table: TableSpec, trained: AscendingRows) -> Iterator[Block]:
        for first in range(0, table.num_embeddings, BLOCK_ROWS):
            rows = np.arange(first, min(first + BLOCK_ROWS, table.num_embeddings), dtype=np.int64)
            keys = make_keys(table.index, rows)
            records = self._first(group, keys)
            for found, own in trained.up_to(int(keys[-1])):
                records[found - keys[0]] = own
            yield rows, records

    def _trained_blocks(self, group: GroupSpec, table: TableSpec, trained: AscendingRows) -> Iterator[Block]:
        [last_key] = make_keys(table.index, np.array([table.num_embeddings - 1]))
        for keys, records in trained.up_to(int(last_key)):
            yield keys & ROW_MASK, records


def write_safetensors(
    file: IO[bytes],
    groups: tuple[GroupSpec, ...],
    tensors: dict[str, TensorSpec],
    rows: CheckpointRows,
    dense: SavedModelState | None,
) -> None:
    """Writes the header, then every tensor at its offset. Fills a table's tensors together, block by block."""
    header, at = make_header(tensors)
    file.write(header)
    for group in groups:
        for table, blocks in rows.tables(group):
            get_logger().info("table", name=table.name)
            for ids, records in blocks:
                content = {part_name(table, part.name): records[:, part.bytes] for part in group.parts}
                for name, array in (content | {rows_name(table): ids}).items():
                    if name in at:
                        file.seek(at[name])
                        file.write(np.ascontiguousarray(array).data)
                        at[name] += array.nbytes
    if dense is not None:
        for name in dense.tensors:
            file.seek(at[name])
            for block in dense.blocks(name):
                file.write(block)


def table_tensors(groups: tuple[GroupSpec, ...], num_rows: Mapping[int, int] | None = None) -> dict[str, TensorSpec]:
    """`num_rows`: of each table in the file, by its index; None: all."""
    return {
        part_name(table, part.name): TensorSpec(
            dtype=DTYPES[part.dtype], shape=(count, part.width), nbytes=count * part.nbytes
        )
        for group in groups
        for table in group.tables
        for count in [table.num_embeddings if num_rows is None else num_rows[table.index]]
        for part in group.parts
    }


def rows_name(table: TableSpec) -> str:
    return f"embedding_bags.{table.name}.rows"


def part_name(table: TableSpec, part: str) -> str:
    return f"embedding_bags.{table.name}.weight" if part == "weight" else f"optimizer.{table.name}.{part}"
