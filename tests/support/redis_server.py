"""Real Redis servers on this machine, each with a free port and a folder of its own."""

import atexit
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from rowcast.job.stores import ServerUrl

COMMAND = shutil.which("redis-server") or shutil.which("valkey-server")
REASON = "redis-server is not installed (apt-get install redis-server)"
needs_redis = pytest.mark.skipif(COMMAND is None, reason=REASON)
WAIT_S = 30.0
BOUND = "127.0.0.1"


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((BOUND, 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"{what} within {WAIT_S:g} s"
        time.sleep(0.005)


class RedisServer:
    """A process that keeps nothing on disk. A context manager."""

    def __init__(self, folder: Path, *options: str, port: int | None = None, **client: Any) -> None:
        """`options`: of the command line. `client`: how its owner connects, such as `password`."""
        self.folder, self.port = folder, port or free_port()
        self._options, self._client = options, client
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> ServerUrl:
        return ServerUrl(host=BOUND, port=self.port, tls=False, user=None)

    @property
    def url_text(self) -> str:
        return f"redis://{BOUND}:{self.port}"

    def start(self, *options: str) -> None:
        assert COMMAND is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        common = ("--bind", BOUND, "--dir", str(self.folder), "--save", "", "--appendonly", "no")
        quick = ("--repl-diskless-sync-delay", "0")
        ports = () if "--port" in self._options else ("--port", str(self.port))
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [COMMAND, *ports, *common, *quick, *self._options, *options], stdout=log, stderr=subprocess.STDOUT
            )
        wait_until(self._answers, f"the Redis server in {self.folder} answers")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """It keeps its connections, and answers nothing until `go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def client(self) -> Iterator[Any]:
        """A `redis.Redis`, whose types leave open whether an answer is there."""
        settings = {"host": BOUND, "port": self.port, "retry": Retry(NoBackoff(), 0), "protocol": 2, **self._client}
        with closing(redis.Redis(**settings)) as client:
            yield client

    def calls(self, command: str) -> int:
        """How often the server has carried out a command since it was started."""
        with self.client() as client:
            found: dict[str, Any] = client.info("commandstats").get(f"cmdstat_{command}", {})
            return int(found.get("calls", 0))

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


class RedisCluster:
    """Three primaries without replicas. A context manager."""

    def __init__(self, folder: Path, num_nodes: int = 3) -> None:
        options = ("--cluster-enabled", "yes")
        self.nodes = [
            RedisServer(folder / str(number), *options, "--cluster-port", str(free_port()))
            for number in range(num_nodes)
        ]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> ServerUrl:
        return self.nodes[0].url

    def mend(self) -> None:
        """Waits until every server takes the cluster for whole."""
        wait_until(lambda: {state(node) for node in self.nodes} == {"ok"}, "the cluster is whole")

    def _join(self) -> None:
        bounds = [2**14 * number // len(self.nodes) for number in range(len(self.nodes) + 1)]
        for node, first, end in zip(self.nodes, bounds, bounds[1:], strict=False):
            with node.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
                for other in self.nodes:
                    if other is not node:
                        client.execute_command("CLUSTER", "MEET", BOUND, other.port, bus_port(other))
        self.mend()


def bus_port(node: RedisServer) -> int:
    return int(node._options[node._options.index("--cluster-port") + 1])


def state(node: RedisServer) -> str:
    with node.client() as client:
        return str(client.cluster("INFO")["cluster_state"])


@cache
def shared_server() -> RedisServer:
    """A server of this process of tests, until its end. Skips the test where there is none."""
    if COMMAND is None:
        pytest.skip(REASON)
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    server = RedisServer(Path(folder.name))
    server.start()
    atexit.register(server.kill)
    return server


def keys_on(servers: Sequence[RedisServer]) -> set[bytes]:
    found: set[bytes] = set()
    for server in servers:
        with server.client() as client:
            found |= set(client.keys("*"))
    return found
