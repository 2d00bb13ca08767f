"""Keeps cold rows on a Redis server or cluster, in 256 hashes. A hash of the row's key chooses one.

    key     rowcast:{<tag>}<generation>    tag: 00 to ff; the braces decide which server of a cluster has it
    field   the row's key, 8 bytes | number of the `write` that wrote it, 4 bytes, the row's place
    value   checksum, 8 bytes | record

The checksum (`segments.py`) starts from generation, key and write. So it detects changed bytes, another row's value
and an older one, but not a value that somebody forged on purpose.

A field is written once and deleted once. A row that is written again therefore stays readable at its older place until
that is freed and no hold covers it. A missing field is a lost row: the server evicted it or restarted without it, or a
replica took over before it had it. The generation is random and belongs to one object: a late write over a connection
given up goes to a key that is never read.

Hashes, and not a key for each row: a generation is then 256 known keys, deleted without a search, and a row takes less
memory.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from rowcast.job.stores import ServerUrl
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.cold.redis_keys import NUM_HASHES, delete, keys_of, new_generation, note_path, pattern_of
from rowcast.prefetcher.stores.cold.redis_servers import NEXT_START, Command, Servers
from rowcast.prefetcher.stores.cold.segments import WORD_BYTES, column_constants, seal, whole_pages
from rowcast.prefetcher.stores.store import Keys, Moved, Places, Records
from rowcast.runtime.arrays import GOLDEN, I64, U64, Bytes, mix
from rowcast.runtime.errors import RowcastError, StoreLost
from rowcast.runtime.telemetry.logs import get_logger

HASH_SHIFT = np.uint64(56)
ROWS_AT_ONCE = 2**14  # in one round trip, to bound the memory for commands and answers
CHECK_S = 5.0  # between looks at the servers' own counters


Fields = npt.NDArray[np.void]  # [n] of FIELD
FIELD = np.dtype([("key", "<i8"), ("write", "<u4")])


class ServerRoom(NamedTuple):
    """What a server has for rows."""

    server: str
    share: float  # of all rows
    free_bytes: int | None  # up to its maxmemory, or its machine's memory; None: the server does not report it


class Freed(NamedTuple):
    """Rows that may be deleted once every `hold` with a lower number has been left."""

    since: int
    fields: Fields


class RedisRows:
    """Implements `ColdRows`. Made by `open`."""

    most = 2**31 - 2  # writes, a few per step, enough for years; leaves 2**31 numbers for slots

    def __init__(self, servers: Servers, group: GroupSpec, generation: str, note: Path) -> None:
        """`generation`: used by no other object, ever. `note`: the file that holds it."""
        self.rows_read = self.rows_written = 0
        self.bytes_read = self.bytes_written = 0
        self.read_seconds = 0.0
        self.used_bytes = self.garbage_bytes = 0  # of values, without the servers' overhead
        self.generation = generation
        self._servers, self._group, self._note = servers, group, note
        self._value_bytes = WORD_BYTES + group.record_bytes
        self._constants = column_constants(self._value_bytes // 4)
        self._seed = np.uint64(int(generation, 16))
        names = sorted(keys_of(generation), key=servers.node_of)
        self._hashes = [(servers.node_of(name), name) for name in names]  # in the order of the nodes, as answers come
        self._lock = threading.Lock()  # for what follows and the counters
        self._num_writes = self._num_holds = 0
        self._holds: set[int] = set()  # numbers of holds not left yet
        self._freed: deque[Freed] = deque()
        self._next_check_s = time.monotonic() + CHECK_S
        self._closed = False

    @classmethod
    def open(cls, group: GroupSpec, url: ServerUrl, folder: Path, *, password: str | None, timeout_s: float) -> Self:
        """Deletes the rows that an earlier process of this run left on the servers. `folder`: only this run's.

        `timeout_s`: how long a server may be silent before it counts as lost. Raises ConfigError or StoreLost."""
        servers = Servers(url, password, timeout_s)
        note = note_path(folder, group.name)
        try:
            servers.open()
            generation = new_generation(servers, f"{url.host}:{url.port}", note)
        except BaseException:
            servers.close()
            raise
        return cls(servers, group, generation, note)

    def attach(self, places_of: Callable[[Keys], Places], settle: Callable[[Moved], None]) -> None:
        """Does nothing: rows never move."""

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._lock:
            number = self._num_holds
            self._num_holds += 1
            self._holds.add(number)
        try:
            yield
        finally:
            with self._lock:
                self._holds.remove(number)

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
        fields = fields_of(keys, places)
        with self._lock:
            self._freed.append(Freed(self._num_holds, fields))
            self.garbage_bytes += len(keys) * self._value_bytes

    def tidy(self) -> bool:
        """Deletes freed rows, and checks the servers' counters from time to time. Raises StoreLost, or ConfigError if a
        server was set to evict."""
        if time.monotonic() >= self._next_check_s:
            self._servers.check()
            self._next_check_s = time.monotonic() + CHECK_S
        fields = self._to_delete()
        if not len(fields):
            return False
        order, ends = self._by_hash(fields["key"])
        deleted = sum(self._servers.ask(self._commands(b"HDEL", as_bytes(fields[order]), ends)))
        with self._lock:
            self.used_bytes -= len(fields) * self._value_bytes
            self.garbage_bytes -= len(fields) * self._value_bytes
        if deleted != len(fields):
            self._servers.check()  # if a server says why, its error is raised
            raise self._servers.fails(
                StoreLost(f"Redis (store.url) has lost {len(fields) - deleted} rows; {NEXT_START}")
            )
        return True

    @property
    def keys(self) -> str:
        """A pattern of the keys of all rows."""
        return pattern_of(self.generation)

    @property
    def server_names(self) -> list[str]:
        return [node.name for node in self._servers.nodes]

    def rooms(self) -> list[ServerRoom]:
        """The room on each server. Raises StoreLost."""
        shares = np.bincount([node for node, _ in self._hashes], minlength=len(self._servers.nodes)) / NUM_HASHES
        frees = self._servers.free_bytes()
        return [ServerRoom(*room) for room in zip(self.server_names, shares.tolist(), frees, strict=True)]

    def delete(self) -> None:
        """Deletes all rows. After it, only `close` may be called."""
        delete(self._servers, self.generation)

    def close(self) -> None:
        """Deletes the rows. If a server is lost, the next process of this run deletes them."""
        if self._closed:
            return
        self._closed = True
        try:
            self.delete()
            self._note.unlink(missing_ok=True)
        except (RowcastError, OSError) as error:
            get_logger().warning(
                "rows remain on Redis until this run is started again", keys=self.keys, error=str(error)
            )
        finally:
            self._servers.close()

    def _to_delete(self) -> Fields:
        chosen: list[Fields] = [np.empty(0, FIELD)]
        with self._lock:
            oldest = min(self._holds, default=self._num_holds)
            while self._freed and self._freed[0].since <= oldest and sum(map(len, chosen)) < ROWS_AT_ONCE:
                chosen.append(self._freed.popleft().fields)
        return np.concatenate(chosen)

    def _write(self, keys: Keys, records: Records, number: int) -> None:
        order, ends = self._by_hash(keys)
        keys, places = keys[order], np.full(len(keys), number, np.uint32)
        values: U64 = np.empty((len(keys), self._value_bytes // WORD_BYTES), np.uint64)
        values[:, 1:] = records.view(np.uint64)[order]
        seal(values, values.view(np.int32), self._constants, self._identities(keys, places))
        arguments: list[bytes] = [b""] * (2 * len(keys))
        arguments[::2] = as_bytes(fields_of(keys, places))
        arguments[1::2] = as_bytes(values)
        self._servers.ask(self._commands(b"HSET", arguments, 2 * ends))
        with self._lock:
            self.used_bytes += values.nbytes
            self.rows_written += len(keys)
            self.bytes_written += values.nbytes

    def _read(self, keys: Keys, places: Places, out: Records) -> None:
        order, ends = self._by_hash(keys)
        keys, places = keys[order], places[order]
        commands = self._commands(b"HMGET", as_bytes(fields_of(keys, places)), ends)
        began_s = time.perf_counter()
        answers = self._servers.ask(commands)
        seconds = time.perf_counter() - began_s
        found = self._checked(keys, places, list(chain.from_iterable(answers)))
        out[order] = found[:, 1:].view(np.uint8)
        with self._lock:
            self.rows_read += len(keys)
            self.bytes_read += found.nbytes
            self.read_seconds += seconds

    def _checked(self, keys: Keys, places: Places, values: list[bytes | None]) -> U64:
        """Returns the values as words, u64 [n, words]. Raises StoreLost if one is not as it was written."""
        with suppress(TypeError, ValueError):  # a missing value is None; one of another length leaves a wrong size
            joined = bytearray().join(values)  # type: ignore[arg-type]
            found = np.frombuffer(joined, np.uint64).reshape(len(keys), len(self._constants) // 2)
            identities = self._identities(keys, places)
            if whole_pages(found, found.view(np.int32), self._constants, identities) == len(keys):
                return found
        if len(keys) > 1:  # the first wrong one raises
            for i in range(len(keys)):
                self._checked(keys[i : i + 1], places[i : i + 1], values[i : i + 1])
        self._servers.check()  # if a server says why, its error is raised
        node, _ = self._hashes[int(hash_of(keys)[0])]
        at, row = f"Redis server {self._servers.nodes[node].name} (store.url)", self._group.row_name(int(keys[0]))
        lost = f"{at} has lost {row} as write {places[0]} brought it"
        changed = f"{at} has bytes for {row} that another program has written"
        raise self._servers.fails(StoreLost(f"{lost if values[0] is None else changed}; {NEXT_START}"))

    def _identities(self, keys: Keys, places: Places) -> I64:
        """A number for each value that no other row, write or generation has, but for one chance in 2^64."""
        return (mix(self._seed + places.astype(np.uint64) * GOLDEN) + keys.view(np.uint64)).view(np.int64)

    def _by_hash(self, keys: Keys) -> tuple[I64, I64]:
        """Returns the rows' order by hash, and each hash's end in it."""
        hashes = hash_of(keys)
        return np.argsort(hashes, kind="stable"), np.cumsum(np.bincount(hashes, minlength=NUM_HASHES))

    def _commands(self, name: bytes, arguments: list[bytes], ends: I64) -> list[list[Command]]:
        """Returns, for each node, one command per requested hash."""
        commands: list[list[Command]] = [[] for _ in self._servers.nodes]
        start = 0
        for (node, key), end in zip(self._hashes, ends.tolist(), strict=True):
            if end > start:
                commands[node].append((name, key, *arguments[start:end]))
            start = end
        return commands


def hash_of(keys: Keys) -> Bytes:
    return ((keys.view(np.uint64) * GOLDEN) >> HASH_SHIFT).astype(np.uint8)


def fields_of(keys: Keys, places: Places) -> Fields:
    fields = np.empty(len(keys), FIELD)
    fields["key"], fields["write"] = keys, places
    return fields


def as_bytes(rows: npt.NDArray[Any]) -> list[bytes]:
    """Returns the bytes of each row, or element. numpy's type S would drop zero bytes at the end."""
    found: list[bytes] = rows.view(f"V{rows[0].nbytes}").ravel().tolist()
    return found
