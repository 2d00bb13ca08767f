"""Implements `rowcast overlay`: writes what training changed in tables that began in files of a released model.

    NAME          f32, f16 or bf16 [n, D]: the weights of the rows that differ from the released ones
    NAME.rows     i64 [n]: their numbers, ascending
    metadata      rowcast.overlay: JSON, the rows of each table, and names, sizes and sampled checksums of its files

`apply` writes the released files again with these rows in their place. A folder appears once all of it is on disk.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from rowcast.job.embedding_tables import RowType
from rowcast.job.tables import GroupSpec, TableSpec, make_keys
from rowcast.prefetcher.checkpoints.export import (
    BLOCK_ROWS,
    DTYPES,
    Block,
    CheckpointRows,
    check_space,
    in_place,
    whole_file,
)
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.saved_tables import SavedTables, saved_tables
from rowcast.prefetcher.stores.records import ELEMENTS, Elements, elements_of, rounded, widened
from rowcast.protocol.released_rows import find_released
from rowcast.runtime.arrays import I64
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.first_values import FirstValues, NamedFiles, other_file
from rowcast.runtime.tensor_file import TensorSpec, make_header, read_header

KEY = "rowcast.overlay"
ROW_TYPES: dict[str, RowType] = {name: row_type for row_type, name in DTYPES.items()}
BITS: dict[RowType, npt.DTypeLike] = {"fp32": np.uint32, "fp16": np.uint16, "bf16": np.uint16}


class OverlaidTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_rows: int
    files: NamedFiles


Tables = dict[str, OverlaidTable]


def write_overlay(run_dir: Path, out: Path, dtype: RowType | None = None) -> int:
    """Writes the overlay of a run's newest checkpoint, and returns how many rows it has. `dtype`: of the weights; by
    default that of each table's files. Raises ConfigError and DataError."""
    checkpoints = Checkpoints(run_dir, Disk())
    manifest = checkpoints.choose(None)
    tables = saved_tables(checkpoints.root, manifest)
    script = () if manifest.script is None else manifest.script.tables
    released = {own.name: (own.num_rows, own.first[0]) for own in script if own.first and own.first[0].released}
    if not released:
        raise ConfigError(f"{run_dir} has no table that began in released files; `rowcast export` writes all of others")
    saved = CheckpointRows(checkpoints.root, manifest.layers, tables.written, tables.first, ())
    tensors, rows = dict[str, TensorSpec](), dict[str, I64]()
    described = {name: OverlaidTable(num_rows, first.named_files) for name, (num_rows, first) in released.items()}
    with whole_file(out) as file, tempfile.TemporaryFile(dir=out.absolute().parent) as weights:
        for group in tables.groups:
            for table, blocks in saved.tables(group):
                if (of_files := released.get(table.name, (0, None))[1]) is not None and of_files.released is not None:
                    kind = dtype or ROW_TYPES[of_files.released.dtype]
                    rows[table.name] = changed = copy_changed(tables, group, table, blocks, kind, weights)
                    shape, item = (len(changed), table.embedding_dim), np.dtype(ELEMENTS[kind]).itemsize
                    spec = TensorSpec(dtype=DTYPES[kind], shape=shape, nbytes=shape[0] * shape[1] * item)
                    tensors[table.name] = spec
        numbers = {f"{t}.rows": TensorSpec(dtype="I64", shape=own.shape, nbytes=own.nbytes) for t, own in rows.items()}
        check_space(out, weights.tell())
        metadata = {KEY: msgspec.json.encode(described).decode()}
        file.write(make_header(numbers | tensors, metadata)[0])  # numbers first: they lie aligned
        for changed in rows.values():
            file.write(changed.data)
        weights.seek(0)
        shutil.copyfileobj(weights, file)
    return sum(map(len, rows.values()))


def copy_changed(
    tables: SavedTables, group: GroupSpec, table: TableSpec, blocks: Iterator[Block], dtype: RowType, out: IO[bytes]
) -> I64:
    """Writes the weights that differ from the first ones once both are of `dtype`. Returns the rows that have them."""
    changed = [np.zeros(0, np.int64)]
    for rows, records in blocks:
        firsts = tables.first(group, make_keys(table.index, rows))
        [part] = [part for part in group.parts if part.name == "weight"]
        now, first = (rounded(elements_of(each, part).astype(np.float32), dtype) for each in (records, firsts))
        bad = np.flatnonzero(~np.isfinite(widened(now, dtype)).all(1))
        if len(bad):
            raise DataError(f"row {rows[bad[0]]:,} of {table.name} is beyond the range of {dtype}; give --dtype fp32")
        differs = (now.view(BITS[dtype]) != first.view(BITS[dtype])).any(1)
        out.write(np.ascontiguousarray(now[differs]).data)
        changed.append(rows[differs])
    return np.concatenate(changed)


def apply_overlay(overlay: Path, folder: Path, out: Path) -> int:
    """Makes folder `out` with the released files of `folder`, in which the overlay's rows are replaced: files without
    one are linked, or copied to another disk. Returns how many files were written. Raises ConfigError and DataError."""
    overlaid = opened(overlay)
    if out.exists():
        raise ConfigError(f"--out {out} is there already; name a new folder")
    if out.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"--out {out} is within the released files of {folder}; name a folder beside them")
    places = {
        name: released_again(name, table, rows, weights, folder) for name, (table, rows, weights) in overlaid.items()
    }
    with in_place(out) as partial:
        partial.mkdir(parents=True)
        written = {
            path
            for name, (_, rows, weights) in overlaid.items()
            for path in replaced(places[name], rows, weights, partial)
        }
        for path in folder.rglob("*"):
            target = partial / path.relative_to(folder)
            if path.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path.resolve(), target)
                except OSError:  # on another disk, or one without links
                    shutil.copyfile(path, target)
        for path in (partial, *partial.rglob("*")):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return len(written)


def opened(overlay: Path) -> dict[str, tuple[OverlaidTable, I64, Elements]]:
    """Yields the tables of an overlay, their rows, and these rows' weights. Raises DataError."""
    try:
        tensors = read_header(overlay)
        with safe_open(overlay, framework="np") as file:
            tables = msgspec.json.decode((file.metadata() or {}).get(KEY, ""), type=Tables)
        arrays = {
            name: np.memmap(
                overlay, ELEMENTS[ROW_TYPES[spec.dtype]] if name in tables else "<i8", "r", spec.start, spec.shape
            )
            for name, spec in tensors.items()
            if spec.nbytes
        }
    except OSError as error:
        raise ConfigError(f"{overlay}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, KeyError) as error:
        raise DataError(f"{overlay} is no overlay of `rowcast overlay` ({error})") from None
    overlaid: dict[str, tuple[OverlaidTable, I64, Elements]]
    overlaid = {name: (table, arrays[f"{name}.rows"], arrays[name]) for name, table in tables.items() if name in arrays}
    for name, (table, rows, weights) in overlaid.items():
        if len(rows) != len(weights) or rows[0] < 0 or rows[-1] >= table.num_rows or (np.diff(rows) <= 0).any():
            raise DataError(f"{overlay}: {name}.rows are not ascending rows of {table.num_rows:,}; make it again")
    return overlaid


def released_again(name: str, table: OverlaidTable, rows: I64, weights: Elements, folder: Path) -> FirstValues:
    """Returns where a table's rows are in these files. Raises ConfigError if the overlay was made for other files."""
    first = find_released(folder, name, table.num_rows, weights.shape[1]).sampled()
    if differs := other_file(table.files, first.named_files):
        raise ConfigError(f"{folder}: the overlay is for {differs}; give --apply the files that were trained")
    return first


def replaced(first: FirstValues, rows: I64, weights: Elements, folder: Path) -> Iterator[Path]:
    """Writes rows into copies of their files in `folder`, and yields these."""
    released, begin = first.released, 0
    assert released is not None
    row_bytes = first.width * released.item_bytes
    for file, offset, num_rows in released.parts:
        source = Path(released.files[file].path)
        low, high = np.searchsorted(rows, [begin, begin + num_rows])
        if high > low:
            target = folder / source.name
            if not target.exists():
                shutil.copyfile(source, target)
            content = np.memmap(target, np.uint8, "r+", offset, (num_rows, row_bytes))
            for at in range(low, high, BLOCK_ROWS):
                chosen = slice(at, min(at + BLOCK_ROWS, high))
                content[rows[chosen] - begin] = as_bytes(weights[chosen], ROW_TYPES[released.dtype])
            content.flush()
            yield target
        begin += num_rows


def as_bytes(weights: Elements, dtype: RowType) -> npt.NDArray[np.uint8]:
    """u8 [n, row_bytes] of the same weights as `dtype`."""
    was: RowType = next(row_type for row_type, kind in ELEMENTS.items() if np.dtype(kind) == weights.dtype)
    values = weights if was == dtype else rounded(widened(weights, was), dtype)
    return np.ascontiguousarray(values).view(np.uint8)
