"""Sends commands to a Redis server or a cluster's primaries, and turns each failure into an error of the run.

Nothing is sent twice: the server may still carry out a command whose answer did not come, so a second one could
overwrite newer rows. After the first failure, every call raises it again and sends nothing.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ClusterError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from rowcast.job.stores import PASSWORD, ServerUrl
from rowcast.runtime.errors import ConfigError, RowcastError, StoreLost, printable

Command = tuple[bytes, ...]
MAX_QUOTED = 200  # characters of a server's message
NEXT_START = "the next start continues from the newest checkpoint"
REFUSED = (AuthenticationError, AuthenticationWrongNumberOfArgsError, AuthorizationError, NoPermissionError)
MOVED = (MovedError, AskError, TryAgainError, ClusterDownError, ClusterError)


class Node:
    """One server, and what it reported when the run began."""

    def __init__(self, host: str, port: int, settings: dict[str, Any]) -> None:
        self.name = f"{host}:{port}"
        self.client = redis.Redis(host=host, port=port, **settings)
        self.run_id: str | None = None
        self.evicted = 0


class Servers:
    """Any thread may call `ask` and `check`; each call uses separate connections."""

    def __init__(self, url: ServerUrl, password: str | None, timeout_s: float) -> None:
        """`timeout_s`: the longest silence of a server, in the middle of an answer too, before it counts as lost."""
        self.nodes: list[Node] = []  # of a cluster: its primaries
        self._url, self._password, self._timeout_s = url, password, timeout_s
        self._lost: RowcastError | None = None
        self._is_open = False
        self._ranges: list[tuple[int, int, int]] = []  # first slot, last slot, node
        self._lock = threading.Lock()

    def open(self) -> None:
        """Connects, and checks every server. Raises ConfigError or StoreLost."""
        settings = {
            "username": self._url.user,
            "password": self._password,
            "ssl": self._url.tls,
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        first = Node(self._url.host, self._url.port, settings)
        self.nodes = [first]
        if self._info(first).get("cluster_enabled"):
            self._find_primaries(first, settings)
        for node in self.nodes:
            info = self._info(node)
            if info.get("role", "master") != "master":
                raise ConfigError(f"{self._at(node)} is a replica, which takes no rows; set store.url to its primary")
            self._check_policy(node, info)
            node.run_id, node.evicted = info.get("run_id"), info.get("evicted_keys", 0)
        self._is_open = True

    def node_of(self, key: bytes) -> int:
        """The number of the server that holds a key."""
        slot = key_slot(key)
        return next((node for first, last, node in self._ranges if first <= slot <= last), 0)

    def ask(self, commands: Sequence[Sequence[Command]]) -> list[Any]:
        """Sends each node its commands, then returns all answers, node after node. Raises StoreLost, ConfigError, or
        RowcastError if a server has no memory left."""
        if self._lost is not None:
            raise self._lost
        used: list[tuple[Node, Connection, int]] = []
        answers: list[Any] = []
        node = self.nodes[0]
        try:
            for node, own in zip(self.nodes, commands, strict=True):
                if own:
                    connection = node.client.connection_pool.get_connection()
                    used.append((node, connection, len(own)))
                    connection.send_packed_command(connection.pack_commands(own))
            for node, connection, count in used:  # noqa: B007 - the one that failed, below
                answers += [connection.read_response() for _ in range(count)]
        except (RedisError, OSError) as error:
            for _, connection, _ in used:
                connection.disconnect()  # late answers must not be read as those of a later call
            raise self.fails(self._meaning(node, error)) from None
        finally:
            for own_node, connection, _ in used:
                own_node.client.connection_pool.release(connection)
        return answers

    def check(self) -> None:
        """Raises StoreLost or ConfigError if a server has started again, has evicted keys, or may evict some.

        This only reports early, and why: reading a lost row fails in any case."""
        if self._lost is not None:
            raise self._lost
        for node in self.nodes:
            info = self._info(node)
            if info.get("run_id") != node.run_id:
                raise self.fails(StoreLost(f"{self._at(node)} was started again and lost rows; {NEXT_START}"))
            if info.get("role", "master") != "master":
                raise self.fails(StoreLost(f"{self._at(node)} has become a replica; {NEXT_START}"))
            if info.get("evicted_keys", 0) != node.evicted:
                raise self.fails(
                    StoreLost(
                        f"{self._at(node)} has evicted keys, perhaps rows; set its maxmemory-policy to noeviction and "
                        f"give it more memory; {NEXT_START}"
                    )
                )
            try:
                self._check_policy(node, info)
            except ConfigError as error:
                raise self.fails(error) from None

    def free_bytes(self) -> list[int | None]:
        """Returns how many bytes each server can still hold. Raises StoreLost."""
        found: list[int | None] = []
        for node in self.nodes:
            info = self._info(node)
            most = info.get("maxmemory") or info.get("total_system_memory")
            found.append(None if most is None else max(0, most - info.get("used_memory", 0)))
        return found

    def fails(self, error: RowcastError) -> RowcastError:
        """Keeps the first error for later calls to raise. Returns the given one."""
        with self._lock:
            self._lost = self._lost or error
        return error

    def close(self) -> None:
        for node in self.nodes:
            with suppress(RedisError, OSError):
                node.client.close()

    def _find_primaries(self, first: Node, settings: dict[str, Any]) -> None:
        (slots,) = self.ask(
            [[(b"CLUSTER", b"SLOTS")]]
        )  # [first slot, last slot, [host, port, ...] of its primary, ...]
        first.client.close()
        addresses = [((primary[0] or b"").decode() or self._url.host, primary[1]) for _, _, primary, *_ in slots]
        names = sorted(set(addresses))
        self._ranges = [
            (first_slot, last_slot, names.index(address))
            for (first_slot, last_slot, *_), address in zip(slots, addresses, strict=True)
        ]
        covered = sum(last - first_slot + 1 for first_slot, last, _ in self._ranges)
        if covered != 2**14:
            raise StoreLost(
                f"{self._at(first)}: {2**14 - covered} of the cluster's {2**14} slots have no server; repair it"
            )
        self.nodes = [Node(host, port, settings) for host, port in names]

    def _info(self, node: Node) -> dict[str, Any]:
        try:
            info: dict[str, Any] = node.client.info()
        except (RedisError, OSError) as error:
            raise self.fails(self._meaning(node, error)) from None
        return info

    def _check_policy(self, node: Node, info: dict[str, Any]) -> None:
        policy = info.get("maxmemory_policy", "noeviction")  # servers that cannot evict may omit it
        if policy != "noeviction":
            raise ConfigError(
                f"{self._at(node)} has maxmemory-policy {policy}, by which it drops rows without an error; set it to "
                "noeviction"
            )

    def _at(self, node: Node) -> str:
        return f"Redis server {node.name} (store.url)"

    def _meaning(self, node: Node, error: Exception) -> RowcastError:
        """Translates a failure into one sentence and an exit code."""
        at, quoted = self._at(node), self._quoted(error)
        scheme = "redis:// if it has no TLS" if self._url.tls else "rediss:// if it wants TLS"
        change = NEXT_START if self._is_open else f"start it, or correct store.url ({scheme})"
        match error:
            case _ if isinstance(error, REFUSED):
                return ConfigError(
                    f"{at} refuses this user ({quoted}); set {PASSWORD}, the user in store.url, and the user's rights "
                    "(docs/redis.md)"
                )
            case redis.TimeoutError():
                return StoreLost(f"{at} did not answer within {self._timeout_s:g} s (store.timeout); {change}")
            case BusyLoadingError():
                return StoreLost(f"{at} is still loading its data; start again once it has")
            case OutOfMemoryError():
                return RowcastError(
                    f"{at} has no memory left for rows ({quoted}); raise its maxmemory, add servers, or raise "
                    f"store.memory; {NEXT_START}"
                )
            case ReadOnlyError():
                return StoreLost(f"{at} has become a replica ({quoted}); {NEXT_START}")
            case _ if isinstance(error, MOVED):
                return StoreLost(f"{at}: the cluster is down or has moved rows ({quoted}); {NEXT_START}")
            case redis.ConnectionError() | OSError():
                if "CERTIFICATE" in quoted.upper():
                    return ConfigError(
                        f"{at} has a certificate that is not trusted ({quoted}); name the file of its authority by "
                        "SSL_CERT_FILE in the environment of the prefetcher"
                    )
                gone = "is gone" if self._is_open else "cannot be reached"
                return StoreLost(f"{at} {gone} ({quoted}); {change}")
            case ResponseError() if str(error).startswith("WRONGTYPE"):
                return StoreLost(f"{at}: another program has written to a key of this run ({quoted}); {NEXT_START}")
        return RowcastError(f"{at} refuses a command ({quoted})")

    def _quoted(self, error: Exception) -> str:
        """Quotes the server or library without the password: servers repeat the arguments of unknown commands."""
        words = " ".join(str(part) for part in error.args) or type(error).__name__
        if self._password:
            words = words.replace(self._password, "***")
        return printable(words[:MAX_QUOTED])
