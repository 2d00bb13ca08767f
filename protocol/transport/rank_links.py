"""Carries encrypted messages between all prefetchers of an attempt.

    rank-003/listens.json     where rank 3 listens: its addresses, its public key, and the attempt

Every prefetcher has a port and a pair of keys for each attempt. It admits the keys that stand in the files of the other
ranks: who may write there may write checkpoints.

    A reads B's file    connects to B, and greets: "attempt a to attempt b"
    A is greeted        by the attempt that it has connected to: both are joined, and A sends what waits

An attempt that begins elsewhere in the run, or has been replaced, is left waiting. A joined rank that writes for
another attempt has restarted, which this attempt cannot follow.

ZMQ reconnects by itself, and drops what a broken connection had not delivered. So messages are numbered, and kept
until the other rank has confirmed them:

    A -> B   attempts, n, c, message    message n of A; A has taken c messages of B
    A -> B   attempts, k, c             a greeting, twice a second: B's frames have come over k connections so far
    B        sees another k             sends again, from message c + 1; A drops what has another number than the next
"""

import os
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from rowcast.protocol.parts import Rank
from rowcast.protocol.transport.endpoint import DOMAIN, KEY_BYTES, ClientAuth, Refusals
from rowcast.protocol.transport.zmq_ends import MOST_STRANGERS, Connections, OpenConnection, has_news, next_message
from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.errors import ConfigError, PeerLost
from rowcast.runtime.machine import own_addresses
from rowcast.runtime.ranges import Number, Text
from rowcast.runtime.run_directory import pair_folder

LISTENS = "listens.json"
FROM = struct.Struct("<IQQQQ")  # rank, its attempt, the attempt that it writes to, n (from 1) or k, c
MAX_MESSAGE_BYTES = 2**26
LOOK_MS = 100  # between looks at the files of ranks that have not joined
HANDSHAKE_MS = 2000  # until a way is tried again: the other end may not have read our file
IDLE_MS = 400  # between greetings of joined ranks: no firewall forgets their connections, and new ones are noticed

Socket = zmq.Socket[bytes]


class Listens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a rank listens in its present attempt."""

    attempt: Number  # random
    start: Text  # where in which run it begins; those of all ranks are equal
    addresses: tuple[Text, ...]
    port: Number
    key: Text  # public, z85


@dataclass(slots=True)
class Other:
    """Another rank."""

    number: int
    path: Path  # of its file
    listens: Listens | None = None
    known_s: float = 0.0  # monotonic clock: since when
    ways: list[Socket] = field(default_factory=list)  # to each of its addresses; a single one once one is connected
    is_connected: bool = False
    greeted_by: int = 0  # its attempt that has written to this one
    unconfirmed: deque[bytes] = field(default_factory=deque)  # messages to it, oldest first
    num_confirmed: int = 0
    num_written: int = 0  # of the unconfirmed ones
    num_told: int = 0  # connections of ours that it has seen
    num_taken: int = 0  # messages
    num_connections: int = 0  # of its own, that frames came from
    connection: OpenConnection | None = None  # the newest of them

    @property
    def is_joined(self) -> bool:
        return self.is_connected and self.listens is not None and self.greeted_by == self.listens.attempt

    def confirm(self, count: int) -> None:
        while self.num_confirmed < count and self.unconfirmed:
            self.unconfirmed.popleft()
            self.num_confirmed += 1
            self.num_written = max(0, self.num_written - 1)

    def forget(self) -> None:
        for way in self.ways:
            way.close(linger=0)
        self.ways, self.is_connected = [], False


class RankAuth(ClientAuth):
    """Admits the keys of the other ranks. A refused caller tries again, because its file may be read later."""

    REFUSED = (b"300", b"this key is not known yet")

    def __init__(self, others: Sequence[Other], refusals: Refusals) -> None:
        super().__init__(Path(), refusals)
        self._others = others

    def _refuse(self, address: str, credentials: list[bytes]) -> None:
        self._refusals.say("refused a caller whose key stands in no rank's folder of this run", address=address)

    def _name_of(self, raw_key: bytes) -> str | None:
        key = z85.encode(raw_key).decode()
        listening = (read_listens(other.path) for other in self._others)
        return next(
            (f"rank {listens.attempt}" for listens in listening if listens is not None and listens.key == key), None
        )


class RankLinks:
    """Implements `KeyLinks`. One thread has the sockets; any thread may call `send`, and one `receive` and `awaits`."""

    def __init__(
        self,
        run_dir: Path,
        rank: Rank,
        *,
        start: str,
        is_only_host: bool,
        timeout_s: float,
        may_wait: Callable[[], bool],
        on_receive: Callable[[], None],
    ) -> None:
        """`start`: see `Listens`. `timeout_s`: how long planning may wait for a rank whose address is known, while
        `may_wait`."""
        number, count = rank.number, rank.count
        self._number, self._start, self._timeout_s, self._may_wait = number, start, timeout_s, may_wait
        self._attempt = 1 + secrets.randbelow(2**61)
        self._path = pair_folder(run_dir, number, count) / LISTENS
        self._others = {
            rank: Other(rank, pair_folder(run_dir, rank, count) / LISTENS) for rank in range(count) if rank != number
        }
        self._is_only_host = is_only_host
        self._on_receive = on_receive
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._awaited: tuple[int, ...] = ()
        self._awaited_s = 0.0  # monotonic clock: since when
        self._error: BaseException | None = None
        self._closing = False
        self._refusals = Refusals()
        most = MOST_STRANGERS + 2 * len(self._others)
        self._connections = Connections(most, self._refusals, on_end=lambda connection: None)
        self._thread = threading.Thread(target=self._run, name="rank links", daemon=True)

    def open(self) -> None:
        """Listens, and writes where for the other ranks. Raises ConfigError if the file cannot be written."""
        self._context: zmq.Context[Socket] = zmq.Context()
        try:
            self._listen()
        except BaseException:
            self._free()
            raise
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()

    def _listen(self) -> None:
        addresses = own_addresses()
        self._context.set(zmq.MAX_SOCKETS, 1024 + 2 * len(addresses) * len(self._others))
        self._auth = RankAuth(tuple(self._others.values()), self._refusals)
        self._auth.open(self._context)
        self._public, self._secret = zmq.curve_keypair()
        inward = self._inward = self._socket(zmq.PULL)
        inward.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        inward.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        inward.curve_server = True
        self._connections.monitor = inward.get_monitor_socket(Connections.EVENTS)
        port = inward.bind_to_random_port(f"tcp://{'127.0.0.1' if self._is_only_host else '0.0.0.0'}")
        listens = Listens(
            attempt=self._attempt,
            start=self._start,
            addresses=("127.0.0.1",) if self._is_only_host else tuple(addresses.values()),
            port=port,
            key=self._public.decode(),
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self._path, msgspec.json.encode(listens) + b"\n")
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written ({error.strerror}); the other ranks read it") from None

    def send(self, rank: int, message: bytes) -> None:
        self._outbox.append((rank, message))
        os.eventfd_write(self._wake, 1)

    def receive(self) -> tuple[int, bytes] | None:
        if self._inbox:
            return self._inbox.popleft()
        if self._error is not None:
            raise self._error
        return None

    def awaits(self, ranks: Sequence[int]) -> None:
        if tuple(ranks) != self._awaited:
            self._awaited_s, self._awaited = time.monotonic(), tuple(ranks)

    def close(self) -> None:
        """Removes the file, and frees the port. What has not left by then is dropped."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        listens = read_listens(self._path)
        if listens is not None and listens.attempt == self._attempt:
            with suppress(OSError):
                self._path.unlink()

    def _socket(self, kind: int) -> Socket:
        made = self._context.socket(kind)
        made.curve_publickey, made.curve_secretkey = self._public, self._secret
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, 0)  # horizons bound what can wait
        made.setsockopt(zmq.RCVHWM, 0)
        return made

    # the thread

    def _run(self) -> None:
        try:
            self._move_until_closed()
        except BaseException as error:  # noqa: BLE001 - the next caller must get any error
            self._error = error
            self._on_receive()
        finally:
            self._connections.read_events()  # with a full monitor, libzmq's thread would wait for this one
            self._inward.disable_monitor()
            self._free()

    def _free(self) -> None:
        self._context.destroy(linger=0)

    def _move_until_closed(self) -> None:
        poller = zmq.Poller()
        for source in (self._inward, self._connections.monitor, self._wake, *self._auth.sockets):
            poller.register(source, zmq.POLLIN)
        looked_s, ready = 0.0, list[Any]()
        while not self._closing:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            now_s = time.monotonic()
            is_whole = all(other.is_joined for other in self._others.values())
            if now_s - looked_s >= (IDLE_MS if is_whole else LOOK_MS) / 1000:
                self._look(now_s)
                looked_s = now_s
            self._auth.answer()
            if self._connections.monitor in ready:
                self._connections.limit()
            if self._inward in ready:
                self._receive()
            self._send_queued()
            ready = [source for source, _ in poller.poll(IDLE_MS if is_whole else LOOK_MS)]

    def _look(self, now_s: float) -> None:
        for other in self._others.values():
            if not other.is_joined:
                self._approach(other, now_s)
            self._greet(other)  # joined or not: what was written to a connection that broke is lost
        late = [self._others[rank] for rank in self._awaited]
        for other in late if self._may_wait() else ():
            since_s = max(self._awaited_s, other.known_s)
            if other.listens is not None and now_s - since_s > self._timeout_s:
                ways = ", ".join(f"{address}:{other.listens.port}" for address in other.listens.addresses)
                state = "is connected" if other.is_joined else f"cannot be reached at {ways}"
                raise PeerLost(
                    f"the prefetcher of rank {self._number} waited {self._timeout_s:g} s (ranks.timeout) for keys of "
                    f"rank {other.number}, which {state}; its log says what it does, or why it ended"
                )

    def _approach(self, other: Other, now_s: float) -> None:
        """Connects to where a rank listens now, once its attempt begins where this one does."""
        listens = read_listens(other.path)
        if listens is not None and listens.start == self._start and listens != other.listens:
            other.forget()
            other.listens, other.known_s = listens, now_s
            other.ways = [self._way(listens, address) for address in listens.addresses]
        connected = [way for way in other.ways if way.poll(0, zmq.POLLOUT)]
        if not other.is_connected and connected:
            for way in other.ways:
                if way is not connected[0]:
                    way.close(linger=0)
            other.ways, other.is_connected = connected[:1], True

    def _way(self, listens: Listens, address: str) -> Socket:
        way = self._socket(zmq.PUSH)
        way.setsockopt(zmq.IMMEDIATE, 1)  # it can be written to once the other end has proved its key
        way.curve_serverkey = listens.key.encode()
        way.connect(f"tcp://{address}:{listens.port}")
        return way

    def _greet(self, other: Other) -> None:
        if other.is_connected:
            with suppress(zmq.Again):
                self._write(other, other.num_connections)

    def _write(self, other: Other, count: int, *message: bytes) -> None:
        """Raises zmq.Again while the other end is gone."""
        assert other.listens is not None, "connected"
        head = FROM.pack(self._number, self._attempt, other.listens.attempt, count, other.num_taken)
        other.ways[0].send_multipart([head, *message], zmq.NOBLOCK)

    def _receive(self) -> None:
        is_new = False
        while has_news(self._inward):
            frames = next_message(self._inward)
            head, *parts = (frame.bytes for frame in frames) if frames else (b"",)
            if len(head) != FROM.size or len(parts) > 1:
                continue
            number, attempt, to, count, taken = FROM.unpack(head)
            other = self._others.get(number)
            if other is None or to != self._attempt:
                continue  # of an earlier attempt
            if other.is_joined and other.greeted_by != attempt:
                raise PeerLost(f"the prefetcher of rank {number} has begun again")
            other.greeted_by = attempt
            self._note_connection(other, self._connections.of(frames[0]))
            other.confirm(taken)
            if not parts:
                if count != other.num_told:
                    other.num_told, other.num_written = count, 0
            elif count == other.num_taken + 1:
                other.num_taken = count
                self._inbox.append((number, parts[0]))
                is_new = True
        if is_new:
            self._on_receive()

    def _note_connection(self, other: Other, connection: OpenConnection | None) -> None:
        """Asks at once for messages that may be lost, if the connection is new."""
        if connection is None or connection is other.connection:
            return
        connection.is_known, other.connection = True, connection
        other.num_connections += 1
        if other.num_connections > 1:
            self._refusals.say("a rank's connection broke; what was lost is sent again", rank=other.number)
            self._greet(other)

    def _send_queued(self) -> None:
        while self._outbox:
            rank, message = self._outbox.popleft()
            self._others[rank].unconfirmed.append(message)
        for other in self._others.values():
            with suppress(zmq.Again):
                while other.is_joined and other.num_written < len(other.unconfirmed):
                    at = other.num_written
                    self._write(other, other.num_confirmed + at + 1, other.unconfirmed[at])
                    other.num_written += 1


def read_listens(path: Path) -> Listens | None:
    """Returns None if the file is not there, or is not one of ours."""
    try:
        listens = msgspec.json.decode(path.read_bytes(), type=Listens)
        return listens if len(z85.decode(listens.key)) == KEY_BYTES else None
    except (OSError, ValueError, KeyError, struct.error, msgspec.DecodeError):
        return None
