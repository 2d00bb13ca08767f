"""The examples serve a trained model: scores have the bits of `rowcast score`, copies are whole versions."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import csv, table

from examples import publish_redis
from examples.serving import Scorer
from rowcast.runtime.errors import DataError
from rowcast.serving.model import Model
from tests.serving.served_run import ServedRun, publish, serving_job
from tests.support import jobs
from tests.support.processes import ROOT, Session
from tests.support.redis_server import RedisServer, needs_redis

NUM_ROWS = 300


def write_clicks(path: Path, seed: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    users = [f"u{number}" for number in rng.integers(0, 400, NUM_ROWS)]
    items, prices = rng.integers(0, 50, NUM_ROWS), rng.random(NUM_ROWS)
    columns = {"user": users, "item": items, "price": prices, "label": rng.integers(0, 2, NUM_ROWS)}
    csv.write_csv(table(columns), path)
    return users, items, prices


def test_scores_of_a_version_have_the_bits_of_the_checkpoint_that_it_names(session: Session) -> None:
    """In batches of the same size: from Python objects, as a request has them."""
    write_clicks(session.folder / "clicks.csv", 1)
    users, items, prices = write_clicks(session.folder / "new.csv", 2)
    columns = {"dense": ["price"], "hash": ["user"]}
    data = {"format": "csv", "path": str(session.folder / "clicks.csv"), "columns": columns, "synthetic": None}
    tables = [jobs.table("user", 900, 4, dtype="bf16"), jobs.table("item", 50, 4, pooling="mean")]
    checkpoint = {"every": 2, "keep": 9}
    session.write_job(data={**data, "batch_size": 50}, tables=tables, checkpoint=checkpoint)
    served, run_dir = session.folder / "served", session.run_dir
    session.start("train").ended().quiet()
    names = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert len(names) == 3
    name, newest = names[-2:]
    (run_dir / "checkpoints" / newest / "manifest.json").rename(run_dir / newest)  # so that the one before is newest
    given = ("publish", f"--run={run_dir}", f"--to={served}")
    session.start_module("rowcast.prefetcher", *given).ended().quiet()
    (run_dir / newest).rename(run_dir / "checkpoints" / newest / "manifest.json")
    out = session.folder / f"{name}.csv"
    score = ("score", f"--run={run_dir}", f"--data={session.folder / 'new.csv'}", f"--out={out}")
    said = session.start_module("rowcast", *score, f"--checkpoint={name}").ended().quiet().stdout
    assert f"after {int(name[5:])} train steps" in said
    scorer = Scorer(str(served))
    found = [
        scorer.score(
            prices[at : at + 50, None],
            {
                "user": [[own] for own in users[at : at + 50]],
                "item": [[own] for own in items[at : at + 50].tolist()],
            },
        )
        for at in range(0, NUM_ROWS, 50)
    ]
    expected = np.loadtxt(out, np.float32, skiprows=1)
    assert np.concatenate(found).tobytes() == expected.tobytes(), name


def copied(source: Path, target: Path, *command: str) -> int:
    given = [sys.executable, "-m", "examples.copy_versions", str(source), str(target), *command]
    return subprocess.run(given, cwd=ROOT, capture_output=True, check=False).returncode


def test_a_copy_that_stops_anywhere_is_never_half_a_version(tmp_path: Path) -> None:
    run, served, copy = ServedRun(serving_job(tmp_path / "run")), tmp_path / "served", tmp_path / "copy"
    copy.mkdir()
    stops = tmp_path / "stops.py"
    stops.write_text(
        "import shutil, sys\n"
        "left, source, target = int(sys.argv[1]), *sys.argv[2:]\n"
        "if target.split('/')[-2].startswith('v') and int(target.split('/')[-2][1:]) > left: sys.exit(1)\n"
        "shutil.copytree(source, target, dirs_exist_ok=True)\n"
    )
    for number in (1, 2, 3):
        run.train_some(0.5 if number == 1 else 0.05)
        run.checkpoint()
        publish(run, served)
        assert copied(served, copy, sys.executable, str(stops), str(number - 1)) == 1
        if number == 1:
            with pytest.raises(DataError, match="no version yet"):
                Model(copy)
        else:
            assert Model(copy, check="all").version.number == number - 1
        assert copied(served, copy, sys.executable, str(stops), str(number)) == 0
        assert Model(copy, check="all").version == Model(served).version
    if shutil.which("rsync"):
        (tmp_path / "other").mkdir()
        assert copied(served, tmp_path / "other") == 0
        assert Model(tmp_path / "other", check="all").version == Model(served).version


@needs_redis
def test_a_server_gets_what_changed(tmp_path: Path) -> None:
    run, served = ServedRun(serving_job(tmp_path / "run")), tmp_path / "served"
    with RedisServer(tmp_path / "redis") as server:
        for share in (0.5, 0.05):
            run.train_some(share)
            run.checkpoint()
            version = publish(run, served)
            assert publish_redis.publish(str(served), server.url_text) == version.num_rows
        assert publish_redis.publish(str(served), server.url_text) == 0
        expected = run.expected("item")
        with server.client() as client:
            rows = client.mget([f"{publish_redis.PREFIX}:item:{row}" for row in range(700)])
            assert int(client.get(f"{publish_redis.PREFIX}:version")) == 2
        assert sum(found is not None for found in rows) > 300
        assert all(found in (None, own.tobytes()) for found, own in zip(rows, expected, strict=True))
