"""The examples copy whole versions, to folders and servers. `test_beside_training.py` has that of scores."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples import publish_redis
from rowcast.runtime.errors import DataError
from rowcast.serving.model import Model
from tests.serving.served_run import ServedRun, publish, serving_job
from tests.support.processes import ROOT
from tests.support.redis_server import RedisServer, needs_redis


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
