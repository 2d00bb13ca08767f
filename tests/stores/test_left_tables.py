"""A start removes what killed prefetchers have left in folders that no prefetcher of its `ranks.count` has."""

from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs, make_keys
from rowcast.prefetcher.stores import redis_store
from rowcast.prefetcher.stores.redis_store import open_rows, remove_left_keys, remove_left_tables
from rowcast.runtime.run_directory import RunDirectory
from tests.support import jobs
from tests.support.redis_server import RedisServer, keys_on, needs_redis, shared_server


def job_of(run_dir: Path, count: int, **store: object) -> Job:
    return jobs.job(
        job={"run_dir": str(run_dir)},
        data={"synthetic": {"samples": 1000}, "batch_size": 8},
        tables=[jobs.table("a", 40, 4, "f_a"), jobs.table("b", 40, 8, "f_b")],
        ranks={"count": count, "parts": 4},
        store=store or {"kind": "memory"},
    )


def folders(run_dir: Path, count: int) -> list[Path]:
    pairs = [run_dir] if count == 1 else [run_dir / f"rank-{rank:03d}" for rank in range(count)]
    return [pair / "tables" for pair in pairs]


def killed_on_redis(server: RedisServer, run_dir: Path, count: int) -> set[bytes]:
    """Returns the keys that such prefetchers have left."""
    job, before = job_of(run_dir, count, **on(server)), keys_on([server])
    for folder in folders(run_dir, count):
        for group in group_specs(job):
            rows = open_rows(job, group, folder)
            rows.write(make_keys(group.tables[0].index, np.arange(200)), np.zeros((200, group.record_bytes), np.uint8))
    return keys_on([server]) - before


def on(server: RedisServer) -> dict[str, object]:
    return {"kind": "redis", "url": server.url_text, "memory": "1GiB"}


@needs_redis
@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (4, 2)])
def test_keys_of_another_number_of_ranks_are_deleted(tmp_path: Path, before: int, now: int) -> None:
    server = shared_server()
    others = keys_on([server])
    left = killed_on_redis(server, tmp_path, before)
    assert len(left) >= 80 * before
    used = {str(folder) for folder in folders(tmp_path, now)}
    remove_left_tables(job_of(tmp_path, now, **on(server)))
    notes = [path for path in tmp_path.rglob("*.redis") if str(path.parent) not in used]
    assert notes == []
    for folder in folders(tmp_path, now):  # as their prefetchers do
        remove_left_keys(job_of(tmp_path, now, **on(server)), folder.parent)
    assert keys_on([server]) == others
    assert not list(tmp_path.rglob("*.redis"))


def test_keys_of_a_prefetcher_that_is_still_at_work_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted: list[Path] = []
    monkeypatch.setattr(redis_store, "remove_left_keys", lambda job, folder: deleted.append(folder))
    for folder in folders(tmp_path, 2):
        folder.mkdir(parents=True)
        (folder / f"{group_specs(job_of(tmp_path, 2))[0].name}.redis").touch()
    with RunDirectory(tmp_path / "rank-001", "prefetcher"), capture_logs() as logs:
        remove_left_tables(job_of(tmp_path, 1))
    assert deleted == [tmp_path / "rank-000"]
    assert ["rank-001 is held by a prefetcher" in entry["because"] for entry in logs] == [True]
    remove_left_tables(job_of(tmp_path, 1))
    assert deleted == [tmp_path / "rank-000", tmp_path / "rank-000", tmp_path / "rank-001"]


@needs_redis
def test_keys_on_a_server_that_the_job_does_not_name_are_told_and_their_notes_stay(tmp_path: Path) -> None:
    left = killed_on_redis(shared_server(), tmp_path, 2)
    notes = sorted(tmp_path.rglob("*.redis"))
    with capture_logs() as logs:
        remove_left_tables(job_of(tmp_path, 1))
    assert left <= keys_on([shared_server()])
    assert sorted(entry["note"] for entry in logs) == [str(path) for path in notes]
    assert sorted(tmp_path.rglob("*.redis")) == notes
    remove_left_tables(job_of(tmp_path, 1, **on(shared_server())))
    assert not left & keys_on([shared_server()])


@needs_redis
def test_keys_of_a_group_that_the_job_does_not_have_any_more_are_deleted(tmp_path: Path) -> None:
    """A fresh run with another optimizer names its notes otherwise."""
    server = shared_server()
    left = killed_on_redis(server, tmp_path, 1)
    job = jobs.job(job={"run_dir": str(tmp_path)}, optimizer={"sparse": {"kind": "adam", "lr": 0.1}}, store=on(server))
    remove_left_keys(job, tmp_path)
    assert not left & keys_on([server])
