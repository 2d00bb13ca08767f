"""Commits one checkpoint of all ranks: it exists once rank 0 has written the manifest.

    rank 3    row files | shard-003.json |                                              | sees the manifest, is done
    rank 0    row files | ...            | sees all shard files, which agree | manifest | removes what is old, is done

Every rank stays busy until the manifest exists. So a rank that begins a checkpoint knows that all ranks have finished
the previous one. Rank 0, which alone removes files of other ranks, knows which files are no longer written. A shard
file counts for one attempt: `Checkpoints.withdraw` removes it before the next attempt begins.
"""

import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from pathlib import Path

from rowcast.prefetcher.checkpoints.row_files import Steps
from rowcast.runtime.checkpoint_manifest import MANIFEST_NAME, Manifest, ShardFile, read_shard_file, shard_name
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.disk import Disk, Sealed, render
from rowcast.runtime.errors import DataError

LOOK_EVERY_S = 1.0  # at other ranks' files
GIVE_UP_S = 10.0  # without any change, once the attempt is over


class Abandoned(Exception):
    """The checkpoint in progress was given up."""


class OthersProgress:
    """Watches the sizes of files in the checkpoint's folder, to see whether other ranks still write their shards."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._sizes: dict[str, int] = {}
        self._looked_s = self._changed_s = clock()

    def changed(self) -> bool:
        """Returns whether anything was written since the last call."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return False
        self._looked_s, before = now_s, self._sizes
        with suppress(OSError):  # the folder was renamed, or a file is gone
            self._sizes = {path.name: path.stat().st_size for path in self._folder.iterdir()}
        if self._sizes == before:
            return False
        self._changed_s = now_s
        return True

    @property
    def ended(self) -> bool:
        return self._clock() - self._changed_s > GIVE_UP_S


def synced_partial(disk: Disk, path: Path, content: Sealed) -> Generator[bool, None, Path]:
    """Writes a file under the name that it has until it is renamed to `path`."""
    partial = path.with_name(f"{path.name}.partial")
    with closing(disk.create(partial)) as file:
        yield True
        file.write(render(content))
        yield True
        file.sync()
    yield True
    return partial


def write_shard_file(disk: Disk, folder: Path, shard: ShardFile) -> Steps:
    """Declares the shard durable; its files and the folder must be."""
    path = folder / shard_name(shard.number)
    partial = yield from synced_partial(disk, path, shard)
    crash_point("shard not renamed")
    disk.rename(partial, path)
    yield True
    disk.sync_folder(folder)
    crash_point("shard file written")
    yield True


def gather_shards(
    disk: Disk, folder: Path, shard: ShardFile, is_over: Callable[[], bool]
) -> Generator[bool, None, list[ShardFile]]:
    """Waits for the shard files of all other ranks, and removes them. `is_over`: the checkpoint is no longer needed.

    Raises DataError if one is unreadable or does not agree with `shard`, and Abandoned if they do not arrive."""
    shards, progress = [shard], OthersProgress(folder)
    for number in range(1, shard.count):
        path = folder / shard_name(number)
        while (other := read_shard_file(path)) is None:
            yield look_again(progress, is_over)
        check_agrees(path, number, other, shard)
        shards.append(other)
        yield True
    crash_point("shards agree")
    for number in range(1, shard.count):
        disk.unlink(folder / shard_name(number))
        yield True
    return shards


def look_again(progress: OthersProgress, is_over: Callable[[], bool]) -> bool:
    changed = progress.changed()
    if is_over() and progress.ended:
        raise Abandoned
    return changed


def check_agrees(path: Path, number: int, other: ShardFile, own: ShardFile) -> None:
    """Raises DataError if two ranks write different checkpoints or hold different model states."""
    mine, theirs = (
        (shard.run_id, shard.count, shard.position.step, shard.position, shard.after) for shard in (own, other)
    )
    if mine != theirs or other.number != number:
        raise DataError(
            f"{path}: rank {other.number} of {other.count} has written step {other.position.step} of run "
            f"{other.run_id} after checkpoint {other.after or 'none'}, but this is rank {number} of {own.count}, step "
            f"{own.position.step} of run {own.run_id} after {own.after or 'none'}; stop all processes of the run and "
            "start them again"
        )
    if other.model_state != own.model_state:
        raise DataError(
            f"{path}: the trainer of rank {number} has another model state after step {own.position.step - 1} than "
            f"that of rank 0 (checksum {other.model_state}, not {own.model_state}); the checkpoint before stays. A "
            "script has not added up all dense gradients (DistributedDataParallel, rowcast.sum_gradients), or its "
            "dense= holds a rank's own state, such as running statistics; else check the hardware of both"
        )


def await_manifest(
    look: Callable[[], Manifest | None], folder: Path, shard: ShardFile, is_over: Callable[[], bool]
) -> Generator[bool, None, Manifest]:
    """Waits for the manifest that names `shard`. `look` returns a new manifest of the step, if there is one. Raises
    Abandoned if it does not arrive."""
    progress = OthersProgress(folder)
    while True:
        manifest = look()
        if manifest is not None and (manifest.run_id, manifest.position) == (shard.run_id, shard.position):
            break
        yield look_again(progress, is_over)
    if len(manifest.shards) != shard.count or manifest.shards[shard.number] != shard.shard:
        raise DataError(
            f"{folder}: its manifest does not name what rank {shard.number} of {shard.count} has written; stop all "
            "processes of the run and start them again"
        )
    crash_point("manifest seen")
    return manifest


def publish(disk: Disk, folder: Path, manifest: Manifest) -> Steps:
    path = folder / MANIFEST_NAME
    replaced = path.exists()
    partial = yield from synced_partial(disk, path, manifest)
    try:
        crash_point("manifest not renamed")
        disk.rename(partial, path)
        crash_point("manifest renamed")
        yield True
        disk.sync_folder(folder)
    except OSError:
        if not replaced:  # it may not be durable, so it must not pass for a checkpoint
            with suppress(OSError):
                disk.unlink(path)
        raise
