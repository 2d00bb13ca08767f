"""What a run is told when Redis fails: with real servers that are killed, stopped, emptied, full, or replaced."""

import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from rowcast.job.stores import ServerUrl
from rowcast.prefetcher.stores.cold import redis_rows
from rowcast.prefetcher.stores.cold.redis_rows import RedisRows, hash_of
from rowcast.runtime.errors import ConfigError, RowcastError, StoreLost
from tests.stores.every_store import GROUP, all_keys, random_records
from tests.support.redis_server import BOUND, RedisCluster, RedisServer, free_port, needs_redis, state, wait_until

pytestmark = needs_redis
KEYS = all_keys()
ROWS = random_records(len(KEYS))
NEWER = random_records(len(KEYS), 1)
SECRET = "s3cret-of-the-server"


def open_rows(url: ServerUrl, folder: Path, password: str | None = None, timeout_s: float = 20.0) -> RedisRows:
    return RedisRows.open(GROUP, url, folder, password=password, timeout_s=timeout_s)


@contextmanager
def opened(server: RedisServer | RedisCluster, folder: Path, timeout_s: float = 20.0) -> Iterator[RedisRows]:
    with closing(open_rows(server.url, folder / "run", timeout_s=timeout_s)) as rows:
        yield rows


@contextmanager
def refused(kind: type[RowcastError], *words: str) -> Iterator[None]:
    """The error has this kind and is one sentence with these words in it."""
    with pytest.raises(RowcastError) as raised:
        yield
    sentence = str(raised.value)
    assert type(raised.value) is kind, sentence
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence
    assert SECRET not in repr(raised.getrepr(showlocals=False)), sentence


def field(key: int, write: int) -> bytes:
    return int(key).to_bytes(8, "little") + write.to_bytes(4, "little")


def check_that_it_stays_lost(rows: RedisRows) -> None:
    """Every later call raises the first error."""
    with pytest.raises(RowcastError) as first:
        rows.write(KEYS, ROWS)
    with pytest.raises(RowcastError) as later:
        rows.read(KEYS, np.zeros(len(KEYS), np.uint32), ROWS.copy())
    assert later.value is first.value
    with pytest.raises(RowcastError) as later:
        rows._servers.check()
    assert later.value is first.value


# opening


def test_no_server_there(tmp_path: Path) -> None:
    port = free_port()
    with refused(StoreLost, f"{BOUND}:{port} (store.url) cannot be reached", "Connection refused"):
        open_rows(ServerUrl(host=BOUND, port=port, tls=False, user=None), tmp_path)


def test_a_password_is_needed_and_checked(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server", "--requirepass", SECRET, password=SECRET) as server:
        with refused(ConfigError, "refuses this user", "set ROWCAST_REDIS_PASSWORD"):
            open_rows(server.url, tmp_path / "run")
        with refused(ConfigError, "refuses this user", "set ROWCAST_REDIS_PASSWORD"):
            open_rows(server.url, tmp_path / "run", f"{SECRET}-not")
        open_rows(server.url, tmp_path / "run", SECRET).close()


def test_a_server_that_repeats_the_password_in_an_error_is_not_quoted(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "server", "--rename-command", "AUTH", "") as server,
        refused(RowcastError, "***"),
    ):
        open_rows(server.url, tmp_path / "run", SECRET)


USER = ["--user", "rows", "on", f">{SECRET}", "~rowcast:*", "+hset", "+hmget", "+hdel", "+unlink", "+info"]


def test_a_user_with_the_rights_that_the_page_names_is_enough(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server", *USER) as server:
        url = ServerUrl(host=BOUND, port=server.port, tls=False, user="rows")
        with closing(open_rows(url, tmp_path / "run", SECRET)) as rows:
            out = ROWS.copy()
            rows.read(KEYS, rows.write(KEYS, NEWER), out)
            assert (out == NEWER).all()
            rows._servers.check()
        with server.client() as client:
            assert client.dbsize() == 0


def test_a_user_without_a_right_is_refused(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server", *USER) as server:
        url = ServerUrl(host=BOUND, port=server.port, tls=False, user="rows")
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "rows", "-hmget")
        with closing(open_rows(url, tmp_path / "run", SECRET)) as rows:
            places = rows.write(KEYS, ROWS)
            with refused(ConfigError, "refuses this user", "hmget", "the user's rights"):
                rows.read(KEYS, places, ROWS.copy())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificates with openssl, which is not here")
    folder = tmp_path_factory.mktemp("certificates")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=rowcast tests"]
    subprocess.run([*command, "-addext", f"subjectAltName=IP:{BOUND}"], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def tls_server(certificates: Path, tmp_path: Path) -> Iterator[RedisServer]:
    port = free_port()
    options = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(certificates / "cert.pem"), "--tls-key-file", str(certificates / "key.pem")]
    settings = {"ssl": True, "ssl_ca_certs": str(certificates / "cert.pem")}
    server = RedisServer(tmp_path / "server", *options, port=port, **settings)
    try:
        server.start()
    except AssertionError as error:
        if "TLS support" in str(error):
            pytest.skip("this server was built without TLS")
        raise
    yield server
    server.kill()


def test_tls(tls_server: RedisServer, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = ServerUrl(host=BOUND, port=tls_server.port, tls=True, user=None)
    with refused(ConfigError, "not trusted", "certificate verify failed", "SSL_CERT_FILE"):
        open_rows(url, tmp_path / "run")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "cert.pem"))
    with closing(open_rows(url, tmp_path / "run")) as rows:
        out = ROWS.copy()
        rows.read(KEYS, rows.write(KEYS, NEWER), out)
        assert (out == NEWER).all()


def test_no_tls_where_the_server_wants_it(tls_server: RedisServer, tmp_path: Path) -> None:
    with refused(StoreLost, "cannot be reached", "correct store.url (rediss:// if it wants TLS)"):
        open_rows(tls_server.url, tmp_path / "run")


def test_tls_where_the_server_has_none(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "server") as server,
        refused(StoreLost, "did not answer within 0.2 s", "correct store.url (redis:// if it has no TLS)"),
    ):
        url = ServerUrl(host=BOUND, port=server.port, tls=True, user=None)
        open_rows(url, tmp_path / "run", timeout_s=0.2)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_may_evict_is_refused(policy: str, tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "server", "--maxmemory-policy", policy) as server,
        refused(ConfigError, f"has maxmemory-policy {policy}", "set it to noeviction"),
    ):
        open_rows(server.url, tmp_path / "run")


def test_a_replica_is_refused(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "primary") as primary,
        RedisServer(tmp_path / "replica", "--replicaof", f"{BOUND} {primary.port}") as replica,
        refused(ConfigError, "is a replica", "set store.url to its primary"),
    ):
        open_rows(replica.url, tmp_path / "run")


# in the middle of a run


def test_a_server_that_is_killed(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server") as server, opened(server, tmp_path) as rows:
        places = rows.write(KEYS, ROWS)
        server.kill()
        with refused(StoreLost, "is gone", "continues from the newest checkpoint"):
            rows.read(KEYS, places, ROWS.copy())
        check_that_it_stays_lost(rows)


def test_a_server_that_is_stopped_counts_as_lost_after_one_timeout_and_is_asked_nothing_more(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server") as server:
        with opened(server, tmp_path, timeout_s=0.2) as rows:
            places = rows.write(KEYS, ROWS)
            before = {command: server.calls(command) for command in ("hset", "hmget", "unlink")}
            server.stop()
            with refused(StoreLost, "did not answer within 0.2 s (store.timeout)"):
                rows.write(KEYS[:1], NEWER[:1])
            check_that_it_stays_lost(rows)
            with pytest.raises(StoreLost):
                rows.read(KEYS, places, ROWS.copy())
        server.go_on()
        with server.client() as client:  # answered once the late write has been carried out
            assert client.hget(next(name for _, name in rows._hashes if client.exists(name)), b"none") is None
        after = {command: server.calls(command) for command in ("hset", "hmget", "unlink")}
    assert {command: after[command] - before[command] for command in before} == {"hset": 1, "hmget": 0, "unlink": 0}


class Silent:
    """Accepts connections and answers to what it is told; `None` is silence."""

    def __init__(self, answer: bytes | None) -> None:
        self.connections = 0
        self.received = b""
        self._answer = answer
        self._socket = socket.create_server((BOUND, 0))
        self.url = ServerUrl(host=BOUND, port=self._socket.getsockname()[1], tls=False, user=None)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while received := connection.recv(2**16):
                self.received += received
                if self._answer is not None:
                    connection.sendall(self._answer * received.count(b"*"))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join()


def test_a_server_that_never_answers_gets_one_connection_and_one_first_command(tmp_path: Path) -> None:
    with closing(Silent(None)) as server, refused(StoreLost, "did not answer within 0.2 s (store.timeout)"):
        open_rows(server.url, tmp_path, timeout_s=0.2)
    assert server.connections == 1
    assert server.received.count(b"*") <= 2  # redis-py's two greetings, sent together


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", StoreLost, "is still loading its data"),
        (b"-ERR max number of clients reached\r\n", StoreLost, "cannot be reached (max number of clients reached)"),
        (b"-DENIED Redis is running in protected mode\r\n", RowcastError, "refuses a command (DENIED Redis is"),
        (b"HTTP/1.1 400 Bad Request\r\n", RowcastError, "Protocol error"),
    ],
)
def test_a_server_that_answers_with_an_error(
    answer: bytes, kind: type[RowcastError], words: str, tmp_path: Path
) -> None:
    with closing(Silent(answer)) as server, refused(kind, words):
        open_rows(server.url, tmp_path, timeout_s=20.0)


def test_a_server_that_started_again_empty(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server") as server, opened(server, tmp_path) as rows:
        places = rows.write(KEYS, ROWS)
        server.kill()
        server.start()
        with refused(StoreLost, "was started again and lost rows"):
            rows.read(KEYS, places, ROWS.copy())
        check_that_it_stays_lost(rows)


def test_a_server_that_started_again_is_noticed_before_a_row_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_rows, "CHECK_S", 0.0)
    with RedisServer(tmp_path / "server") as server, opened(server, tmp_path) as rows:
        rows.write(KEYS, ROWS)
        assert not rows.tidy()
        server.kill()
        server.start()
        with refused(StoreLost, "was started again"):
            rows.tidy()


def test_a_server_that_was_set_to_evict_and_did(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server") as server, opened(server, tmp_path) as rows:
        places = rows.write(KEYS, ROWS)
        with server.client() as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
            client.config_set("maxmemory", 1)
            client.config_set("maxmemory", 0)
            assert client.info()["evicted_keys"] > 0
        with refused(StoreLost, "has evicted keys", "set its maxmemory-policy to noeviction"):
            rows.read(KEYS, places, ROWS.copy())


def test_a_server_that_may_evict_from_now_on(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server") as server, opened(server, tmp_path) as rows:
        rows.write(KEYS, ROWS)
        with server.client() as client:
            client.config_set("maxmemory-policy", "volatile-lru")
        with refused(ConfigError, "has maxmemory-policy volatile-lru"):
            rows._servers.check()
        check_that_it_stays_lost(rows)


def test_each_row_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Nothing in the server's counters shows it."""
    with RedisServer(tmp_path / "server") as server:
        for number in (0, 5, len(KEYS) - 1):
            with opened(server, tmp_path) as rows, server.client() as client:
                places = rows.write(KEYS, ROWS)
                assert sum(client.hdel(name, field(KEYS[number], 0)) for _, name in rows._hashes) == 1
                untouched = KEYS[number] != KEYS
                rows.read(KEYS[untouched], places[untouched], ROWS[untouched].copy())
                table = {0: "first", 2: "second", 3: "third"}[int(KEYS[number]) >> 48]
                with refused(StoreLost, f"has lost row {KEYS[number] & (2**48 - 1)} of table {table} as write 0"):
                    rows.read(KEYS, places, ROWS.copy())
                check_that_it_stays_lost(rows)


def test_rows_that_were_freed_and_are_gone_already_tell_that_others_may_be(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server") as server, opened(server, tmp_path) as rows, server.client() as client:
        rows.free(KEYS, rows.write(KEYS, ROWS))
        client.unlink(rows._hashes[int(hash_of(KEYS[:1])[0])][1])
        with refused(StoreLost, "has lost", "rows; the next start"):
            rows.tidy()
        check_that_it_stays_lost(rows)


def test_a_server_without_memory_ends_the_run_in_order(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server") as server, opened(server, tmp_path) as rows:
        places, out = rows.write(KEYS, ROWS), ROWS.copy()
        with server.client() as client:
            client.config_set("maxmemory", 1)
        rows.read(KEYS, places, out)
        assert (out == ROWS).all()
        with refused(RowcastError, "has no memory left for rows", "raise its maxmemory", "newest checkpoint"):
            rows.write(KEYS, NEWER)


def wait_for_replica(client: Any) -> None:
    client.set("last", "write")  # WAIT asks for what its own connection has written
    assert client.execute_command("WAIT", 1, 0) == 1


def test_a_stale_replica_that_took_over_is_found_at_the_first_row_that_it_has_not(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "primary") as primary:
        replica = RedisServer(tmp_path / "replica", "--replicaof", f"{BOUND} {primary.port}")
        with replica, opened(primary, tmp_path) as rows, primary.client() as client, replica.client() as other:
            before = rows.write(KEYS, ROWS)
            wait_for_replica(client)
            other.replicaof("NO", "ONE")
            places = rows.write(KEYS[3:], NEWER[3:])
            primary.kill()
            other.config_set("port", primary.port)
            rows._servers.nodes[0].run_id = other.info()["run_id"]  # nothing else tells, as behind some proxies
            out = ROWS.copy()
            rows.read(KEYS[:3], before[:3], out[:3])
            assert (out == ROWS).all()
            with refused(StoreLost, "has lost row", "as write 1 brought it"):
                rows.read(KEYS[3:], places, ROWS[3:].copy())


def test_a_primary_that_becomes_a_replica(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "a") as server, RedisServer(tmp_path / "b") as other, opened(server, tmp_path) as rows:
        rows.write(KEYS, ROWS)
        with server.client() as client:
            client.replicaof(BOUND, other.port)
        with refused(StoreLost, "has become a replica"):
            rows.write(KEYS, NEWER)


ROW, OTHER, OLDER = field(KEYS[1], 1), field(KEYS[0], 1), field(KEYS[1], 0)
WRITTEN_OVER = "bytes for row 1 of table first that another program has written"
HARM: dict[str, tuple[Callable[[Any, bytes], object], str]] = {
    "a key": (lambda client, name: client.set(name, b"x"), "has written to a key of this run (WRONGTYPE"),
    "too few bytes": (lambda client, name: client.hset(name, ROW, b"x"), WRITTEN_OVER),
    "more bytes": (lambda client, name: client.hset(name, ROW, b"x" + client.hget(name, ROW)), WRITTEN_OVER),
    "another row": (lambda client, name: client.hset(name, ROW, value_of(client, OTHER)), WRITTEN_OVER),
    "an older value": (lambda client, name: client.hset(name, ROW, value_of(client, OLDER)), WRITTEN_OVER),
}


def value_of(client: Any, field: bytes) -> Any:
    return next(filter(None, (client.hget(name, field) for name in client.keys("rowcast:*"))))


@pytest.mark.parametrize("harm", HARM)
def test_a_row_that_another_program_writes_over(harm: str, tmp_path: Path) -> None:
    do, words = HARM[harm]
    with RedisServer(tmp_path / "server") as server, server.client() as client, opened(server, tmp_path) as rows:
        rows.write(KEYS, ROWS)
        places = rows.write(KEYS, ROWS)  # the same bytes again
        do(client, name_of(rows, client, ROW))
        with refused(StoreLost, words):
            rows.read(KEYS, places, ROWS.copy())


def name_of(rows: RedisRows, client: Any, field: bytes) -> bytes:
    return next(name for _, name in rows._hashes if client.hexists(name, field))


def test_a_value_of_an_earlier_start_is_another_programs(tmp_path: Path) -> None:
    """Of the same row, by the same write, with the same bytes: only its generation differs."""
    with RedisServer(tmp_path / "server") as server, server.client() as client:
        with opened(server, tmp_path) as before:
            before.write(KEYS, ROWS)
            value = value_of(client, OLDER)
        with opened(server, tmp_path) as rows:
            places = rows.write(KEYS, ROWS)
            client.hset(name_of(rows, client, OLDER), OLDER, value)
            with refused(StoreLost, "bytes for row 1 of table first that another program has written"):
                rows.read(KEYS, places, ROWS.copy())


def test_each_of_400_flipped_bits_is_refused_and_its_row_is_named(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    with RedisServer(tmp_path / "server") as server, server.client() as client, opened(server, tmp_path) as rows:
        places = rows.write(KEYS, ROWS)
        for _ in range(400):
            row = int(chance.integers(len(KEYS)))
            name, at = name_of(rows, client, field(KEYS[row], 0)), field(KEYS[row], 0)
            value = client.hget(name, at)
            place = int(chance.integers(8 * len(value)))
            flipped = bytearray(value)
            flipped[place // 8] ^= 1 << place % 8
            client.hset(name, at, bytes(flipped))
            with refused(StoreLost, f"{GROUP.row_name(int(KEYS[row]))} that another program has written"):
                rows.read(KEYS, places, ROWS.copy())
            client.hset(name, at, value)
            rows._servers._lost = None  # as a new start, on the same rows


def test_rows_remain_and_are_named_in_the_log_when_the_server_is_gone_at_the_end(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server") as server, capture_logs() as logs:
        rows = open_rows(server.url, tmp_path / "run")
        rows.write(KEYS, ROWS)
        server.kill()
        rows.close()
    (warning,) = (entry for entry in logs if entry["log_level"] == "warning")
    assert warning["event"] == "rows remain on Redis until this run is started again"
    assert warning["keys"] == f"rowcast:{{??}}{rows.generation}"


# a cluster


@pytest.fixture(scope="module")
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(one_cluster: RedisCluster) -> Iterator[RedisCluster]:
    """Each test leaves it as it was, but for a server that it may kill: to make a cluster takes two seconds."""
    yield one_cluster
    set_node_timeout(one_cluster, 500)
    one_cluster.mend()
    set_node_timeout(one_cluster, 15_000)


def set_node_timeout(cluster: RedisCluster, timeout_ms: int) -> None:
    """How long a server may be away until the others take it for failed."""
    for node in cluster.nodes:
        with node.client() as client:
            client.config_set("cluster-node-timeout", timeout_ms)


def test_a_cluster_of_which_a_server_is_cut_off(cluster: RedisCluster, tmp_path: Path) -> None:
    """The rest is down, as slots have no server; it says so where it is asked before the silent one."""
    with opened(cluster, tmp_path, timeout_s=0.5) as rows:
        places = rows.write(KEYS, ROWS)
        *others, last = sorted(cluster.nodes, key=lambda node: node.port)
        set_node_timeout(cluster, 500)
        last.stop()
        wait_until(lambda: {state(node) for node in others} == {"fail"}, "the others take the cluster for failed")
        with refused(StoreLost, "the cluster is down or has moved rows"):
            rows.read(KEYS, places, ROWS.copy())
        check_that_it_stays_lost(rows)
        last.go_on()


def test_a_cluster_that_moves_rows_to_another_server(cluster: RedisCluster, tmp_path: Path) -> None:
    with opened(cluster, tmp_path) as rows:
        places = rows.write(KEYS, ROWS)
        with cluster.nodes[0].client() as client, cluster.nodes[1].client() as taker:
            name = next(key for key in client.keys("rowcast:*"))
            client.unlink(*client.keys(name[: len("rowcast:{00}")] + b"*"))  # also of an earlier test
            slot, old, new = (client.cluster("KEYSLOT", name), *(one.cluster("MYID") for one in (client, taker)))
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new)
            with refused(StoreLost, "the cluster is down or has moved rows"):
                rows.read(KEYS, places, ROWS.copy())
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", old)


def test_a_cluster_without_all_slots_is_refused(cluster: RedisCluster, tmp_path: Path) -> None:
    with cluster.nodes[0].client() as client:
        client.execute_command("CLUSTER", "DELSLOTS", 7, 9)
        with refused(StoreLost, "2 of the cluster's 16384 slots have no server"):
            open_rows(cluster.url, tmp_path / "run")
        client.execute_command("CLUSTER", "ADDSLOTS", 7, 9)
