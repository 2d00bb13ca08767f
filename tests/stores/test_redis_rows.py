"""Rows on real Redis servers, one and a cluster of three: what comes back, and whose keys are touched."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from redis.exceptions import MovedError
from structlog.testing import capture_logs

from rowcast.job.stores import ServerUrl
from rowcast.prefetcher.stores.cold import redis_keys, redis_rows
from rowcast.prefetcher.stores.cold.redis_keys import keys_of
from rowcast.prefetcher.stores.cold.redis_rows import RedisRows
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.runtime.errors import ConfigError
from tests.stores.every_store import GROUP, all_keys, random_records
from tests.support.facts import facts
from tests.support.redis_server import RedisCluster, RedisServer, keys_on, needs_redis
from tests.support.repeats import count

pytestmark = needs_redis
COMMANDS = ("hset", "hmget", "hdel")
VALUE_BYTES = GROUP.record_bytes + 8


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


class Model:
    """Rows in a dictionary beside rows on Redis. What was in use when a reader began to hold is read before it ends."""

    def __init__(self, rows: RedisRows, seed: int) -> None:
        self.rows, self.chance = rows, np.random.default_rng(seed)
        self.held: dict[int, tuple[int, bytes]] = {}  # place and record
        self.readers: list[tuple[ExitStack, dict[int, tuple[int, bytes]]]] = []
        self.garbage = 0

    def write(self) -> None:
        keys = self.chance.choice(all_keys(), self.chance.integers(0, 120), replace=False)  # in any order
        records = self.chance.integers(0, 256, (len(keys), GROUP.record_bytes), np.uint8)
        records[::3] = 0  # bytes that numpy's strings would drop
        places = self.rows.write(keys, records)
        assert (places < self.rows.most).all()
        self.free([key for key in keys.tolist() if key in self.held])
        for key, place, record in zip(keys.tolist(), places.tolist(), records, strict=True):
            self.held[key] = place, record.tobytes()

    def forget(self) -> None:
        self.free(self.some(self.held))

    def free(self, keys: list[int]) -> None:
        self.rows.free(np.array(keys, np.int64), np.array([self.held.pop(key)[0] for key in keys], np.uint32))
        self.garbage += len(keys)

    def read(self) -> None:
        self.check(self.held)

    def begin_to_hold(self) -> None:
        reader = ExitStack()
        reader.enter_context(self.rows.hold())
        self.readers.append((reader, self.held.copy()))

    def end_to_hold(self) -> None:
        if self.readers:
            reader, in_use = self.readers.pop(self.chance.integers(len(self.readers)))
            self.check(in_use)
            reader.close()

    def tidy(self) -> None:
        before = self.rows.garbage_bytes
        if not self.rows.tidy():
            assert self.readers or not self.garbage, "freed rows stay only while somebody holds"
        self.garbage -= (before - self.rows.garbage_bytes) // VALUE_BYTES

    def check(self, in_use: dict[int, tuple[int, bytes]]) -> None:
        keys = self.some(in_use)
        places = np.array([in_use[key][0] for key in keys], np.uint32)
        found = read(self.rows, np.array(keys, np.int64), places)
        assert [record.tobytes() for record in found] == [in_use[key][1] for key in keys]

    def some(self, rows: dict[int, tuple[int, bytes]]) -> list[int]:
        return [key for key in rows if self.chance.random() < 0.3]


@pytest.mark.parametrize("seed", range(count(3, soak=100)))
def test_rows_come_back_as_a_dictionary_has_them(
    redis: RedisServer | RedisCluster, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_rows, "ROWS_AT_ONCE", 50)  # so that a call takes several round trips
    with closing(open_rows(redis.url, tmp_path)) as rows:
        model = Model(rows, seed)
        work = [model.write, model.write, model.forget, model.read, model.begin_to_hold, model.end_to_hold, model.tidy]
        for choice in model.chance.integers(0, len(work), 150):
            work[choice]()
            assert rows.garbage_bytes == model.garbage * VALUE_BYTES
            assert rows.used_bytes == (len(model.held) + model.garbage) * VALUE_BYTES
        while model.readers:
            model.end_to_hold()
        while rows.tidy():
            pass
        assert rows.garbage_bytes == 0
        assert num_fields(servers_of(redis), rows) == len(model.held)
        assert rows.bytes_read == rows.rows_read * VALUE_BYTES > 0
        assert rows.bytes_written == rows.rows_written * VALUE_BYTES > 0


def num_fields(servers: list[RedisServer], rows: RedisRows) -> int:
    total = 0
    for server in servers:
        with server.client() as client:
            total += sum(client.hlen(name) for name in set(keys_of(rows.generation)) & set(client.keys("*")))
    return total


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
        before = [[server.calls(command) for server in servers_of(redis)] for command in COMMANDS]
        places = rows.write(keys, random_records(len(keys)))
        read(rows, keys, places)
        rows.free(keys, places)
        rows.tidy()
        after = [[server.calls(command) for server in servers_of(redis)] for command in COMMANDS]
    assert [sum(new) - sum(old) for new, old in zip(after, before, strict=True)] == [256, 256, 256]


def test_closing_deletes_the_keys_of_its_rows_and_no_others(redis: RedisServer | RedisCluster, tmp_path: Path) -> None:
    rows = open_rows(redis.url, tmp_path)
    servers = servers_of(redis)
    others = foreign_keys(servers, rows.generation)
    rows.write(all_keys(), random_records(len(all_keys())))
    assert len(keys_on(servers)) > len(others)
    rows.close()
    rows.close()
    assert keys_on(servers) == others
    assert list(tmp_path.iterdir()) == []


def foreign_keys(servers: list[RedisServer], generation: str) -> set[bytes]:
    """Writes keys of other programs and of another run, some of them nearly ours; each to a server that takes it."""
    names = [b"rowcast", b"rowcast:{00}", b"rowcast:{00}ffffffffffff", f"rowcast:{{00}}{generation}x".encode()]
    for server in servers:
        with server.client() as client:
            for name in names:
                with suppress(MovedError):  # only one server of a cluster takes it
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


def test_a_note_is_whole_and_on_the_disk_before_there_are_rows(
    redis: RedisServer | RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = list[str](), os.fsync

    def remember(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", remember)
    with closing(open_rows(redis.url, tmp_path)):
        assert synced == [str(tmp_path / f"{GROUP.name}.redis.partial"), str(tmp_path)]
        assert [path.name for path in tmp_path.iterdir()] == [f"{GROUP.name}.redis"]


def on_a_disk(monkeypatch: pytest.MonkeyPatch, machine: Path, device: int = os.makedev(259, 1)) -> None:
    """The table folder is on a disk of this machine, whatever the tests run on."""
    monkeypatch.setattr(redis_keys, "MACHINE_ID", machine)
    monkeypatch.setattr(os, "major", lambda found: device >> 8)


def test_a_copy_of_a_whole_disk_leaves_the_rows_of_the_original_alone(
    redis: RedisServer | RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same inodes. The keys that may be left are named."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name}\n")
    on_a_disk(monkeypatch, tmp_path / "a")
    keys, folder = all_keys(), tmp_path / "run"
    with closing(open_rows(redis.url, folder)) as rows:
        places = rows.write(keys, random_records(len(keys)))
        on_a_disk(monkeypatch, tmp_path / "b")
        with capture_logs() as logs:
            open_rows(redis.url, folder).close()
        assert (read(rows, keys, places) == random_records(len(keys))).all()
    assert [entry["keys"] for entry in logs if "another machine" in entry["event"]] == [
        f"rowcast:{{??}}{rows.generation}"
    ]


@pytest.mark.parametrize("what", ["a shared file system", "a machine without an id", "a note of an earlier version"])
def test_a_run_that_has_moved_to_another_machine_deletes_what_it_left(
    redis: RedisServer | RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    device = 45 if what == "a shared file system" else os.makedev(259, 1)
    missing = what == "a machine without an id"
    on_a_disk(monkeypatch, tmp_path / ("none" if missing else "a"), device)
    left = open_rows(redis.url, tmp_path / "run")
    left.write(all_keys(), random_records(len(all_keys())))
    if what == "a note of an earlier version":
        (note,) = (tmp_path / "run").iterdir()
        content = msgspec.json.decode(note.read_bytes())
        del content["machine"]
        note.write_bytes(msgspec.json.encode(content))
    on_a_disk(monkeypatch, tmp_path / ("none" if missing else "b"), device)
    with closing(open_rows(redis.url, tmp_path / "run")):
        assert not keys_on(servers_of(redis)) & set(keys_of(left.generation))


def test_a_folder_that_cannot_be_written_is_refused_before_a_key_is_made(
    redis: RedisServer | RedisCluster, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    before = keys_on(servers_of(redis))
    with pytest.raises(ConfigError, match=facts("file/run", "Not a directory")):
        open_rows(redis.url, tmp_path / "file" / "run")
    assert keys_on(servers_of(redis)) == before
