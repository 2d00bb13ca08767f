"""`examples/redis_stream.py`: entries of a stream become files that a job follows."""

import json
from pathlib import Path

import pytest

from examples import redis_stream
from rowcast.prefetcher.readers.follow import Arrivals, open_followed
from tests.support.jobs import job, table
from tests.support.redis_server import RedisServer, needs_redis


@needs_redis
def test_entries_are_in_files_once_and_in_order_whatever_was_left_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_stream, "MOST_ROWS", 100)
    folder = tmp_path / "arriving"
    folder.mkdir()
    rows = [{"label": n % 2, "item": n % 7} for n in range(250)]
    with RedisServer(tmp_path / "redis") as server, server.client() as client:
        for row in rows[:150]:
            client.xadd("clicks", {"row": json.dumps(row)})
        first = redis_stream.next_file(client, "clicks", folder)
        (folder / "000000000000001-000000000.tmp").write_text('{"label": 1, "it')  # of a writer that was killed
        for row in rows[150:]:
            client.xadd("clicks", {"row": json.dumps(row)})
        others = [redis_stream.next_file(client, "clicks", folder) for _ in range(3)]
    assert first is not None
    assert others[-1] is None
    paths = sorted(folder.glob("*.jsonl"))
    assert paths == [first, *others[:-1]]
    assert [json.loads(line) for path in paths for line in path.read_text().splitlines()] == rows
    (folder / "END").touch()
    data = {"format": "jsonl", "path": str(folder), "follow": True, "batch_size": 64}
    followed = open_followed(job(tables=[table("item", 7, 4)], data=data), "all", Arrivals())
    assert [len(batch.labels) for batch in followed.batches("train", 0)] == [64, 64, 64, 58]
