"""Restores the rows and the model state of a checkpoint, and compares checksums while reading."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.checkpoints.own_shard import ALONE, OwnShard, ShardPart
from rowcast.prefetcher.checkpoints.tensor_files import BLOCK_BYTES
from rowcast.prefetcher.stores.store import Keys, finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.runtime.checkpoint_manifest import Manifest, RowLayer, checked_file
from rowcast.runtime.crash_points import crash_point


def restore_rows(
    root: Path, manifest: Manifest, groups: Sequence[GroupSpec], stores: Sequence[TrackedStore], shard: OwnShard = ALONE
) -> None:
    """Fills empty stores with the rows of a shard, oldest layer first, with one file in memory. Raises DataError with
    the damaged file."""
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
