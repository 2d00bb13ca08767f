"""Writes the files of a version from layers of a checkpoint, under a name that no reader looks at.

layers --> rows by key --> place of each row --> .rows, mapped    every row to its place
                                                 .index, mapped
"""

import mmap
import os
import shutil
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rowcast.job.tables import GroupSpec, TableSpec
from rowcast.prefetcher.checkpoints.export import Block, CheckpointRows, SavedModelState
from rowcast.prefetcher.checkpoints.saved_tables import SavedTables
from rowcast.prefetcher.stores.records import elements_of, widened
from rowcast.prefetcher.stores.store import ABSENT, Records
from rowcast.runtime.arrays import F32, I64, U32, Bytes
from rowcast.runtime.checkpoint_manifest import Manifest, RowLayer
from rowcast.runtime.compiled import compiled_loop
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import ConfigError, DataError, RowcastError
from rowcast.runtime.telemetry.format_numbers import human_bytes
from rowcast.runtime.tensor_file import make_header
from rowcast.serving.index_loops import CELL_BYTES, Index, num_cells, put_all
from rowcast.serving.row_layout import DType, encoded, holds, row_layout
from rowcast.serving.snapshot import Snapshot
from rowcast.serving.version_file import DENSE_NAME, FileChecksums, TableFiles, checksums_of

STAYS, CHANGED = 1, 2  # 0: it is gone or outdated


class FileOrder:
    """Gives each row of one table its place in a file: those that changed first, each part in the order it had before.

    before    c a e | b d           two versions, newest first; b and e change, f is new, d is gone
    now       e b f | c a           whole: what changed, then the rest
              e b f                 changed: nothing else

    Note all rows, `settle`, then ask for places in the same order.

    It takes 5 bytes for each row of the version before. `found` keeps blocks of `before`, 8 bytes a row, so that a
    changed version looks each row up once.
    """

    def __init__(self, num_before: int) -> None:
        """`num_before`: rows of all versions before, with those that are outdated."""
        self._marks = np.zeros(num_before, np.uint8)
        self._places = np.empty(0, np.uint32)
        self.found = deque[I64]()
        self._num_new = 0
        self._first_new = 0
        self.num_rows = 0

    def changed(self, before: I64) -> None:
        """`before`: where rows that changed were, or ABSENT."""
        self._marks[before[before != ABSENT]] = CHANGED

    def stays(self, before: I64) -> None:
        """`before`: of any rows of the version. Those that are new count here."""
        known = before[before != ABSENT]
        self._marks[known] = np.maximum(self._marks[known], STAYS)
        self._num_new += len(before) - len(known)

    def settle(self) -> None:
        self._places = np.empty(len(self._marks), np.uint32)
        self._first_new = number(self._marks, CHANGED, 0, self._places)
        self.num_rows = number(self._marks, STAYS, self._first_new + self._num_new, self._places)

    def places(self, before: I64) -> I64:
        """Returns the rows' places; new rows get theirs in the order of the calls."""
        out = np.empty(len(before), np.int64)
        is_new = before == ABSENT
        out[~is_new] = self._places[before[~is_new]]
        count = int(is_new.sum())
        out[is_new] = np.arange(self._first_new, self._first_new + count)
        self._first_new += count
        return out


@compiled_loop
def number(marks: Bytes, mark: int, first: int, places: U32) -> int:
    """Numbers what has the mark from `first` on; returns the next number."""
    for i in range(len(marks)):
        if marks[i] == mark:
            places[i] = first
            first += 1
    return first


MOST_ROWS = 2**32 - 1  # of a table, as an index has places of 32 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The sources of a version."""

    root: Path  # of the checkpoints
    manifest: Manifest
    tables: SavedTables
    layers: tuple[RowLayer, ...]  # with all rows of the version
    whole: Collection[int]  # tables of which it has every row, by index: no rule makes the first values
    changed: tuple[RowLayer, ...]  # of these, with the rows that changed since the version before
    before: Snapshot | None
    dtype: DType


class WritableFile:
    """A new file of a size, mapped. Its room is there before the first write."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self.content: Bytes = np.empty(0, np.uint8)
        with path.open("w+b") as file:
            if nbytes:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self.content = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)

    def finish(self) -> FileChecksums:
        self.content = np.empty(0, np.uint8)  # unmapped with its last view
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        return FileChecksums(name=self.path.name, nbytes=self.nbytes, checksums=checksums_of(self.path))


def write_tables(folder: Path, content: Content) -> tuple[TableFiles, ...]:
    """Raises ConfigError if the disk has no room or the dtype cannot hold a value, DataError for a damaged layer."""
    orders = [order for group in content.tables.groups for order in orders_of(content, group)]
    by_table = {table.index: (table, order) for table, order in orders}
    check_room(folder, content, by_table)
    written = [own for group in content.tables.groups for own in write_group(folder, content, group, by_table)]
    return tuple(files for _, files in sorted(written, key=lambda pair: pair[0]))


def trained(
    content: Content, layers: tuple[RowLayer, ...], group: GroupSpec
) -> Iterator[tuple[TableSpec, Iterator[Block]]]:
    own, whole = content.tables, content.whole if layers == content.layers else ()
    return CheckpointRows(content.root, layers, own.written, own.first, whole).tables(group)


def orders_of(content: Content, group: GroupSpec) -> list[tuple[TableSpec, FileOrder]]:
    orders = {
        table.index: FileOrder(0 if content.before is None else int(content.before.tables[table.name].starts[-1]))
        for table in group.tables
    }
    is_changed = content.changed == content.layers  # then one pass is enough
    for table, blocks in trained(content, content.changed, group):
        for rows, _ in blocks:
            before = places_before(content, table, rows)
            orders[table.index].changed(before)
            if is_changed:
                orders[table.index].stays(before)
                orders[table.index].found.append(before)
    for table, blocks in trained(content, () if is_changed else content.layers, group):
        for rows, _ in blocks:
            orders[table.index].stays(places_before(content, table, rows))
    for table in group.tables:
        orders[table.index].settle()
        if orders[table.index].num_rows > MOST_ROWS:
            raise ConfigError(
                f"table {table.name} has {orders[table.index].num_rows} trained rows, more than the {MOST_ROWS} that a "
                "version can hold; divide the table"
            )
    return [(table, orders[table.index]) for table in group.tables]


def places_before(content: Content, table: TableSpec, rows: I64) -> I64:
    if content.before is None:
        return np.broadcast_to(np.int64(ABSENT), len(rows))  # takes no memory
    return content.before.tables[table.name].places(rows)


def check_room(folder: Path, content: Content, orders: dict[int, tuple[TableSpec, FileOrder]]) -> None:
    assert content.manifest.dense is not None, "the checkpoint of a trained model has dense weights"
    needed = content.manifest.dense.nbytes + sum(
        order.num_rows * row_layout(content.dtype, table).stride + num_cells(order.num_rows) * CELL_BYTES
        for table, order in orders.values()
    )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RowcastError(
            f"{folder.parent}: the version takes {human_bytes(needed)}, but {human_bytes(free)} are free; free "
            "space, the version before stays"
        )


def write_group(
    folder: Path, content: Content, group: GroupSpec, orders: dict[int, tuple[TableSpec, FileOrder]]
) -> Iterator[tuple[int, TableFiles]]:
    for table, blocks in trained(content, content.layers, group):
        order, layout = orders[table.index][1], row_layout(content.dtype, table)
        cells = num_cells(order.num_rows)
        rows_file = WritableFile(folder / f"{table.index:03d}.rows", order.num_rows * layout.stride)
        index_file = WritableFile(folder / f"{table.index:03d}.index", cells * CELL_BYTES)
        out = rows_file.content.reshape(order.num_rows, layout.stride)
        index = Index(index_file.content[: 4 * cells].view(np.uint32), index_file.content[4 * cells :].view(np.uint16))
        for rows, records in blocks:
            values = weights_of(group, records)
            held = holds(layout, values)
            if not held.all():
                row = np.argmin(held)
                name, is_finite = f"row {rows[row]} of table {table.name}", np.isfinite(values[row]).all()
                raise ConfigError(
                    f"{name} has a value that {content.dtype} cannot hold; publish with --dtype fp32 to another folder"
                    if is_finite
                    else f"{name} is not finite: training had diverged; start the run again, which continues it from "
                    "an older checkpoint, and publish its next one"
                )
            before = order.found.popleft() if order.found else places_before(content, table, rows)
            places = order.places(before)
            out[places] = encoded(layout, rows, values)
            put_all(index, rows, places)
        del out, index
        crash_point("version rows written")
        yield (
            table.index,
            TableFiles(
                name=table.name,
                num_rows=order.num_rows,
                stride=layout.stride,
                rows=rows_file.finish(),
                index=index_file.finish(),
            ),
        )


def weights_of(group: GroupSpec, records: Records) -> F32:
    """Returns f32 [n, width]: what look-ups read, never masters."""
    part = group.parts[0]
    return widened(elements_of(np.ascontiguousarray(records), part), part.dtype)


def write_dense(folder: Path, content: Content) -> FileChecksums:
    state = SavedModelState(content.root, content.manifest)
    if not state.tensors:
        raise DataError(f"{content.root / content.manifest.name} has no dense weights")
    path = folder / DENSE_NAME
    header, _ = make_header(state.tensors)
    with path.open("wb") as file:
        file.write(header)
        for name in state.tensors:
            for block in state.blocks(name):
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
        nbytes = file.tell()
    return FileChecksums(name=path.name, nbytes=nbytes, checksums=checksums_of(path))
