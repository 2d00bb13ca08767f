"""Does a run that follows a folder end with the bits of a replay, whatever is killed while files arrive?

    python -m benchmarks.follow [--kills 40] [--ways 0 1 2 3 4 5 6 7] [--minutes 60]

Files arrive, and all processes of the run are killed: half of the times between a file's arrival and its checkpoint,
else at random. Files that lie before all checkpoints are removed, and after every second kill `rowcast forget` runs.
Then END comes, the run ends, and the ordinary job trains a folder of all files, with a `forget` at the same steps.
Kills are divided among the ways; with --minutes, each way goes on with kills until then. Counts those of ways whose
losses, trained rows, their state and dense weights are equal, byte for byte.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path, PurePath
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from benchmarks.machine import machine, write_result
from rowcast.prefetcher.checkpoints.forget import forget_rows
from rowcast.runtime.checkpoint_manifest import TrainingData, read_manifest
from rowcast.serving.model import Model
from tests.support.redis_server import COMMAND, RedisServer

MARK = "ROWCAST_FOLLOW"
ROWS, BATCH_SIZE = 700, 128  # a file has 700 rows, a batch 128
FIRST_FILES = 7  # before the run starts: enough for the 32 batches that a first start awaits
FILES_OF_A_KILL = 14  # a kill waits for a checkpoint; no more than these files arrive before it
UNTRAINED_FOR = 40  # train steps, of each `forget`
EVERY_S = 0.4  # between two files
LIMIT_S = 600.0


class Way(NamedTuple):
    ranks: int = 1
    workers: int = 1
    store: str = "memory"
    shuffle: str = "none"
    publishes: bool = False  # `rowcast publish --every 1s` runs beside, and its last version must hold the last step


WAYS = (
    Way(),
    Way(workers=3, store="tiered"),
    Way(ranks=2, workers=3),
    Way(ranks=2, store="tiered"),
    Way(workers=3, shuffle="window:500"),
    Way(ranks=2, publishes=True),
    *((Way(store="redis"), Way(ranks=2, workers=3, store="redis")) if COMMAND else ()),
)

STORES: dict[str, dict[str, str]] = {"memory": {}, "tiered": {"memory": "2GiB"}, "redis": {"memory": "2GiB"}}


class Outcome(NamedTuple):
    kills: int
    steps: int
    losses_differ: int
    exports_equal: bool
    removed: int  # files that left while the run followed
    forgotten: int  # rows, as `rowcast forget` counts them
    listed: int  # files in the last manifest

    @property
    def is_equal(self) -> bool:
        return not self.losses_differ and self.exports_equal


def job_content(way: Way, folder: Path, name: str, url: str, *, follow: bool) -> dict[str, Any]:
    def table(column: str) -> dict[str, Any]:
        return {"name": column, "num_embeddings": 2**40, "embedding_dim": 8, "features": [column]}

    return {
        "job": {"run_dir": str(folder / name), "seed": 1},
        "data": {
            "format": "parquet",
            "path": str(folder / ("arriving" if follow else "finished")),
            "batch_size": BATCH_SIZE,
            "follow": follow,
            "shuffle": way.shuffle,
            "columns": {"dense": ["price"], "hash": True},
        },
        "tables": [table("user"), table("item")],
        "model": {"kind": "dlrm", "bottom_mlp": [8], "top_mlp": [16, 1]},
        "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.05}, "dense": {"kind": "sgd", "lr": 0.05}},
        "cache": {"capacity": "96KiB"},
        "lookahead": {"depth": 2},
        "store": {"kind": way.store} | STORES[way.store] | ({"url": url} if way.store == "redis" else {}),
        "checkpoint": {"every": "1s"},
        "ranks": {"count": way.ranks},
        "prefetcher": {"workers": way.workers},
        "trainer": {"device": "cpu", "threads": 1},
        "metrics": {"prefetcher": "127.0.0.1:0", "trainer": "127.0.0.1:0"},
    }


class FilesThatArrive:
    """Each is in `finished` too, from where none leaves."""

    def __init__(self, folder: Path, rows: int = ROWS) -> None:
        """`rows`: of each file."""
        self.number = self.removed = 0
        self._rows = rows
        self._finished, self.arriving = folder / "finished", folder / "arriving"
        for own in (self._finished, self.arriving):
            own.mkdir()

    def arrive(self) -> None:
        draw, name = np.random.default_rng(self.number), f"f{self.number:06d}.parquet"
        user = draw.zipf(1.3, self._rows) % 5000 + self.number * 40  # births for ever
        item = draw.zipf(1.2, self._rows) % 3000 + self.number * 10
        label = ((user * 7 + item * 3) % 11 < 3).astype(np.int8)
        columns = {"label": label, "price": draw.random(self._rows, np.float32), "user": user, "item": item}
        pq.write_table(pa.table(columns), self._finished / name)
        shutil.copyfile(self._finished / name, self.arriving / f".{name}")
        (self.arriving / f".{name}").rename(self.arriving / name)
        self.number += 1

    def remove(self, last: str) -> None:
        """Removes the files up to `last`."""
        for file in self.arriving.glob("*.parquet"):
            if last and file.name <= PurePath(last).name:
                file.unlink()
                self.removed += 1


class FollowingRun:
    """`rowcast train`, and all processes that it has started. A context manager that ends them."""

    def __init__(self, config: Path, log: Path, *options: str) -> None:
        """`options`: of `rowcast train`."""
        self._mark = uuid.uuid4().hex
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rowcast", "train", "--config", str(config), *options],
                stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, MARK: self._mark},
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def kill(self) -> None:
        killed = set[int]()
        while (pids := list(self._alive())) or any(map(is_ending, killed)):
            killed.update(pids)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()

    def _alive(self) -> Iterator[int]:
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and f"{MARK}={self._mark}".encode() in (entry / "environ").read_bytes():
                    yield int(entry.name)


def is_ending(pid: int) -> bool:
    """Whether a thread of a process that was killed still runs, so that its files are open and locked."""
    with suppress(OSError):
        is_zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not is_zombie or len(os.listdir(f"/proc/{pid}/task")) > 1
    return False


def checkpoints(run_dir: Path) -> list[Path]:
    return sorted(own.parent for own in run_dir.glob("checkpoints/step-*/manifest.json"))


def followed(way: Way, kills: int, folder: Path, draw: random.Random, minutes: float = 0.0) -> Outcome:
    """Follows, is killed, and replays in `folder`. `minutes`: in which there are more than these kills. Raises
    RuntimeError if a run does not end well."""
    with RedisServer(folder / "redis") if way.store == "redis" else nullcontext() as server:
        return followed_on(way, kills, folder, draw, "" if server is None else server.url_text, minutes)


def followed_on(way: Way, kills: int, folder: Path, draw: random.Random, url: str, minutes: float) -> Outcome:
    """`url`: of a Redis server, where the way needs one."""
    with publisher(folder) if way.publishes else nullcontext():
        outcome = killed_and_replayed(way, kills, folder, draw, url, minutes)
        until_s = time.monotonic() + LIMIT_S
        while way.publishes and published_steps(folder) != outcome.steps:
            if time.monotonic() > until_s:
                raise RuntimeError(f"the version has {published_steps(folder)} steps, the run {outcome.steps}")
            time.sleep(EVERY_S)
    return outcome


@contextmanager
def publisher(folder: Path) -> Iterator[None]:
    (folder / "follow").mkdir()
    command = [sys.executable, "-m", "rowcast", "publish", "--run", str(folder / "follow"), "--every", "1s"]
    options = ["--to", str(folder / "served"), "--metrics", "127.0.0.1:0"]
    with (folder / "publish.log").open("wb") as log, subprocess.Popen([*command, *options], stderr=log) as process:
        try:
            yield
        finally:
            process.terminate()


def published_steps(folder: Path) -> int:
    return Model(folder / "served").version.position.train_step if (folder / "served" / "CURRENT").exists() else 0


def killed_and_replayed(way: Way, kills: int, folder: Path, draw: random.Random, url: str, minutes: float) -> Outcome:
    files, ends_s = FilesThatArrive(folder), time.monotonic() + 60 * minutes
    config, log, run_dir = folder / "follow.json", folder / "follow.log", folder / "follow"
    write_config(config, job_content(way, folder, "follow", url, follow=True))
    forgets, forgotten, killed = list[int](), 0, 0
    for _ in range(FIRST_FILES):
        files.arrive()
    while killed < kills or time.monotonic() < ends_s:
        with FollowingRun(config, log) as run:
            before, until_s = checkpoints(run_dir)[-1:], time.monotonic() + LIMIT_S
            while run.process.poll() is None and checkpoints(run_dir)[-1:] == before and time.monotonic() < until_s:
                if files.number < FILES_OF_A_KILL * (killed + 1):
                    files.arrive()
                time.sleep(EVERY_S)
            for _ in range(draw.randrange(1, 5)):
                time.sleep(EVERY_S)
                files.arrive()
            time.sleep(draw.random() * (0.9 if killed % 2 else 4.0))  # a checkpoint comes a second after a step
            if run.process.poll() is not None:
                raise RuntimeError(f"the run ended with code {run.process.returncode}: {log.read_text()[-2000:]}")
        for oldest in checkpoints(run_dir)[:1]:
            files.remove(read_data(oldest).last_before)
        if killed % 2:
            manifest, rows = forget_rows(run_dir, UNTRAINED_FOR)
            forgets.append(manifest.train_steps)
            forgotten += rows
        killed += 1
    files.arrive()
    (files.arriving / "END").touch()
    await_end(config, log)
    write_config(folder / "replay.json", job_content(way, folder, "replay", url, follow=False))
    for train_steps in forgets:
        await_end(folder / "replay.json", folder / "replay.log", "--max-steps", str(train_steps))
        forget_rows(folder / "replay", UNTRAINED_FOR)
    await_end(folder / "replay.json", folder / "replay.log")
    return compared(folder, killed, files.removed, forgotten, len(read_data(checkpoints(run_dir)[-1]).files))


def read_data(checkpoint: Path) -> TrainingData:
    trained_on = read_manifest(checkpoint).trained_on
    assert trained_on is not None, "a run has trained before its first checkpoint"
    return trained_on


def write_config(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content))


def await_end(config: Path, log: Path, *options: str) -> None:
    with FollowingRun(config, log, *options) as run:
        code = run.process.wait(LIMIT_S)
    if code:
        raise RuntimeError(f"the run ended with code {code}: {log.read_text()[-2000:]}")


def compared(folder: Path, kills: int, removed: int, forgotten: int, listed: int) -> Outcome:
    losses = [np.fromfile(folder / name / "losses.f32", np.uint32) for name in ("follow", "replay")]
    exports = []
    for name in ("follow", "replay"):
        out = folder / f"{name}.safetensors"
        command = [sys.executable, "-m", "rowcast", "export", "--run", str(folder / name), "--out", str(out)]
        subprocess.run([*command, "--trained-rows"], check=True, capture_output=True)
        exports.append(out.read_bytes())  # it holds the dense weights, and the rows with their state
    differ = len(losses[1]) if len(losses[0]) != len(losses[1]) else int((losses[0] != losses[1]).sum())
    return Outcome(kills, len(losses[1]), differ, exports[0] == exports[1], removed, forgotten, listed)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--ways", type=int, nargs="+", default=range(len(WAYS)), help="numbers, from 0")
    parser.add_argument("--minutes", type=float, default=0.0, help="each way goes on until then")
    asked = parser.parse_args()
    ways, outcomes = [WAYS[number] for number in asked.ways], list[Outcome]()
    print(machine())
    print("ranks decoders store    shuffle     kills  steps losses differ   export files left rows forgotten listed")
    for number, way in enumerate(ways):
        kills = (asked.kills + len(ways) - 1 - number) // len(ways)
        with tempfile.TemporaryDirectory() as folder:
            outcome = followed(way, kills, Path(folder), random.Random(number), asked.minutes)
        outcomes.append(outcome)
        result = "equal" if outcome.exports_equal else "DIFFERS"
        print(
            f"{way.ranks:5d} {way.workers:8d} {way.store:8s} {way.shuffle:10s} {outcome.kills:5d} {outcome.steps:6d} "
            f"{outcome.losses_differ:13d} {result:>8s} {outcome.removed:10d} {outcome.forgotten:14d} "
            f"{outcome.listed:6d}",
            flush=True,
        )
    equal = sum(outcome.kills for outcome in outcomes if outcome.is_equal)
    print(f"{equal} of {sum(outcome.kills for outcome in outcomes)} kills in runs that are equal to their replay")
    write_result(
        "follow", ways=[way._asdict() | outcome._asdict() for way, outcome in zip(ways, outcomes, strict=True)]
    )
    return int(any(not outcome.is_equal for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
