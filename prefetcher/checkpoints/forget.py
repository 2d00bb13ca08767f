"""Implements `rowcast forget`: gives rows that were not trained for long their first values and state.

    train steps    0 ........ 100 ........ 200 ........ 300
    layers           until 100  until 200    until 300           before, with a `forget` at each of these steps
                                until 200    until 300           after that at 300, --untrained-for 200

A `forget` marks the layers written since the one before; merges keep layers with other marks apart. The next ones leave
out the oldest layers, by these marks alone. So which rows go depends only on the data and the steps of each `forget`,
never on where checkpoints lie, what was merged, or the number of ranks. A row in no layer has its first value.
"""

from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from rowcast.job.schema import Job
from rowcast.prefetcher.checkpoints.commit import publish
from rowcast.prefetcher.checkpoints.folder import Checkpoints, carry_out, softly
from rowcast.prefetcher.checkpoints.row_files import layers_of
from rowcast.prefetcher.checkpoints.saved_tables import saved_tables
from rowcast.prefetcher.stores.redis_store import remove_left_keys
from rowcast.runtime.checkpoint_manifest import MANIFEST_VERSION, Manifest, RowLayer, ShardLayers
from rowcast.runtime.disk import Disk, seal
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.run_directory import RunDirectory, pair_folder

LEAST_VERSION = 4  # older manifests cannot be changed
MARKS = 4  # at most MARKS + 1 marks within `untrained_for` steps: layers with other marks are never merged


def forget_rows(run_dir: Path, untrained_for: int) -> tuple[Manifest, int]:
    """Leaves rows out of the newest checkpoint of a stopped run. Returns it and the number of these rows, each once
    for every layer that had it.

    `untrained_for`: train steps. Raises ConfigError, and DataError if no checkpoint is whole."""
    checkpoints = Checkpoints(run_dir, Disk())
    checkpoints.back_from("")  # refuses a folder that is no run, before it is locked
    with ExitStack() as stack:
        stack.enter_context(RunDirectory(run_dir, "prefetcher"))
        carry_out(checkpoints.settle())
        manifest = checkpoints.newest_valid()
        assert manifest is not None, "there is a checkpoint"
        if manifest.script is not None or manifest.version < LEAST_VERSION:
            raise ConfigError(
                f"{checkpoints.root / manifest.name} is of a script or an older version; only rows of a job that this "
                "version has trained are forgotten"
            )
        job = saved_tables(checkpoints.root, manifest).job
        check_steps(job, untrained_for)
        count = job.ranks.count
        for folder in (pair_folder(run_dir, rank, count) for rank in range(count)):
            if folder != run_dir and folder.is_dir():
                stack.enter_context(RunDirectory(folder, "prefetcher"))
            remove_left_keys(job, folder)
        after = without_old(manifest, untrained_for)
        if after.shards != manifest.shards:
            carry_out(publish(checkpoints.disk, checkpoints.root / manifest.name, after))
            carry_out(softly(checkpoints.collect_garbage(manifest.run_id)))
        return after, manifest.num_rows - after.num_rows


def check_steps(job: Job, untrained_for: int) -> None:
    every = job.checkpoint.interval
    if every != "epoch" and untrained_for < every:
        raise ConfigError(
            f"--untrained-for {untrained_for} is less than the {every} train steps between two checkpoints; give "
            f"at least {every}, or set a smaller checkpoint.every"
        )


def without_old(manifest: Manifest, untrained_for: int) -> Manifest:
    """Returns the manifest without layers of that age, and with the newest ones marked."""
    now = manifest.train_steps
    last = max(layer.until for layer in manifest.layers)
    marks = now if not last or MARKS * (now - last) >= untrained_for else 0
    shards = tuple(replace(shard, layers=kept_of(shard, now - untrained_for, marks)) for shard in manifest.shards)
    lost = any(len(shard.layers) < len(before.layers) for shard, before in zip(shards, manifest.shards, strict=True))
    if lost:  # the next version for serving must be whole: changed rows do not show which ones were left out
        shards = tuple(replace(shard, layers=tuple(replace(own, after="") for own in shard.layers)) for shard in shards)
    return seal(
        replace(manifest, version=MANIFEST_VERSION, shards=shards, forgot=now if lost else manifest.forgot, checksum="")
    )


def kept_of(shard: ShardLayers, oldest: int, marks: int) -> tuple[RowLayer, ...]:
    """`oldest`: train steps; layers that ended by then go. `marks`: of layers without one."""
    kept = (layer for layer in shard.layers if not 0 < layer.until <= oldest)
    return layers_of(tuple(replace(layer, until=layer.until or marks) for layer in kept), [], "")
