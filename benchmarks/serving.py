"""What does serving lose and cost: quality of int8, bytes, pages found in memory, processor time of look-ups?

Method: a run of a click log (examples/retail.toml) with a checkpoint every 10 steps and a publisher beside it, int8 and
fp32. `quality`: the held-out tenth, scored from both folders by the job's own model. `bytes`: of the changed versions,
over the checkpoints' newest layers. `memory`: held-out look-ups of trained rows in order, over an LRU of pages (or of
rows) that holds a tenth of the rows' bytes, warmed by as many look-ups of training; by simulation, as the kernel's
cache is only nearly an LRU. `lookups`: CPU time of one thread; with --redis also of MGET, by the client alone, from a
server into which `examples/publish_redis.py` has copied the version.

    python -m benchmarks.serving --run RUN --fp32 FOLDER --int8 FOLDER [--redis redis://127.0.0.1:6379/0]
"""

import argparse
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import redis
import torch

from benchmarks.machine import machine
from examples import publish_redis
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import bag_offsets
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.runtime.checkpoint_manifest import newest_checkpoint, read_manifest
from rowcast.serving import Model
from rowcast.serving.snapshot import Snapshot
from rowcast.trainer.models.evaluate import EvalMetrics
from rowcast.trainer.models.job_model import JobModel

PAGE = 4096
SHARE = 0.1  # of the rows' bytes
LOOKUPS, SAMPLES = 26, 50
ROUNDS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run", "fp32", "int8"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--redis")
    given = parser.parse_args()
    torch.set_num_threads(1)
    exact, rounded = (Model(folder, check="all").now() for folder in (given.fp32, given.int8))
    print(machine())
    for name, now in (("fp32", exact), ("int8", rounded)):
        print(f"quality, {name}: AUC {{:.6f}}, log loss {{:.6f}}".format(*quality(now)))
    lookups(rounded)
    if given.redis:
        redis_lookups(rounded, given.int8, given.redis)
    sizes(given.run, rounded)
    memory(rounded)


def sides(now: Snapshot) -> JobModel:
    side = JobModel(now.job, now.version.num_dense, trains=False)
    side.model.load_state_dict({name: torch.tensor(value) for name, value in now.dense().items()})
    return side


def batches(job: Job, split: str) -> Iterable[Any]:
    return open_reader(job).batches(split, 0)  # type: ignore[arg-type]


def ids_in(job: Job, batch: Any) -> dict[str, Any]:
    """Row numbers of each feature, which are ids too; a table of the log has one feature and one id a sample."""
    offsets = bag_offsets(batch.ids, batch.offsets)[:: batch.size]
    return {table.features[0]: batch.ids[offsets[f] : offsets[f + 1]] for f, table in enumerate(job.tables)}


@torch.no_grad()
def quality(now: Snapshot) -> tuple[float, float]:
    side, metrics = sides(now), EvalMetrics()
    for batch in batches(now.job, "eval"):
        rows = [torch.tensor(own) + 0.0 for own in now.look_up(ids_in(now.job, batch)).values()]
        metrics.update(side.forward(torch.tensor(batch.dense), rows, {}, training=False), torch.tensor(batch.labels))
    found = metrics.counts.result(0, now.job.data.columns.labels, ())
    assert found is not None
    assert found.auc is not None
    assert found.logloss is not None
    return found.auc, found.logloss


def lookups(now: Snapshot) -> None:
    side, batch = sides(now), next(iter(batches(now.job, "eval")))
    ids = {name: own[:SAMPLES].copy() for name, own in ids_in(now.job, batch).items()}
    dense = torch.tensor(batch.dense[:SAMPLES])
    rows = [torch.tensor(own) for own in now.look_up(ids).values()]
    ways: dict[str, Callable[[], Any]] = {
        "look-ups": lambda: now.look_up(ids),
        "dense": lambda: forward(side, dense, rows),
    }
    median = medians(ways)
    ratio = median["look-ups"] / median["dense"]
    print(f"{LOOKUPS} x {SAMPLES} look-ups {median['look-ups']:.0f} us, dense {median['dense']:.0f} us: {ratio:.3f}")


def medians(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Returns the processor time of each in us, taken in turns."""
    times = dict[str, list[float]]()
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began_s = time.thread_time()
            way()
            times.setdefault(name, []).append(time.thread_time() - began_s)
    return {name: 1e6 * statistics.median(own) for name, own in times.items()}


def redis_lookups(now: Snapshot, folder: Path, url: str) -> None:
    print(f"{publish_redis.publish(str(folder), url)} rows copied to the server")
    client: Any = redis.Redis.from_url(url)
    ids = {name: own[:SAMPLES].copy() for name, own in ids_in(now.job, next(iter(batches(now.job, "eval")))).items()}
    of_feature = {table.features[0]: table.name for table in now.job.tables}
    keys = [f"{publish_redis.PREFIX}:{of_feature[name]}:{row}" for name, own in ids.items() for row in own.tolist()]
    missing = bytes(4 * now.job.tables[0].embedding_dim)

    def get() -> Any:
        return np.frombuffer(b"".join(found or missing for found in client.mget(keys)), np.float32)

    median = medians({"files": lambda: now.look_up(ids), "server": get})
    ratio = median["server"] / median["files"]
    print(f"{len(keys)} look-ups: files {median['files']:.0f} us, server {median['server']:.0f} us: {ratio:.0f} times")


@torch.no_grad()
def forward(side: JobModel, dense: torch.Tensor, rows: list[torch.Tensor]) -> Any:
    return side.forward(dense, rows, {}, training=False)


def sizes(run: Path, now: Snapshot) -> None:
    """Of the newest changed version, over the checkpoint's layers since the version before."""
    folder = newest_checkpoint(run)
    assert folder is not None
    manifest = read_manifest(folder)
    delta = sum(file.nbytes for shard in manifest.shards for file in shard.layers[-1].files)
    rows = sum(table.rows.nbytes for table in now.version.tables)
    index = sum(table.index.nbytes for table in now.version.tables)
    print(
        f"{now.version.kind} version {now.version.number}: rows {rows / delta:.3f}, with index "
        f"{(rows + index) / delta:.3f} of the checkpoint's delta of {delta} bytes"
    )


def memory(now: Snapshot) -> None:
    held_out = [np.concatenate(own) for own in zip(*places(now, "eval"), strict=True)]
    warm = [np.concatenate(own) for own in zip(*places(now, "train"), strict=True)]
    strides = [table.stride for table in now.version.tables]
    nbytes = sum(stride * int(view.starts[-1]) for stride, view in zip(strides, now.tables.values(), strict=True))
    count, room = sum(map(len, held_out)), int(SHARE * nbytes)
    warmed = interleaved(warm)[-count:]
    order = interleaved(held_out)
    by_key = key_ranks(now)
    for name, ranks in (("move to front", [np.arange(len(own)) for own in by_key]), ("key order", by_key)):
        warm_pages, pages = (
            [(table, int(ranks[table][place]) * strides[table] // PAGE) for table, place in own]
            for own in (warmed, order)
        )
        print(f"memory, pages, {name}: {found_in(warm_pages, pages, room // PAGE):.3f}")
    print(f"memory, row LRU: {found_in(warmed, order, room // (strides[0] + 12)):.3f}")


def places(now: Snapshot, split: str) -> Iterable[list[Any]]:
    for batch in batches(now.job, split):
        own = zip(now.tables.values(), ids_in(now.job, batch).values(), strict=True)
        yield [view.places(rows.copy()) for view, rows in own]


def interleaved(tables: list[Any]) -> list[tuple[int, int]]:
    """Look-ups of trained rows, sample by sample."""
    return [(t, int(p)) for sample in zip(*tables, strict=True) for t, p in enumerate(sample) if p >= 0]


def key_ranks(now: Snapshot) -> list[Any]:
    found = []
    for index in range(len(now.version.tables)):
        keys = np.concatenate(
            [
                own.rows[index].view(np.int64).reshape(-1, own.file.tables[index].stride // 8)[:, 0]
                for own in now.versions
            ]
        )
        found.append(np.searchsorted(np.unique(keys), keys))
    return found


def found_in(warm: Iterable[Any], measured: Iterable[Any], room: int) -> float:
    """The share of `measured` that an LRU of `room` items holds."""
    cache, hits, count = OrderedDict[Any, None](), 0, 0
    for is_measured, items in ((False, warm), (True, measured)):
        for item in items:
            if item in cache:
                cache.move_to_end(item)
                hits += is_measured
            else:
                cache[item] = None
                if len(cache) > room:
                    cache.popitem(last=False)
            count += is_measured
    return hits / count


if __name__ == "__main__":
    main()
