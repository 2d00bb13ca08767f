"""Writes and reads row files: the rows of one group by ascending key, about 64 MiB each.

Every function that writes is a generator that yields after each file operation, so that a stage can do one operation at
a time. Where several layers have a row, `merged` takes that of the newest:

base     k1 . k3 k4 . . k7          a cursor per layer, each with one file in memory; a block of the merge ends at the
delta    .  k2 k3 .  .  k6 .        smallest key that every cursor has reached
merged   k1 k2 k3 k4 .  k6 k7

Files are in the format of safetensors.
"""

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from rowcast.job.tables import GROUP_NAME, KEY_SHIFT, ROW_MASK, GroupSpec
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.runtime.arrays import Bytes
from rowcast.runtime.checkpoint_manifest import MAX_KEY, RowFile, RowLayer, differs
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.disk import Content, Disk
from rowcast.runtime.errors import DataError
from rowcast.runtime.tensor_file import BLOCK_BYTES, TensorSpec, make_header

ROW_FILE_BYTES = 64 * 2**20
MERGE_BYTES = 4 * 2**20  # of each layer, per block
MAX_LAYERS = 16
NEW_NAME = rf"(?:dense|{GROUP_NAME}(?:-r[0-9]{{3,}})?)-[0-9]{{5,}}\.safetensors"  # of `new_path`

Rows = tuple[Keys, Records]
Steps = Generator[bool, None, None]  # True for each operation done; False if there is nothing to do yet


class HashingWriter:
    """Writes a file, and knows its size and checksum without reading it back."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self.nbytes = 0
        self._hasher = xxhash.xxh3_64()
        self._file = disk.create(path)

    @property
    def checksum(self) -> str:
        return self._hasher.hexdigest()

    def write(self, content: Content) -> None:
        self._file.write(content)
        self._hasher.update(content)
        self.nbytes += len(content)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def blocks_of(array: npt.NDArray[np.generic]) -> Iterator[memoryview]:
    content = np.ascontiguousarray(array).data.cast("B")
    for start in range(0, len(content), BLOCK_BYTES):
        yield content[start : start + BLOCK_BYTES]


class RowFiles:
    """Gathers one layer's rows and writes them to a checkpoint's folder, a file at a time."""

    def __init__(self, disk: Disk, folder: Path, tag: str = "") -> None:
        """`tag`: a suffix of the group in file names, so that several ranks can write to one folder."""
        self.files: list[RowFile] = []
        self._tag = tag
        self._disk = disk
        self._folder = folder
        self._group: GroupSpec | None = None
        self._gathered: list[Rows] = []
        self._gathered_bytes = 0
        self._numbers = count()

    def add(self, group: GroupSpec, keys: Keys, records: Records) -> Steps:
        """Adds rows: groups in order, a group's keys ascending. Uses the arrays until their file is written."""
        assert records.shape == (len(keys), group.record_bytes), (
            f"records {records.shape} for {len(keys)} rows of {group.record_bytes}"
        )
        if self._group is not group or self._gathered_bytes >= ROW_FILE_BYTES:
            yield from self.flush()
        if self._group is not group:
            self._group, self._numbers = group, count()
        if len(keys):
            written = self.files[-1].last_key if self.files and self.files[-1].group == group.name else None
            before = self._gathered[-1][0][-1] if self._gathered else written
            assert before is None or before < keys[0], f"key {keys[0]} comes after {before}"
            assert (keys[1:] > keys[:-1]).all(), "keys of a block must be ascending"
            self._gathered.append((keys, records))
            self._gathered_bytes += keys.nbytes + records.nbytes

    def flush(self) -> Steps:
        if not self._gathered:
            return
        assert self._group is not None, "rows must belong to a group"
        rows, self._gathered, self._gathered_bytes = self._gathered, [], 0
        path = new_path(self._folder, f"{self._group.name}{self._tag}", self._numbers)
        num_rows = sum(len(keys) for keys, _ in rows)
        with closing(HashingWriter(self._disk, path)) as file:
            yield True
            for content in row_file_content(rows, num_rows, self._group.record_bytes):
                file.write(content)
                yield True
            file.sync()
        crash_point("row file written")
        self.files.append(
            RowFile(
                group=self._group.name,
                file=f"{self._folder.name}/{path.name}",
                first_key=int(rows[0][0][0]),
                last_key=int(rows[-1][0][-1]),
                num_rows=num_rows,
                nbytes=file.nbytes,
                checksum=file.checksum,
            )
        )
        yield True


def new_path(folder: Path, name: str, numbers: Iterator[int]) -> Path:
    """Returns an unused path for a row file or a dense file: a manifest may name an existing one."""
    paths = (folder / f"{name}-{number:05d}.safetensors" for number in numbers)
    return next(path for path in paths if not os.path.lexists(path))


def row_file_header(num_rows: int, record_bytes: int) -> bytes:
    """Returns the only header that a file with this number of rows can have."""
    header, _ = make_header(
        {
            "keys": TensorSpec(dtype="I64", shape=(num_rows,), nbytes=8 * num_rows),
            "records": TensorSpec(dtype="U8", shape=(num_rows, record_bytes), nbytes=num_rows * record_bytes),
        }
    )
    return header


def row_file_content(rows: list[Rows], num_rows: int, record_bytes: int) -> Iterator[Content]:
    yield row_file_header(num_rows, record_bytes)
    for keys, _ in rows:
        yield from blocks_of(keys)
    for _, records in rows:
        yield from blocks_of(records)


def read_rows(root: Path, group: GroupSpec, file: RowFile) -> Rows:
    """Reads a file after comparing its checksum and checking that every key is a row of the group. Raises DataError."""
    path = root / file.file
    content = read_checked(path, file)
    header = row_file_header(file.num_rows, group.record_bytes)
    records_at = len(header) + 8 * file.num_rows
    if bytes(content[: len(header)]) != header or len(content) != records_at + file.num_rows * group.record_bytes:
        raise DataError(
            f"{path}: not a file of {file.num_rows} rows of {group.record_bytes} bytes, as the manifest says"
        )
    keys = content[len(header) : records_at].view(np.int64)
    check_keys(path, group, file, keys)
    return keys, content[records_at:].reshape(file.num_rows, group.record_bytes)


def read_checked(path: Path, file: RowFile) -> Bytes:
    try:
        with path.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            content = np.empty(size if size == file.nbytes else 0, np.uint8)
            size = opened.readinto(content.data) if len(content) else size
    except OSError as error:
        raise DataError(f"{path}: a file of the checkpoint cannot be read ({error.strerror})") from None
    found = size, xxhash.xxh3_64_hexdigest(content.data)
    if found != (file.nbytes, file.checksum):
        raise differs(path, found, file.nbytes, file.checksum)
    return content


def check_keys(path: Path, group: GroupSpec, file: RowFile, keys: Keys) -> None:
    if (keys[0], keys[-1]) != (file.first_key, file.last_key) or not (keys[1:] > keys[:-1]).all():
        raise DataError(f"{path}: keys do not ascend from {file.first_key} to {file.last_key}, as the manifest says")
    sizes = {table.index: table.num_embeddings for table in group.tables}
    tables = keys >> KEY_SHIFT
    for table in np.unique(tables).tolist():
        last = int(keys[np.searchsorted(tables, table, side="right") - 1]) & ROW_MASK
        if last >= sizes.get(table, 0):
            raise DataError(f"{path}: row {last} of table {table} is not in group {group.name}")


class LayerCursor:
    """Iterates over the rows of one layer."""

    def __init__(self, root: Path, group: GroupSpec, files: Iterable[RowFile]) -> None:
        self._root = root
        self._group = group
        self._files = iter(files)
        self._block_rows = max(1, MERGE_BYTES // group.record_bytes)
        self._rows: Rows | None = None
        self._at = 0
        self._load()

    @property
    def ended(self) -> bool:
        return self._rows is None

    @property
    def reached(self) -> int:
        """The last key of this layer's next block."""
        assert self._rows is not None, "a cursor that has ended reaches nothing"
        keys = self._rows[0]
        return int(keys[min(self._at + self._block_rows, len(keys)) - 1])

    def take(self, last_key: int) -> Rows:
        assert self._rows is not None, "a cursor that has ended gives nothing"
        keys, records = self._rows
        end = int(np.searchsorted(keys, last_key, side="right"))
        taken = keys[self._at : end], records[self._at : end]
        self._at = end
        if end == len(keys):
            self._load()
        return taken

    def _load(self) -> None:
        file = next(self._files, None)
        self._rows, self._at = None if file is None else read_rows(self._root, self._group, file), 0


def merged(
    root: Path, group: GroupSpec, layers: tuple[RowLayer, ...], first_key: int = 0, last_key: int = MAX_KEY
) -> Iterator[Rows]:
    """Yields a group's rows by ascending key, in blocks; `layers` are oldest first. Leaves out files that have no key
    of the range. Raises DataError."""
    own = [[file for file in layer.of_group(group.name) if file.spans(first_key, last_key)] for layer in layers]
    cursors = [LayerCursor(root, group, files) for files in reversed(own)]
    while cursors := [cursor for cursor in cursors if not cursor.ended]:
        reached = min(cursor.reached for cursor in cursors)
        parts = [cursor.take(reached) for cursor in cursors]  # newest first
        parts = [(keys, records) for keys, records in parts if len(keys)]
        yield parts[0] if len(parts) == 1 else newest_of(parts)


def newest_of(parts: list[Rows]) -> Rows:
    keys, first = np.unique(np.concatenate([keys for keys, _ in parts]), return_index=True)
    return keys, np.concatenate([records for _, records in parts])[first]


def layers_of(older: tuple[RowLayer, ...], written: list[RowFile], after: str) -> tuple[RowLayer, ...]:
    """Returns the `older` layers and one of the files just written, whose rows changed since the manifest `after`.
    Layers without rows are omitted, except a base."""
    new = RowLayer(kind="delta", num_rows=sum(file.num_rows for file in written), files=tuple(written), after=after)
    base, *deltas = [layer for layer in (*older, new) if layer.files] or [new]
    return replace(base, kind="base", after=""), *deltas


def by_age(layers: tuple[RowLayer, ...]) -> list[tuple[RowLayer, ...]]:
    """Returns together what was trained between the same two `forget`, oldest first."""
    ends = sorted({layer.until for layer in layers}, key=lambda until: until or MAX_KEY)
    return [tuple(layer for layer in layers if layer.until == end) for end in ends]


def must_merge(older: tuple[RowLayer, ...]) -> bool:
    """Whether the layers of each age become one before another is added."""
    oldest = [of_age[0] for of_age in by_age(older)]
    num_rows, added = sum(layer.num_rows for layer in oldest), len(older) - len(oldest)
    return added >= MAX_LAYERS - 1 or sum(layer.num_rows for layer in older) > 2 * num_rows
