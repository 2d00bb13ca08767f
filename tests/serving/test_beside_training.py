"""A publisher and two readers beside training: what is read has the bits of the checkpoints, whoever is killed."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pyarrow import csv, table

from rowcast.deploy.score import scoring_job
from rowcast.runtime.checkpoint_manifest import read_manifest
from rowcast.runtime.crash_points import VARIABLE
from rowcast.serving.model import Model
from rowcast.serving.version_file import read_current, version_name
from tests.recovery.crashes import OF_A_PUBLISHER
from tests.serving.reading import checksum
from tests.support import jobs
from tests.support.processes import Process, Session
from tests.support.redis_server import COMMAND, RedisServer
from tests.support.repeats import count

BATCH, NUM_ROWS = 50, 300
SAID = tuple[int, int, str]  # version, train step, checksum of the scores
WAYS: dict[str, dict[str, Any]] = {
    "memory": {},
    "tiered": {"store": {"kind": "tiered", "memory": "400 rows"}, "ranks": {"gradients": "bf16"}},
    "redis": {"store": {"kind": "redis", "memory": "400 rows"}},
    "two ranks": {"ranks": {"count": 2, "parts": 2}},
}
KILLED = -9


class Served:
    """A run that trains until it is stopped, with a checkpoint every 20 steps that all stay."""

    def __init__(self, session: Session, **sections: Any) -> None:
        self.session, self.to = session, session.folder / "served"
        self._parts = sections.get("ranks", {}).get("parts", 1)
        self._end, self._samples = session.folder / "end", session.folder / "new.npz"
        write_clicks(session.folder / "clicks.csv", 1)
        columns = write_clicks(session.folder / "new.csv", 2)
        np.savez(self._samples, **columns)
        data = {"path": str(session.folder / "clicks.csv"), "columns": {"dense": ["price"], "hash": ["user"]}}
        session.write_job(
            data={"format": "csv", "batch_size": BATCH, "epochs": 100_000, "synthetic": None, **data},
            tables=[jobs.table("user", 900, 4, dtype="bf16"), jobs.table("item", 50, 4, pooling="mean")],
            checkpoint={"every": 20, "keep": 100_000},
            cache={"capacity": "8KiB"},
            **sections,
        )

    def train(self) -> list[Process]:
        return [self.session.start("local")] if self._parts > 1 else list(self.session.start_both())

    def publish(self, *options: str, **environment: str) -> Process:
        given = ("publish", f"--run={self.session.run_dir}", f"--to={self.to}", "--keep=1", *options)
        return self.session.start_module("rowcast.prefetcher", *given, **environment)

    def follow(self, **environment: str) -> Process:
        return self.publish("--every=20ms", "--metrics=127.0.0.1:0", **environment)

    def read(self) -> list[Process]:
        given = (str(self.to), str(self._samples), str(BATCH // self._parts), str(self._end))
        return [self.session.start_module("tests.serving.reading", *given) for _ in range(2)]

    def until(self, processes: list[Process], condition: Callable[[], bool], what: str) -> None:
        processes[0].until(lambda: condition() or not all(process.running for process in processes), what)

    def end(self, *processes: Process) -> None:
        for process in processes:
            process.signal(signal.SIGTERM)
        for process in processes:
            process.ended().quiet()

    def said(self, readers: list[Process]) -> list[list[SAID]]:
        self._end.touch()
        lines = [reader.ended().quiet().stdout.split() for reader in readers]
        return [[(int(a), int(b), c) for a, b, c in zip(own[::3], own[1::3], own[2::3], strict=True)] for own in lines]

    def score(self, train_steps: int) -> str:
        """As `rowcast score --checkpoint`, whose parent process is left out."""
        folder, run_dir = self.session.folder, self.session.run_dir
        manifests = [read_manifest(own) for own in (run_dir / "checkpoints").glob("step-*")]
        [name] = [own.name for own in manifests if own.train_steps == train_steps]
        job = scoring_job(read_manifest(run_dir / "checkpoints" / name), run_dir, folder / "new.csv", ())
        config, out = folder / "score.json", folder / f"{name}.csv"
        config.write_bytes(msgspec.json.encode(job.content()))
        given = f"--config={config}"
        start = self.session.start_module
        processes = [start("rowcast.prefetcher", "run", given, "--eval", f"--checkpoint={name}")]
        processes.append(start("rowcast.trainer", "eval", given, f"--scores={out}"))
        for process in processes:
            process.ended().quiet()
        return checksum(np.loadtxt(out, np.float32, skiprows=1))


def write_clicks(path: Path, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    users = [f"u{number}" for number in rng.integers(0, 400, NUM_ROWS)]
    columns = {"user": users, "item": rng.integers(0, 50, NUM_ROWS), "price": rng.random(NUM_ROWS)}
    csv.write_csv(table({**columns, "label": rng.integers(0, 2, NUM_ROWS)}), path)
    return columns


def assert_read_what_was_trained(served: Served, said: list[list[SAID]], scored: int) -> None:
    """Of the versions that were read, `scored` are compared with their checkpoints."""
    for own in said:
        assert [version for version, *_ in own] == sorted({version for version, *_ in own})
        assert len({steps for _, steps, _ in own}) == len(own)
    found = sorted({(steps, scores) for own in said for _, steps, scores in own})
    assert len({steps for steps, _ in found}) == len(found), "two readers of a version see the same"
    for steps, scores in found[:: max(1, len(found) // scored)]:
        assert served.score(steps) == scores, f"after {steps} train steps"


@pytest.mark.parametrize("way", list(WAYS) if count(0, 1) else ["tiered"])
def test_scores_of_versions_have_the_bits_of_their_checkpoints(way: str, session: Session, tmp_path: Path) -> None:
    with ExitStack() as stack:
        sections = WAYS[way]
        if way == "redis":
            if COMMAND is None:
                pytest.skip("redis-server is not installed")
            server = stack.enter_context(RedisServer(tmp_path / "server"))
            sections = {"store": {**sections["store"], "url": server.url_text}}
        served = Served(session, **sections)
        processes, readers = [*served.train(), served.follow()], served.read()
        served.until(processes, lambda: readers[0].stdout.count("\n") >= 4, "four versions")
        served.end(*processes)
        assert_read_what_was_trained(served, served.said(readers), count(2, 99))
    assert session.remains() == []


@pytest.mark.parametrize("point", OF_A_PUBLISHER if count(0, 1) else ["version renamed"])
def test_readers_see_whole_versions_in_order_whoever_is_killed(point: str, session: Session) -> None:
    served = Served(session)
    trainers, publisher, readers = served.train(), served.follow(**{VARIABLE: f"{point}:3"}), served.read()
    assert publisher.ended().code == KILLED
    for process in trainers:
        process.signal(signal.SIGKILL)
        assert process.ended().code == KILLED
    before = read_current(served.to).number
    processes = [*served.train(), served.follow()]
    served.until(processes, lambda: read_current(served.to).number >= before + 3, "three more versions")
    served.end(*processes)
    served.publish().ended().quiet()
    assert "published already" in served.publish().ended().quiet().stderr
    assert_read_what_was_trained(served, served.said(readers), count(1, 99))
    left = {path.name for path in served.to.iterdir() if path.is_dir()}
    newest = Model(served.to, check="all").version
    assert left == {version_name(own.number) for own in (newest.named, *newest.stands_on)}
