"""Rows on a Redis server that fails in the middle of a run: both processes end or wait in order, and the bits are the
same after a restart. No output names the password."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rowcast.job.server_url import PASSWORD
from tests.recovery.restarted import END_TIMEOUT_S, MADE, PEER_LOST, Outcome, Recovering, end_well, killed
from tests.support.jobs import table
from tests.support.processes import Session
from tests.support.redis_server import RedisServer, keys_on, needs_redis
from tests.support.starter import Starter

pytestmark = needs_redis
SECRET = "s3cret-of-the-server"
SMALL: dict[str, Any] = MADE | {  # 192 look-ups a step; most rows are on the server
    "tables": [table("one", 2000, 4, "cat_0", "cat_1"), table("two", 300, 4, "cat_2")],
    "cache": {"capacity": "250 rows"},
    "transport": {"ring": "1MiB", "connect_timeout": "60s", "rejoin_timeout": "60s"},
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    monkeypatch.setenv(PASSWORD, SECRET)
    with RedisServer(tmp_path / "server", "--requirepass", SECRET, password=SECRET) as server:
        yield server


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory, starter: Starter) -> Outcome:
    with Session(tmp_path_factory.mktemp("in_memory"), starter.launch) as session:
        return Recovering(session, **SMALL).finish()


def on(server: RedisServer) -> dict[str, Any]:
    return {"store": {"kind": "redis", "memory": "250 rows", "url": server.url_text, "timeout": "2s"}}


def files_with_the_password(folder: Path) -> list[Path]:
    """Job file, output, logs, reports, checkpoints."""
    files = [path for path in folder.rglob("*") if path.is_file() and "server" not in path.parts]
    assert {"report.json", "report.html", "losses.f32"} <= {path.name for path in files}
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def test_rows_on_a_server_have_the_bits_of_rows_in_memory(
    server: RedisServer, session: Session, in_memory: Outcome
) -> None:
    assert Recovering(session, **SMALL, **on(server)).finish().differs(in_memory) == []
    assert server.calls("hmget") > 0, "rows came back from the server"
    assert server.calls("hdel") > 0, "and were freed there"
    assert keys_on([server]) == set()
    assert session.remains() == []
    assert files_with_the_password(session.folder) == []


def restart(server: RedisServer) -> None:
    server.kill()
    server.start()


FAILURES: dict[str, tuple[Callable[[RedisServer], None], Callable[[RedisServer], None], str]] = {
    "killed": (RedisServer.kill, RedisServer.start, " is gone "),
    "stopped": (RedisServer.stop, RedisServer.go_on, "did not answer within 2 s (store.timeout)"),
    "started again, empty": (restart, lambda server: None, "lost rows"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_ends_the_prefetcher_and_the_trainer_waits_for_the_next_one(
    failure: str, server: RedisServer, session: Session, in_memory: Outcome
) -> None:
    fail, repair, words = FAILURES[failure]
    run = Recovering(session, **SMALL, **on(server))
    processes = run.start_both({"trainer": "loss written:10"})
    killed(processes["trainer"])
    fail(server)  # while the prefetcher waits for another trainer
    processes["trainer"] = run.start("trainer")
    ended = processes["prefetcher"].ended(END_TIMEOUT_S)
    assert words in ended.refused(PEER_LOST), ended.stderr
    repair(server)
    processes["prefetcher"] = run.start("prefetcher")
    end_well(*processes.values())
    assert run.num_starts == 4
    assert run.finish().differs(in_memory) == []
    assert keys_on([server]) == set()
    assert session.remains() == []
    assert files_with_the_password(session.folder) == []


def test_a_server_that_is_full_ends_both_in_order_and_more_memory_lets_the_run_go_on(
    server: RedisServer, session: Session, in_memory: Outcome
) -> None:
    more = {"transport": SMALL["transport"] | {"rejoin_timeout": "0s"}}
    run = Recovering(session, **SMALL | more, **on(server))
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 100_000)
        processes = run.start_both()
        sentence = processes["prefetcher"].ended(END_TIMEOUT_S).refused(1)
        assert "has no memory left for rows" in sentence
        assert processes["trainer"].ended(END_TIMEOUT_S).refused(1) in sentence
        client.config_set("maxmemory", 0)
    assert run.finish().differs(in_memory) == []
    assert keys_on([server]) == set()


@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_while_rows_move_ends_both_with_one_sentence(
    failure: str, server: RedisServer, session: Session
) -> None:
    fail, repair, _ = FAILURES[failure]
    session.write_job(**SMALL | {"transport": {"ring": "1MiB", "connect_timeout": "60s"}}, **on(server))
    prefetcher, trainer = session.start_training()
    fail(server)
    sentence = prefetcher.ended(END_TIMEOUT_S).refused(PEER_LOST)
    assert f"Redis server 127.0.0.1:{server.port} (store.url)" in sentence
    assert sentence in trainer.ended(END_TIMEOUT_S).refused(PEER_LOST)
    assert session.remains() == []
    repair(server)
