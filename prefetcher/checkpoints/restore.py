"""Reads the rows and the model state of a checkpoint, and compares checksums while reading.

    a checkpoint of 4 shards      |     0      |      1       |     2      |      3       |
    read by 2                     |      0: all of 0 and 1    |      1: all of 2 and 3    |
    read by 8                     |   0  |  1  |  2   |   3   |  4  |  5   |   6   |  7   |      half of the rows of one

A prefetcher reads the files of shards that overlap its range of the line (`protocol/parts.py`), and keeps its rows. If
other tables were placed whole, or blocks had another size, it reads the files of all shards.

Each file has the pieces of tables that one rank owned. Look-ups of a row train all its pieces, so a checkpoint has the
same rows of each:

    saved by the owners    row 1: [0:4]  row 4: [0:4]    row 1: [4:8]  row 4: [4:8]
    wanted                 row 1: [0:8]  row 4: [0:8]
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec, TableSpec
from rowcast.prefetcher.checkpoints.row_files import Rows, merged, read_rows, row_file_header
from rowcast.prefetcher.checkpoints.saved_tables import saved_groups
from rowcast.prefetcher.stores.records import elements_of, first_records
from rowcast.prefetcher.stores.store import Keys, Records, finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.parts import BLOCK_BITS, Shards
from rowcast.runtime.checkpoint_manifest import Manifest, Points, RowFile, RowLayer, checked_file
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import DataError
from rowcast.runtime.tensor_file import BLOCK_BYTES

NO_ROWS = np.empty(0, np.int64)
TablePiece = tuple[GroupSpec, TableSpec]


class AscendingRows:
    """Re-cuts blocks of rows by ascending key to the requested ranges."""

    def __init__(self, blocks: Iterator[Rows]) -> None:
        self._blocks = blocks
        self._rows: Rows | None = None

    def up_to(self, last_key: int) -> Iterator[Rows]:
        while (block := self._next()) is not None:
            keys, records = block
            end = int(np.searchsorted(keys, last_key, side="right"))
            self._rows = (keys[end:], records[end:]) if end < len(keys) else None
            if end:
                yield keys[:end], records[:end]
            if end < len(keys):
                return

    def of_table(self, table: TableSpec) -> Iterator[Rows]:
        first = table.index << KEY_SHIFT
        for _ in self.up_to(first - 1):
            pass
        yield from self.up_to(first | ROW_MASK)

    @property
    def reached(self) -> int | None:
        """The last key of the next block; None if there is none."""
        self._rows = self._next()
        return None if self._rows is None else int(self._rows[0][-1])

    def _next(self) -> Rows | None:
        return next(self._blocks, None) if self._rows is None else self._rows


def saved_rows(
    root: Path, group: GroupSpec, saved: Sequence[GroupSpec], layers: tuple[RowLayer, ...]
) -> Iterator[Rows]:
    """Yields a group's rows by ascending key, in blocks; `layers` are oldest first. `saved`: the groups that were
    written, of the same tables, maybe in other pieces. Raises DataError."""
    own = [written for written in saved if written.name == group.name]
    together = AscendingRows(chain.from_iterable(merged(root, written, layers) for written in own))
    by_name = pieces_by_name(saved)
    for table in group.tables:
        pieces = pieces_of(table, by_name)
        if pieces[0][0].name == group.name and pieces[0][1].index == table.index:
            yield from together.of_table(table)
        else:
            yield from recut(root, (group, table), pieces, layers)


def cuts_of(points: Points) -> dict[int, int]:
    """Returns the number of pieces of each table that is cut, by its position in the job."""
    return {table: len(cuts) for table, cuts in enumerate(points) if len(cuts) > 1}


def pieces_by_name(saved: Sequence[GroupSpec]) -> dict[str, list[TablePiece]]:
    """Returns the pieces of each table, in the order of their columns."""
    pieces: dict[str, list[TablePiece]] = {}
    for group in saved:
        for table in group.tables:
            pieces.setdefault(table.name, []).append((group, table))
    return pieces


def pieces_of(table: TableSpec, by_name: Mapping[str, Sequence[TablePiece]]) -> list[TablePiece]:
    """Returns the pieces that have some of its columns."""
    first, end = table.first_column, table.first_column + table.embedding_dim
    columns = [(piece.first_column, piece.first_column + piece.embedding_dim) for _, piece in by_name[table.name]]
    return [
        piece for piece, (start, stop) in zip(by_name[table.name], columns, strict=True) if start < end and stop > first
    ]


def recut(root: Path, wanted: TablePiece, pieces: Sequence[TablePiece], layers: tuple[RowLayer, ...]) -> Iterator[Rows]:
    table, streams = wanted[1], [AscendingRows(rows_of(root, piece, layers)) for piece in pieces]
    while any(stream.reached is not None for stream in streams):
        last = min(reached for stream in streams if (reached := stream.reached) is not None)
        blocks = [list(stream.up_to(last)) for stream in streams]
        rows, *others = [np.concatenate([NO_ROWS, *(own for own, _ in block)]) for block in blocks]
        if not all(np.array_equal(rows, rows_of_piece) for rows_of_piece in others):
            raise DataError(
                f"{root}: pieces of table {table.name} do not have the same rows up to row {last}; start from another "
                "checkpoint"
            )
        records = [np.concatenate([own for _, own in block]) for block in blocks]
        yield rows | table.index << KEY_SHIFT, with_columns(wanted, pieces, records)


def rows_of(root: Path, piece: TablePiece, layers: tuple[RowLayer, ...]) -> Iterator[Rows]:
    """Yields the rows of one table in ascending order, by their ids."""
    group, table = piece
    first, last = table.index << KEY_SHIFT, table.index << KEY_SHIFT | ROW_MASK
    for keys, records in AscendingRows(merged(root, group, layers, first, last)).of_table(table):
        yield keys & ROW_MASK, records


def with_columns(wanted: TablePiece, pieces: Sequence[TablePiece], found: Sequence[Records]) -> Records:
    """Returns the records of rows of a table from those of the pieces that have its columns."""
    (group, table), records = wanted, np.zeros((len(found[0]), wanted[0].record_bytes), np.uint8)
    for (saved, piece), piece_records in zip(pieces, found, strict=True):
        start = max(table.first_column, piece.first_column)
        end = min(table.first_column + table.embedding_dim, piece.first_column + piece.embedding_dim)
        to, of = (slice(start - first, end - first) for first in (table.first_column, piece.first_column))
        for part, written in zip(group.parts, saved.parts, strict=True):
            elements_of(records, part)[:, to] = elements_of(piece_records, written)[:, of]
    return records


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnShard:
    number: int  # 0 to count - 1
    count: int
    points: Points = ()  # of tables that are placed whole, as in a manifest
    block_bits: int = BLOCK_BITS

    def __post_init__(self) -> None:
        assert 0 <= self.number < self.count, f"shard {self.number} of {self.count}"

    @property
    def tag(self) -> str:
        """The suffix of the group's name in its row files' names; empty for a single shard."""
        return "" if self.count == 1 else f"-r{self.number:03d}"

    def overlaps(self, other: "OwnShard") -> bool:
        """Returns whether a row may belong to both: to this one of `count` shards, and to the other one of
        `other.count`."""
        if (self.points, self.block_bits) != (other.points, other.block_bits):
            return True
        first = self.number * other.count < (other.number + 1) * self.count
        return first and other.number * self.count < (self.number + 1) * other.count

    def parts_of(self, manifest: Manifest) -> Iterator["ShardPart"]:
        """Yields the shards of a checkpoint that may have rows of this shard."""
        for number, shard in enumerate(manifest.shards):
            bits = self.block_bits if len(manifest.shards) == 1 else manifest.block_bits
            held = OwnShard(number=number, count=len(manifest.shards), points=manifest.points, block_bits=bits)
            if self.overlaps(held):
                yield ShardPart(layers=shard.layers, held=held, wanted=self)

    def owned(self, group: GroupSpec, rows: Rows) -> Rows:
        """Returns the rows that belong to this shard."""
        if self.count == 1:
            return rows
        (keys, records), is_ours = rows, self.owns(group, rows[0])
        return rows if is_ours.all() else (keys[is_ours], records[is_ours])

    def owns(self, group: GroupSpec, keys: Keys) -> npt.NDArray[np.bool_]:
        of_tables = (
            [own[:1] for own in self.points],
            [(point,) for table_points in self.points for point in table_points[1:]],
        )
        points = dict(enumerate(chain(*of_tables)))  # by index: see `specs_of`
        tables = [replace(table, point=next(iter(points.get(table.index, ())), None)) for table in group.tables]
        is_ours: npt.NDArray[np.bool_] = Shards(tables, self.count, self.block_bits).owners(keys) == self.number
        return is_ours


ALONE = OwnShard(number=0, count=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPart:
    """Reads the rows of the shard `wanted` from a checkpoint's shard `held`."""

    layers: tuple[RowLayer, ...]  # oldest first
    held: OwnShard
    wanted: OwnShard

    def read(self, root: Path, group: GroupSpec, file: RowFile) -> Rows:
        """Returns the wanted rows of a file. Raises DataError if it has rows of a wrong shard."""
        rows = read_rows(root, group, file)
        if self.held.count > 1:
            strange = np.flatnonzero(~self.held.owns(group, rows[0]))
            if len(strange):
                raise DataError(
                    f"{root / file.file}: key {rows[0][strange[0]]} is not of shard {self.held.number} of "
                    f"{self.held.count}, whose files the manifest names"
                )
        return rows if self.held == self.wanted else self.wanted.owned(group, rows)


def is_cut_anew(manifest: Manifest, shard: OwnShard) -> bool:
    return cuts_of(manifest.points) != cuts_of(shard.points)


def restore_rows(
    root: Path, manifest: Manifest, groups: Sequence[GroupSpec], stores: Sequence[TrackedStore], shard: OwnShard = ALONE
) -> None:
    """Fills empty stores with the rows of a shard, oldest layer first, with one file in memory: of each layer, if the
    tables were cut into other pieces. Raises DataError with the damaged file."""
    if is_cut_anew(manifest, shard):
        saved = saved_groups(root, manifest)
        for group, store in zip(groups, stores, strict=True):
            for rows in saved_rows(root, group, saved, manifest.layers):
                finish(store.write(*shard.owned(group, rows)))
            store.settle()
        return
    for part in shard.parts_of(manifest):
        for layer in part.layers:
            for group, store in zip(groups, stores, strict=True):
                for file in layer.of_group(group.name):
                    keys, records = part.read(root, group, file)
                    if len(keys):
                        finish(store.write(keys, records))
                    crash_point("file restored")
            crash_point("layer restored")
    for store in stores:
        store.settle()


def restore_changed(
    root: Path, manifest: Manifest, groups: Sequence[GroupSpec], stores: Sequence[TrackedStore], shard: OwnShard = ALONE
) -> None:
    """Rolls stores back to the checkpoint that they continued from; writes only changed rows. Raises DataError."""
    for group, store in zip(groups, stores, strict=True):
        keys = np.sort(np.concatenate([store.changed_keys(table.index) for table in group.tables]))
        for part in shard.parts_of(manifest):
            for layer in reversed(part.layers):
                keys = restore_chosen(root, part, layer, group, store, keys)
        if len(keys):
            store.forget(keys)  # in no layer: they have their first value
        store.settle()
        crash_point("changed rows restored")


def restore_chosen(
    root: Path, part: ShardPart, layer: RowLayer, group: GroupSpec, store: TrackedStore, keys: Keys
) -> Keys:
    for file in layer.of_group(group.name):
        first, end = np.searchsorted(keys, file.first_key), np.searchsorted(keys, file.last_key, side="right")
        if first == end:
            continue
        held, records = part.read(root, group, file)
        if not len(held):
            continue
        positions = np.minimum(np.searchsorted(held, keys[first:end]), len(held) - 1)
        here = held[positions] == keys[first:end]
        if here.any():
            finish(store.write(keys[first:end][here], records[positions[here]]))
            keys = np.concatenate([keys[:first], keys[first:end][~here], keys[end:]])
    return keys


def dense_content(root: Path, manifest: Manifest) -> Iterator[bytes]:
    """Checks the whole dense safetensors file, if there is one, then yields it in blocks. Raises DataError."""
    if manifest.dense is None:
        return
    with checked_file(root, manifest.dense).open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


class SavedRows:
    """Looks up single rows of a group where a checkpoint has them on disk: any rows, in any order, without a store.

    Files are mapped. So only the pages of rows that are looked up are read, and they stay readable after a run has
    removed the files.
    """

    def __init__(self, root: Path, manifest: Manifest, group: GroupSpec, seed: int) -> None:
        """The files were found whole (`Checkpoints.choose`)."""
        self._root, self._group, self._seed = root, group, seed
        self._files = [file for layer in reversed(manifest.layers) for file in layer.of_group(group.name)]

    @cached_property
    def _mapped(self) -> list[Rows]:
        """Newest first. Raises DataError."""
        return [self._map(file) for file in self._files]

    def _map(self, file: RowFile) -> Rows:
        path, header = self._root / file.file, len(row_file_header(file.num_rows, self._group.record_bytes))
        try:
            content = np.memmap(path, np.uint8, mode="r", shape=(file.nbytes,))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: a file of the checkpoint cannot be read ({error}); load the run again") from None
        keys_end = header + 8 * file.num_rows
        return content[header:keys_end].view(np.int64), content[keys_end:].reshape(file.num_rows, -1)

    def records(self, keys: Keys) -> Records:
        """Returns the records u8 [n, record_bytes] of rows by ascending key; first values of those never trained."""
        records = np.empty((len(keys), self._group.record_bytes), np.uint8)
        missing = np.arange(len(keys))
        for held, rows in self._mapped:
            at = np.minimum(np.searchsorted(held, keys[missing]), len(held) - 1)
            here = held[at] == keys[missing]
            records[missing[here]] = rows[at[here]]
            missing = missing[~here]
        records[missing] = first_records(self._group, self._seed, keys[missing])
        return records
