"""Rows on real Redis servers, one and a cluster of three: what comes back, and whose keys are touched."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from redis.exceptions import MovedError
from structlog.testing import capture_logs

from rowcast.job.server_url import ServerUrl
from rowcast.prefetcher.stores.cold import redis_rows
from rowcast.prefetcher.stores.cold.redis_rows import RedisRows, keys_of
from rowcast.prefetcher.stores.store import Keys, Records
from tests.stores.every_store import GROUP, all_keys, random_records
from tests.support.redis_server import RedisCluster, RedisServer, keys_on, needs_redis
from tests.support.repeats import count

pytestmark = needs_redis
VALUE_BYTES = GROUP.record_bytes + 12


@pytest.fixture(scope="module", params=["one server", "a cluster of three"])
def redis(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer | RedisCluster]:
    folder = tmp_path_factory.mktemp("redis")
    with RedisServer(folder) if request.param == "one server" else RedisCluster(folder) as servers:
        yield servers


def servers_of(redis: RedisServer | RedisCluster) -> list[RedisServer]:
    return redis.nodes if isinstance(redis, RedisCluster) else [redis]


def open_rows(url: ServerUrl, folder: Path) -> RedisRows:
    return RedisRows.open(GROUP, url, folder, password=None, timeout_s=20.0)


def read(rows: RedisRows, keys: Keys, places: np.ndarray) -> Records:
    out = np.full((len(keys), GROUP.record_bytes), 0xCD, np.uint8)
    rows.read(keys, places, out)
    return out


@pytest.mark.parametrize("seed", range(count(3, soak=100)))
def test_rows_come_back_as_a_dictionary_has_them(
    redis: RedisServer | RedisCluster, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_rows, "ROWS_AT_ONCE", 50)  # so that a call takes several round trips
    chance = np.random.default_rng(seed)
    model: dict[int, tuple[int, bytes]] = {}  # place and record
    ever: set[int] = set()
    with closing(open_rows(redis.url, tmp_path)) as rows:
        for turn in range(60):
            keys = chance.choice(all_keys(), chance.integers(0, 120), replace=False)  # in any order
            if turn % 2:
                records = chance.integers(0, 256, (len(keys), GROUP.record_bytes), np.uint8)
                records[::3] = 0  # also bytes that numpy's strings would drop
                places = rows.write(keys, records)
                freed = np.array([key for key in keys.tolist() if key in model], np.int64)
                rows.free(freed, np.array([model[key][0] for key in freed.tolist()], np.uint32))
                assert (places < rows.most).all()
                model |= {
                    key: (place, record.tobytes())
                    for key, place, record in zip(keys.tolist(), places.tolist(), records, strict=True)
                }
                ever |= set(keys.tolist())
            else:
                keys = np.array([key for key in keys.tolist() if key in model], np.int64)
                places = np.array([model[key][0] for key in keys.tolist()], np.uint32)
                found = read(rows, keys, places)
                assert [record.tobytes() for record in found] == [model[key][1] for key in keys.tolist()]
                gone = keys[: len(keys) // 4]
                rows.free(gone, places[: len(gone)])
                for key in gone.tolist():
                    del model[key]
            assert rows.used_bytes == len(ever) * VALUE_BYTES
            assert rows.garbage_bytes == (len(ever) - len(model)) * VALUE_BYTES
        assert rows.rows_read > 0
        assert rows.bytes_read == rows.rows_read * VALUE_BYTES
        assert rows.bytes_written == rows.rows_written * VALUE_BYTES
        assert not rows.tidy()


def test_threads_read_and_write_at_the_same_time(redis: RedisServer | RedisCluster, tmp_path: Path) -> None:
    keys, num_threads = all_keys(), 6
    wrong: list[tuple[int, int]] = []

    def work(own: Keys, number: int) -> None:
        for turn in range(20):
            records = random_records(len(own), 100 * number + turn)
            if (read(rows, own, rows.write(own, records)) != records).any():
                wrong.append((number, turn))

    with closing(open_rows(redis.url, tmp_path)) as rows:
        threads = [
            threading.Thread(target=work, args=(keys[number::num_threads], number)) for number in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rows.rows_written == rows.rows_read == 20 * len(keys)
    assert wrong == []


def test_rows_are_spread_over_every_server(redis: RedisServer | RedisCluster, tmp_path: Path) -> None:
    with closing(open_rows(redis.url, tmp_path)) as rows:
        rows.write(all_keys(), random_records(len(all_keys())))
        own = set(keys_of(rows.generation))
        shares = [len(keys_on([server]) & own) for server in servers_of(redis)]
        assert sum(shares) > 150
        assert min(shares) > 0.8 * sum(shares) / len(shares)


def test_a_round_trip_is_a_command_for_each_hash_however_many_rows_it_brings(
    redis: RedisServer | RedisCluster, tmp_path: Path
) -> None:
    keys = np.arange(10_000)
    with closing(open_rows(redis.url, tmp_path)) as rows:
        before = [[server.calls(command) for server in servers_of(redis)] for command in ("hset", "hmget")]
        read(rows, keys, rows.write(keys, random_records(len(keys))))
        after = [[server.calls(command) for server in servers_of(redis)] for command in ("hset", "hmget")]
    assert [sum(new) - sum(old) for new, old in zip(after, before, strict=True)] == [256, 256]


def test_two_runs_on_one_server_have_rows_of_their_own(redis: RedisServer | RedisCluster, tmp_path: Path) -> None:
    keys = all_keys()
    one, two = open_rows(redis.url, tmp_path / "one"), open_rows(redis.url, tmp_path / "two")
    with closing(two):
        places = [rows.write(keys, random_records(len(keys), seed)) for seed, rows in enumerate((one, two))]
        assert (read(one, keys, places[0]) == random_records(len(keys), 0)).all()
        one.close()
        one.close()
        assert (read(two, keys, places[1]) == random_records(len(keys), 1)).all()


def test_closing_deletes_the_keys_of_its_rows_and_no_others(redis: RedisServer | RedisCluster, tmp_path: Path) -> None:
    rows = open_rows(redis.url, tmp_path)
    servers = servers_of(redis)
    others = foreign_keys(servers, rows.generation)
    rows.write(all_keys(), random_records(len(all_keys())))
    assert len(keys_on(servers)) > len(others)
    rows.close()
    assert keys_on(servers) == others
    assert list(tmp_path.iterdir()) == []


def foreign_keys(servers: list[RedisServer], generation: str) -> set[bytes]:
    """Writes keys of other programs and of another run, some of them nearly ours; each to a server that takes it."""
    names = [b"rowcast", b"rowcast:{00}", b"rowcast:{00}ffffffffffff", f"rowcast:{{00}}{generation}x".encode()]
    for server in servers:
        with server.client() as client:
            for name in names:
                with suppress(MovedError):  # of a cluster, one server takes it
                    client.set(name, b"1")
    assert keys_on(servers) >= set(names)
    return keys_on(servers)


def test_the_next_process_deletes_what_a_killed_one_left(redis: RedisServer | RedisCluster, tmp_path: Path) -> None:
    left = open_rows(redis.url, tmp_path)
    left.write(all_keys(), random_records(len(all_keys())))
    assert keys_on(servers_of(redis)) & set(keys_of(left.generation))
    with closing(open_rows(redis.url, tmp_path)) as rows:
        assert rows.generation != left.generation
        assert not keys_on(servers_of(redis)) & set(keys_of(left.generation))


def test_a_copy_of_a_run_leaves_the_rows_of_the_original_alone(
    redis: RedisServer | RedisCluster, tmp_path: Path
) -> None:
    keys = all_keys()
    with closing(open_rows(redis.url, tmp_path / "run")) as rows:
        places = rows.write(keys, random_records(len(keys)))
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        open_rows(redis.url, tmp_path / "copy").close()
        assert (read(rows, keys, places) == random_records(len(keys))).all()


def test_rows_left_on_another_server_are_named_and_stay_there(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "a") as one, RedisServer(tmp_path / "b") as other:
        left = open_rows(one.url, tmp_path / "run")
        left.write(all_keys(), random_records(len(all_keys())))
        held = keys_on([one])
        with capture_logs() as logs:
            open_rows(other.url, tmp_path / "run").close()
        assert keys_on([one]) == held
    (warning,) = (entry for entry in logs if entry["log_level"] == "warning")
    assert warning["server"] == f"127.0.0.1:{one.port}"
    assert warning["keys"] == f"rowcast:{{??}}{left.generation}"


def test_a_damaged_note_of_an_earlier_process_is_replaced(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server") as server:
        open_rows(server.url, tmp_path / "run")
        (note,) = (tmp_path / "run").iterdir()
        note.write_bytes(note.read_bytes()[:-1])
        open_rows(server.url, tmp_path / "run").close()
        assert list((tmp_path / "run").iterdir()) == []
