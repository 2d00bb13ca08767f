"""Restores the rows of one shard and the model state of a checkpoint, and compares checksums while reading.

    a checkpoint of 4 shards      |     0      |      1       |     2      |      3       |
    read by 2                     |      0: all of 0 and 1    |      1: all of 2 and 3    |
    read by 8                     |   0  |  1  |  2   |   3   |  4  |  5   |   6   |  7   |      half of the rows of one

A prefetcher reads the files of shards that overlap its range of the line (`protocol/parts.py`), and keeps its rows. If
other tables were placed whole, or blocks had another size, it reads those of all shards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.checkpoints.pieces import cuts_of, saved_rows
from rowcast.prefetcher.checkpoints.row_files import Rows, read_rows
from rowcast.prefetcher.checkpoints.saved_tables import saved_groups
from rowcast.prefetcher.checkpoints.tensor_files import BLOCK_BYTES
from rowcast.prefetcher.stores.store import Keys, finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.parts import BLOCK_BITS, Shards
from rowcast.runtime.checkpoint_manifest import Manifest, Points, RowFile, RowLayer, checked_file
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import DataError


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
        """Yields the shards of a checkpoint that may have rows of this one."""
        for number, shard in enumerate(manifest.shards):
            bits = self.block_bits if len(manifest.shards) == 1 else manifest.block_bits
            held = OwnShard(number=number, count=len(manifest.shards), points=manifest.points, block_bits=bits)
            if self.overlaps(held):
                yield ShardPart(layers=shard.layers, held=held, wanted=self)

    def owned(self, group: GroupSpec, rows: Rows) -> Rows:
        """Returns the rows that belong to this shard."""
        if self.count == 1:
            return rows
        (keys, records), own = rows, self.owns(group, rows[0])
        return rows if own.all() else (keys[own], records[own])

    def owns(self, group: GroupSpec, keys: Keys) -> npt.NDArray[np.bool_]:
        of_tables = [own[:1] for own in self.points], [(point,) for own in self.points for point in own[1:]]
        points = dict(enumerate(chain(*of_tables)))  # by index: see `specs_of`
        tables = [replace(table, point=next(iter(points.get(table.index, ())), None)) for table in group.tables]
        own: npt.NDArray[np.bool_] = Shards(tables, self.count, self.block_bits).owners(keys) == self.number
        return own


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
