"""Keeps cold rows on a Redis server or a cluster: 256 hashes, a row in the one that its key's hash chooses.

    key     rowcast:{<tag>}<generation>    tag: 00 to ff; what is in braces decides which server of a cluster has it
    field   the row's key, 8 bytes
    value   record | the row's key, 8 bytes | number of the `write` that stored it, 4 bytes; both little-endian

The number is the row's place. So every read finds a row that the server has lost (it evicted it, or started again
empty), and one that is older than the row written last (a replica took over that did not have it yet). The generation
is random and belongs to this object alone: a write that arrives late, over a connection given up, lands where nobody
reads. A row is written again over its older value; a freed one stays until then, or until `close`.

Hashes rather than a key for each row: a generation is 256 keys whose names are known, so that it is deleted without a
search, and a row takes less memory.
"""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from rowcast.job.server_url import ServerUrl
from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec
from rowcast.prefetcher.stores.cold.cold_rows import Moved, Places
from rowcast.prefetcher.stores.cold.redis_servers import NEXT_START, Command, Servers
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.runtime.arrays import I64, Bytes
from rowcast.runtime.errors import RowcastError, StoreLost
from rowcast.runtime.splitmix import GOLDEN
from rowcast.runtime.telemetry.logs import get_logger

NUM_HASHES = 2**8
HASH_SHIFT = np.uint64(56)
ROWS_AT_ONCE = 2**14  # in one round trip, to bound the memory for commands and answers
CHECK_S = 5.0  # between looks at the servers' own counters


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Names one object's keys. A file in the run's folder, so that the next process deletes what a killed one left."""

    server: str
    name: str
    folder: int  # inode of the file's folder, since a copy of a run must not delete the keys of the original


class RedisRows:
    """Implements `ColdRows`. Made by `open`."""

    most = 2**31  # writes, at a few a step, so they last for years

    def __init__(self, servers: Servers, group: GroupSpec, generation: str, note: Path) -> None:
        """`generation`: used by no other object, ever. `note`: the file that holds it."""
        self.rows_read = self.rows_written = 0
        self.bytes_read = self.bytes_written = 0
        self.read_seconds = 0.0
        self.generation = generation
        self._servers, self._group, self._note = servers, group, note
        self._value = np.dtype([("record", np.uint8, group.record_bytes), ("key", "<i8"), ("write", "<u4")])
        names = sorted(keys_of(generation), key=servers.node_of)
        self._hashes = [(servers.node_of(name), name) for name in names]  # in the order of the nodes, as answers come
        self._lock = threading.Lock()  # for what follows and the counters
        self._num_writes = 0
        self._live = self._held = 0  # rows with a place; rows on the servers
        self._next_check_s = time.monotonic() + CHECK_S
        self._closed = False

    @classmethod
    def open(cls, group: GroupSpec, url: ServerUrl, folder: Path, *, password: str | None, timeout_s: float) -> Self:
        """`folder`: of this run alone. Deletes the rows that an earlier process of this run has left on the servers.

        `timeout_s`: how long a server may be silent before it counts as lost. Raises ConfigError or StoreLost."""
        servers = Servers(url, password, timeout_s)
        try:
            servers.open()
            folder.mkdir(parents=True, exist_ok=True)
            note = folder / f"{group.name}.redis"
            earlier = read_note(note)
            server = f"{url.host}:{url.port}"
            if earlier is not None and earlier.server == server:
                delete(servers, earlier.name)
            elif earlier is not None:
                get_logger().warning(
                    "rows of an earlier process may remain on another Redis server",
                    server=earlier.server,
                    keys=pattern_of(earlier.name),
                )
            generation = Generation(server=server, name=secrets.token_hex(6), folder=folder.stat().st_ino)
            note.write_bytes(msgspec.json.encode(generation))
        except BaseException:
            servers.close()
            raise
        nodes = [node.name for node in servers.nodes]
        get_logger().info("rows go to Redis", group=group.name, servers=nodes, keys=pattern_of(generation.name))
        return cls(servers, group, generation.name, note)

    @property
    def used_bytes(self) -> int:
        return self._held * self._value.itemsize

    @property
    def garbage_bytes(self) -> int:
        return (self._held - self._live) * self._value.itemsize

    def attach(self, places_of: Callable[[Keys], Places], settle: Callable[[Moved], None]) -> None:
        """Nothing is ever moved."""

    def hold(self) -> AbstractContextManager[None]:
        """A place stays readable until its row is written again, and nobody reads a row beside its write."""
        return nullcontext()

    def write(self, keys: Keys, records: Records) -> Places:
        with self._lock:
            number = self._num_writes
            self._num_writes += 1
        if number >= self.most:
            raise RowcastError(f"group {self._group.name} has written rows {self.most} times; start again to continue")
        for first in range(0, len(keys), ROWS_AT_ONCE):
            own = slice(first, first + ROWS_AT_ONCE)
            self._write(keys[own], records[own], number)
        return np.full(len(keys), number, np.uint32)

    def read(self, keys: Keys, places: Places, out: Records) -> None:
        """Raises StoreLost, which names table, row and server, if a row is missing or is not the one written last."""
        for first in range(0, len(keys), ROWS_AT_ONCE):
            own = slice(first, first + ROWS_AT_ONCE)
            self._read(keys[own], places[own], out[own])

    def free(self, keys: Keys, places: Places) -> None:
        with self._lock:
            self._live -= len(keys)

    def tidy(self) -> bool:
        """Looks at the servers' own counters now and then. Raises StoreLost or ConfigError."""
        if time.monotonic() >= self._next_check_s:
            self._servers.check()
            self._next_check_s = time.monotonic() + CHECK_S
        return False

    def close(self) -> None:
        """Deletes the rows, unless a server is lost: then the next process of this run does."""
        if self._closed:
            return
        self._closed = True
        try:
            delete(self._servers, self.generation)
            self._note.unlink(missing_ok=True)
        except (RowcastError, OSError) as error:
            get_logger().warning(
                "rows remain on Redis until this run is started again",
                keys=pattern_of(self.generation),
                error=str(error),
            )
        finally:
            self._servers.close()

    def _write(self, keys: Keys, records: Records, number: int) -> None:
        order, ends = self._by_hash(keys)
        keys = keys[order]
        values = np.empty(len(keys), self._value)
        values["record"], values["key"], values["write"] = records[order], keys, number
        arguments: list[bytes] = [b""] * (2 * len(keys))
        arguments[::2] = as_bytes(keys)
        arguments[1::2] = as_bytes(values)
        answers = self._servers.ask(self._commands(b"HSET", arguments, 2 * ends))
        with self._lock:
            self._held += sum(answers)  # fields that are new
            self._live += len(keys)
            self.rows_written += len(keys)
            self.bytes_written += values.nbytes

    def _read(self, keys: Keys, places: Places, out: Records) -> None:
        order, ends = self._by_hash(keys)
        keys, places = keys[order], places[order]
        commands = self._commands(b"HMGET", as_bytes(keys), ends)
        began_s = time.perf_counter()
        answers = self._servers.ask(commands)
        seconds = time.perf_counter() - began_s
        found = self._checked(keys, places, list(chain.from_iterable(answers)))
        out[order] = found["record"]
        with self._lock:
            self.rows_read += len(keys)
            self.bytes_read += found.nbytes
            self.read_seconds += seconds

    def _checked(self, keys: Keys, places: Places, values: list[Any]) -> Any:
        """Returns the values as an array of records, keys and write numbers. Raises StoreLost."""
        with suppress(TypeError):  # None is a row that the server does not have
            joined = b"".join(values)
            if len(joined) == len(keys) * self._value.itemsize:
                found = np.frombuffer(joined, self._value)
                if (found["key"] == keys).all() and (found["write"] == places).all():
                    return found
        wrong = next(filter(None, map(self._wrong, keys.tolist(), places.tolist(), values)))
        self._servers.check()  # if a server says why, its error is raised
        raise self._servers.fails(StoreLost(f"{wrong}; {NEXT_START}"))

    def _wrong(self, key: int, place: int, value: bytes | None) -> str | None:
        """What is wrong with a row's value; None if it is as it was written."""
        node, _ = self._hashes[int(hash_of(np.array([key]))[0])]
        server = f"Redis server {self._servers.nodes[node].name} (store.url)"
        table = next(table.name for table in self._group.tables if table.index == key >> KEY_SHIFT)
        row = f"row {key & ROW_MASK} of table {table}"
        if value is None:
            return f"{server} has lost {row}, which write {place} brought"
        found = np.frombuffer(value, self._value) if len(value) == self._value.itemsize else None
        if found is None or found["key"][0] != key:
            return f"{server} has bytes for {row} that another program has written"
        if found["write"][0] != place:
            return f"{server} has {row} as write {found['write'][0]} brought it, but the last one was write {place}"
        return None

    def _by_hash(self, keys: Keys) -> tuple[I64, I64]:
        """Returns the rows' order by hash, and where each hash's rows end in it."""
        hashes = hash_of(keys)
        return np.argsort(hashes, kind="stable"), np.cumsum(np.bincount(hashes, minlength=NUM_HASHES))

    def _commands(self, name: bytes, arguments: list[bytes], ends: I64) -> list[list[Command]]:
        """One command for each hash that is asked for, by node."""
        commands: list[list[Command]] = [[] for _ in self._servers.nodes]
        start = 0
        for (node, key), end in zip(self._hashes, ends.tolist(), strict=True):
            if end > start:
                commands[node].append((name, key, *arguments[start:end]))
            start = end
        return commands


def hash_of(keys: Keys) -> Bytes:
    return ((keys.view(np.uint64) * GOLDEN) >> HASH_SHIFT).astype(np.uint8)


def as_bytes(items: npt.NDArray[Any]) -> list[bytes]:
    """Each element's bytes; without numpy's type S, which drops zero bytes at the end."""
    found: list[bytes] = items.view(np.dtype((np.void, items.itemsize))).tolist()
    return found


def keys_of(generation: str) -> list[bytes]:
    return [f"rowcast:{{{tag:02x}}}{generation}".encode() for tag in range(NUM_HASHES)]


def pattern_of(generation: str) -> str:
    return f"rowcast:{{??}}{generation}"


def delete(servers: Servers, generation: str) -> None:
    """UNLINK frees the memory in the server's background."""
    commands: list[list[Command]] = [[] for _ in servers.nodes]
    for key in keys_of(generation):
        commands[servers.node_of(key)].append((b"UNLINK", key))
    servers.ask(commands)


def read_note(path: Path) -> Generation | None:
    """None if there is none, it is damaged, or it came here with a copy of another run."""
    try:
        generation = msgspec.json.decode(path.read_bytes(), type=Generation)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return generation if generation.folder == path.parent.stat().st_ino else None
