"""Rows on a Redis server that fails in the middle of a run: both processes end or wait in order, and the bits are the
same after a restart. Keys of others stay as they are. No output names the password."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rowcast.job.stores import PASSWORD
from tests.recovery.crashes import CRASHES, NEEDS_REJOIN, OF_ONE_PAIR
from tests.recovery.ranked import PARTS, RecoveringRanks
from tests.recovery.restarted import (
    END_TIMEOUT_S,
    MADE,
    PEER_LOST,
    TIERED,
    Outcome,
    Recovering,
    Role,
    end_well,
    killed,
)
from tests.support.jobs import table
from tests.support.processes import POLL_S, Process, Session
from tests.support.redis_proxy import Proxy
from tests.support.redis_server import BOUND, RedisCluster, RedisServer, keys_on, needs_redis
from tests.support.repeats import count
from tests.support.starter import Starter

pytestmark = needs_redis
SECRET = "s3cret-of-the-server"
FOREIGN = {b"other": b"1", b"rowcast:{00}": b"2", b"rowcast:{00}ffffffffffff": b"3"}
SMALL: dict[str, Any] = MADE | {  # 192 look-ups a step; most rows are on the server
    "tables": [table("one", 2000, 4, "cat_0", "cat_1"), table("two", 300, 4, "cat_2")],
    "cache": {"capacity": "250 rows"},
    "transport": {"ring": "1MiB", "connect_timeout": "60s", "rejoin_timeout": "60s"},
}
ALONE = SMALL | {"transport": {"ring": "1MiB", "connect_timeout": "60s"}}  # nobody waits for a lost one


@dataclass(frozen=True, kw_only=True)
class Place:
    """A server behind a proxy, in a folder."""

    server: RedisServer
    proxy: Proxy
    folder: Path

    @property
    def store(self) -> dict[str, Any]:
        return {"store": {"kind": "redis", "memory": "250 rows", "url": self.proxy.url_text, "timeout": "2s"}}

    def restart(self) -> None:
        self.server.kill()
        self.server.start()

    def evict(self) -> None:
        # both at once: it may not look as if it could evict before it has. A row between them would find no memory
        with self.proxy.held(), self.server.client() as client:
            client.execute_command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru", "maxmemory", 1)
            client.config_set("maxmemory", 0)
            assert client.info()["evicted_keys"] > 0

    def never_evict(self) -> None:
        with self.server.client() as client:
            client.config_set("maxmemory-policy", "noeviction")

    def keys(self) -> set[bytes]:
        return keys_on([self.server])

    def check_foreign_keys(self, *, all_there: bool) -> None:
        """Only those of others are left, as they were. `all_there`: the server itself has lost none."""
        with self.server.client() as client:
            found = {name: client.get(name) for name in keys_on([self.server])}
        assert found == FOREIGN if all_there else found.items() <= FOREIGN.items(), found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv(PASSWORD, SECRET)
    with (
        RedisServer(tmp_path / "server", "--requirepass", SECRET, password=SECRET) as server,
        Proxy(server.port) as proxy,
    ):
        with server.client() as client:
            client.mset(FOREIGN)
        yield Place(server=server, proxy=proxy, folder=tmp_path)


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory, starter: Starter) -> Outcome:
    with Session(tmp_path_factory.mktemp("in_memory"), starter.launch) as session:
        return Recovering(session, **SMALL).finish()


def files_with_the_password(folder: Path) -> list[Path]:
    """Job file, output, logs, reports, checkpoints."""
    files = [path for path in folder.rglob("*") if path.is_file() and "server" not in path.parts]
    assert {"report.json", "report.html", "losses.f32"} <= {path.name for path in files}
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def test_rows_on_a_server_have_the_bits_of_rows_in_memory(place: Place, session: Session, in_memory: Outcome) -> None:
    run = Recovering(session, **SMALL, **place.store)
    processes = run.start_both()
    end_well(*processes.values())
    assert run.finish().differs(in_memory) == []
    assert run.num_starts == 2
    assert place.server.calls("hmget") > 0, "rows came back from the server"
    assert place.server.calls("hdel") > 0, "and were freed there"
    place.check_foreign_keys(all_there=True)
    assert session.remains() == []
    assert files_with_the_password(session.folder) == []


def test_ranks_that_were_killed_leave_no_rows_where_one_pair_goes_on(place: Place, session: Session) -> None:
    ranks = RecoveringRanks(session, **ALONE, **place.store)
    command = ranks.start()
    assert ranks.until(command, lambda: len(place.keys() - FOREIGN.keys()) > 256)
    ranks.processes.by_name()
    while session.alive():  # those that a process starts meanwhile, too
        for pid in session.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        command.reap()
    assert place.keys() > FOREIGN.keys()
    assert len(list(session.run_dir.glob("rank-*/tables/*.redis"))) == 2
    run = Recovering(session, ranks={"count": 1, "parts": PARTS}, **ALONE, **place.store)
    run.finish()
    place.check_foreign_keys(all_there=True)
    assert not list(session.run_dir.rglob("*.redis"))


@dataclass(frozen=True, kw_only=True)
class Failure:
    fail: Callable[[Place], None]
    repair: Callable[[Place], None] = lambda place: None
    words: tuple[str, ...]  # one of them
    loses_all: bool = False


def goes_on(run: Recovering, processes: dict[Role, Process], sentence: str) -> None:
    """Another prefetcher is started. The trainer waits for it, or ends as well where it had not met the one that is
    lost, and is started again."""
    processes["prefetcher"] = run.start("prefetcher")
    trainer = processes["trainer"]
    while trainer.running and processes["prefetcher"].running:
        time.sleep(POLL_S)
    if not trainer.running and trainer.ended().code != 0:
        assert sentence in trainer.ended().refused(PEER_LOST)
        processes["trainer"] = run.start("trainer")
    end_well(*processes.values())


FAILURES = {
    "killed": Failure(
        fail=lambda place: place.server.kill(),
        repair=lambda place: place.server.start(),
        words=(" is gone ", " cannot be reached "),
        loses_all=True,
    ),
    "stopped": Failure(
        fail=lambda place: place.server.stop(),
        repair=lambda place: place.server.go_on(),
        words=("did not answer within 2 s (store.timeout)",),
    ),
    "cut off": Failure(
        fail=lambda place: place.proxy.cut(),
        repair=lambda place: place.proxy.heal(),
        words=("did not answer within 2 s (store.timeout)",),
    ),
    "started again, empty": Failure(fail=Place.restart, words=("lost rows", " is gone "), loses_all=True),
    "evicting": Failure(
        fail=Place.evict,
        repair=Place.never_evict,
        words=("has evicted keys, perhaps rows",),
        loses_all=True,
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_server_that_fails_ends_the_prefetcher_and_the_trainer_waits_for_the_next_one(
    name: str, place: Place, session: Session, in_memory: Outcome
) -> None:
    failure = FAILURES[name]
    run = Recovering(session, **SMALL, **place.store)
    processes = run.start_both({"trainer": "loss written:10"})
    killed(processes["trainer"])
    failure.fail(place)  # while the prefetcher waits for another trainer
    processes["trainer"] = run.start("trainer")
    sentence = processes["prefetcher"].ended(END_TIMEOUT_S).refused(PEER_LOST)
    assert any(words in sentence for words in failure.words), sentence
    failure.repair(place)
    goes_on(run, processes, sentence)
    assert run.finish().differs(in_memory) == []
    place.check_foreign_keys(all_there=not failure.loses_all)
    assert session.remains() == []
    assert files_with_the_password(session.folder) == []


def test_a_client_that_changes_rows_under_a_run_ends_both_before_a_row_of_it_is_trained(
    place: Place, session: Session
) -> None:
    session.write_job(**ALONE | {"data": {**ALONE["data"], "epochs": 10_000}}, **place.store)
    prefetcher, trainer = session.start_training()
    with place.server.client() as client:
        while prefetcher.running:
            for name in set(client.keys("rowcast:*")) - set(FOREIGN):
                for field, value in client.hgetall(name).items():
                    client.hset(name, field, value[:2] + bytes([value[2] ^ 1]) + value[3:])
    sentence = prefetcher.ended(END_TIMEOUT_S).refused(PEER_LOST)
    assert re.search(r"has bytes for row \d+ of table (one|two) that another program has written", sentence), sentence
    assert sentence in trainer.ended(END_TIMEOUT_S).refused(PEER_LOST)


def test_a_server_that_is_full_ends_both_in_order_and_more_memory_lets_the_run_go_on(
    place: Place, session: Session, in_memory: Outcome
) -> None:
    run = Recovering(session, **ALONE, **place.store)
    with place.server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 100_000)
        processes = run.start_both()
        sentence = processes["prefetcher"].ended(END_TIMEOUT_S).refused(1)
        assert "has no memory left for rows" in sentence
        assert processes["trainer"].ended(END_TIMEOUT_S).refused(1) in sentence
        client.config_set("maxmemory", 0)
    assert run.finish().differs(in_memory) == []
    place.check_foreign_keys(all_there=True)


def test_a_cluster_loses_a_server_and_the_run_goes_on_with_the_same_bits_once_it_is_back(
    tmp_path: Path, session: Session, in_memory: Outcome
) -> None:
    with RedisCluster(tmp_path / "cluster") as cluster:
        store = {"kind": "redis", "memory": "250 rows", "url": cluster.nodes[0].url_text, "timeout": "2s"}
        run = Recovering(session, **SMALL, store=store)
        processes = run.start_both({"trainer": "loss written:10"})
        killed(processes["trainer"])
        cluster.nodes[2].kill()
        processes["trainer"] = run.start("trainer")
        sentence = processes["prefetcher"].ended(END_TIMEOUT_S).refused(PEER_LOST)
        assert f"{BOUND}:{cluster.nodes[2].port} (store.url) is gone" in sentence
        cluster.nodes[2].start()
        cluster.mend()
        goes_on(run, processes, sentence)
        assert run.finish().differs(in_memory) == []
        assert keys_on(cluster.nodes) == set()


# those at which the server holds rows that the next process has to know of; `make soak` tries all
WITH_ROWS = ("rows spilled", "changed rows restored", "run not marked complete")


@pytest.mark.parametrize("name", OF_ONE_PAIR if count(0, 1) else WITH_ROWS)
def test_a_run_that_is_killed_there_comes_to_the_same_bits_and_leaves_no_rows(
    name: str, place: Place, session: Session, undisturbed: Outcome
) -> None:
    rejoin = {"rejoin_timeout": "60s"} if name in NEEDS_REJOIN else {}
    transport = {"ring": "1MiB", "connect_timeout": "10s", **rejoin}
    store = place.store["store"] | {"memory": TIERED["memory"]}
    run = Recovering(session, transport=transport, store=store)
    for armed in CRASHES[name]:
        run.crash(armed)
    assert run.finish().differs(undisturbed) == []
    place.check_foreign_keys(all_there=True)
    assert session.remains() == []
