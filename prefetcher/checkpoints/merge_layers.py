"""Merges the sorted files of several layers; the newest layer that has a row wins.

base     k1 . k3 k4 . . k7          a cursor per layer, each with one file in memory; a block of the merge ends at the
delta    .  k2 k3 .  .  k6 .        smallest key that every cursor has reached
merged   k1 k2 k3 k4 .  k6 k7
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.checkpoints.row_files import Rows, read_rows
from rowcast.runtime.checkpoint_manifest import RowFile, RowLayer

MERGE_BYTES = 4 * 2**20  # of each layer, per block
MAX_LAYERS = 16


class LayerCursor:
    """Iterates over the rows of one layer."""

    def __init__(self, root: Path, group: GroupSpec, files: tuple[RowFile, ...]) -> None:
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


def merged(root: Path, group: GroupSpec, layers: tuple[RowLayer, ...]) -> Iterator[Rows]:
    """Yields a group's rows by ascending key, in blocks; `layers` are oldest first. Raises DataError."""
    cursors = [LayerCursor(root, group, layer.of_group(group.name)) for layer in reversed(layers)]
    while cursors := [cursor for cursor in cursors if not cursor.ended]:
        last_key = min(cursor.reached for cursor in cursors)
        parts = [cursor.take(last_key) for cursor in cursors]  # newest first
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


def must_merge(older: tuple[RowLayer, ...]) -> bool:
    """Whether the layers become one before another is added."""
    return len(older) >= MAX_LAYERS or sum(layer.num_rows for layer in older[1:]) > older[0].num_rows
