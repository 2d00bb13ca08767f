"""Reads rows of a checkpoint whatever pieces its tables were cut into: each file has the pieces that one rank owned.

    saved by the owners    row 1: [0:4]  row 4: [0:4]    row 1: [4:8]  row 4: [4:8]
    wanted                 row 1: [0:8]  row 4: [0:8]

Look-ups of a row train all its pieces, so a checkpoint has the same rows of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec, Points, TableSpec
from rowcast.prefetcher.checkpoints.row_files import Rows, merged
from rowcast.prefetcher.stores.elements import elements_of
from rowcast.prefetcher.stores.store import Records
from rowcast.runtime.checkpoint_manifest import RowLayer
from rowcast.runtime.errors import DataError

NO_ROWS = np.empty(0, np.int64)
Piece = tuple[GroupSpec, TableSpec]


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
    return {table: len(own) for table, own in enumerate(points) if len(own) > 1}


def pieces_by_name(saved: Sequence[GroupSpec]) -> dict[str, list[Piece]]:
    """Returns the pieces of each table, in the order of their columns."""
    found: dict[str, list[Piece]] = {}
    for group in saved:
        for table in group.tables:
            found.setdefault(table.name, []).append((group, table))
    return found


def pieces_of(table: TableSpec, by_name: Mapping[str, Sequence[Piece]]) -> list[Piece]:
    """Returns the pieces that have some of its columns."""
    first, end = table.first_column, table.first_column + table.embedding_dim
    found = [(piece.first_column, piece.first_column + piece.embedding_dim) for _, piece in by_name[table.name]]
    return [own for own, (start, stop) in zip(by_name[table.name], found, strict=True) if start < end and stop > first]


def recut(root: Path, wanted: Piece, pieces: Sequence[Piece], layers: tuple[RowLayer, ...]) -> Iterator[Rows]:
    table, streams = wanted[1], [AscendingRows(rows_of(root, piece, layers)) for piece in pieces]
    while any(stream.reached is not None for stream in streams):
        last = min(reached for stream in streams if (reached := stream.reached) is not None)
        blocks = [list(stream.up_to(last)) for stream in streams]
        rows, *others = [np.concatenate([NO_ROWS, *(own for own, _ in found)]) for found in blocks]
        if not all(np.array_equal(rows, own) for own in others):
            raise DataError(
                f"{root}: pieces of table {table.name} do not have the same rows up to row {last}; start from another "
                "checkpoint"
            )
        records = [np.concatenate([own for _, own in found]) for found in blocks]
        yield rows | table.index << KEY_SHIFT, with_columns(wanted, pieces, records)


def rows_of(root: Path, piece: Piece, layers: tuple[RowLayer, ...]) -> Iterator[Rows]:
    """Yields the rows of one table in ascending order, by their ids."""
    group, table = piece
    first, last = table.index << KEY_SHIFT, table.index << KEY_SHIFT | ROW_MASK
    for keys, records in AscendingRows(merged(root, group, layers, first, last)).of_table(table):
        yield keys & ROW_MASK, records


def with_columns(wanted: Piece, pieces: Sequence[Piece], found: Sequence[Records]) -> Records:
    """Returns the records of rows of a table from those of the pieces that have its columns."""
    (group, table), records = wanted, np.zeros((len(found[0]), wanted[0].record_bytes), np.uint8)
    for (saved, piece), own in zip(pieces, found, strict=True):
        start = max(table.first_column, piece.first_column)
        end = min(table.first_column + table.embedding_dim, piece.first_column + piece.embedding_dim)
        to, of = (slice(start - first, end - first) for first in (table.first_column, piece.first_column))
        for part, written in zip(group.parts, saved.parts, strict=True):
            elements_of(records, part)[:, to] = elements_of(own, written)[:, of]
    return records
