"""The rows of coming batches, which ranks of one host tell each other before they look them up.

    announced    the rows of a rank's coming batch that trains go to each other rank, with its number: how many such
                 batches the rank has begun before it
    begun        this rank's batches that its planner is to know are announced to the engine, each with the rows of the
                 other ranks' batches of the same step that have come by then
    exchange     with the sizes of gradients, ranks tell how many batches they have begun: which of their numbers are of
                 one step

Lists are hints: what comes late or is lost is dropped, and a wrong number is a wrong hint. Such rows are fetched once
their gradients have come, so no bit depends on a list. A thread of zmq carries them from rank to rank, and a list that
a rank has no room for is dropped. Nobody waits for one, but for WAIT_S when a loop over a loader begins.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import zmq

from rowcast.protocol.parts import Rank
from rowcast.protocol.transport.endpoint import Context, FileAddress
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import RowcastError
from rowcast.runtime.machine import boot_id

MOST_LISTS = 64  # of a rank that wait to be taken, and that are kept
MOST_BYTES = 2**26  # of a list
WAIT_S = 0.05
_numbers = count()


class Coming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows of a batch."""

    rank: int
    number: int  # batches that train and that the rank has begun before it
    rows: dict[str, bytes]  # by the table's name, i64


class ComingRows:
    """Between the ranks of a process group. Call everything from one thread at a time."""

    def __init__(self, rank: Rank, gather: Callable[[bytes], list[bytes]]) -> None:
        """Call it on all ranks. `gather` returns what each rank has passed. Raises ConfigError if no socket can be
        made."""
        self.rank = rank
        self.tables = set[str]()  # names of those that these ranks add up
        self.num_begun = 0  # batches that train
        self._begun = [0] * rank.count  # at the last exchange, by rank
        self._lists = dict[tuple[int, int], Mapping[str, bytes]]()  # by rank and its number
        self._lock = threading.Lock()
        self._context: Context = zmq.Context()
        address = FileAddress(Path(f"/coming-rows/{os.getpid()}/{next(_numbers)}"))
        weakref.finalize(self, close, self._context, address, os.getpid())
        address.open()
        self._inward = self._socket(zmq.PULL)
        address.bind(self._context, self._inward)
        here = f"{boot_id()} {address.endpoint}"
        places = [told.decode().partition(" ") for told in gather(here.encode())]
        self._ways = [self._socket(zmq.PUSH) for _ in places]
        self._near = [
            number for number, (host, _, _) in enumerate(places) if host == boot_id() and number != rank.number
        ]
        for number in self._near:
            self._ways[number].connect(places[number][2])
        JOINED.add(self)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        made.setsockopt(zmq.SNDHWM, MOST_LISTS)
        made.setsockopt(zmq.RCVHWM, MOST_LISTS)
        return made

    def tell(self, ahead: int, rows: Mapping[str, I64]) -> None:
        """Tells of a batch. `ahead`: how many that train begin before it. `rows`: by the table's name."""
        told = {name: own.tobytes() for name, own in rows.items() if name in self.tables}
        content = msgspec.msgpack.encode(Coming(rank=self.rank.number, number=self.num_begun + ahead, rows=told))
        with self._lock:
            for way in self._ways:
                with suppress(zmq.Again):
                    way.send(content, zmq.NOBLOCK)

    def told(self, ahead: int) -> Iterator[tuple[str, I64]]:
        """What has come of the step of this rank's batch: rows by the table's name. `ahead`: as in `tell`."""
        self._receive()
        for rank in range(self.rank.count):
            for name, rows in self._lists.get(self._place(rank, ahead), {}).items():
                if name in self.tables:
                    yield name, np.frombuffer(rows, np.int64, len(rows) // 8)

    def await_lists(self, ahead: int) -> None:
        """Waits until the other ranks of this host have told of the step, at most WAIT_S: all have just begun to read.
        `ahead`: as in `tell`."""
        end_s = time.monotonic() + WAIT_S
        while any(self._place(rank, ahead) not in self._lists for rank in self._near):
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not self._inward.poll(1 + int(1000 * left_s)):
                return
            self._receive()

    def _place(self, rank: int, ahead: int) -> tuple[int, int]:
        """Returns the rank, and its number of the batch that is of one step with this rank's."""
        return rank, self.num_begun + ahead + self._begun[rank] - self._begun[self.rank.number]

    def compare(self, begun: Sequence[int]) -> None:
        """The ranks are at one step, and have begun as many batches."""
        self._begun = [*begun]
        self._lists = {key: rows for key, rows in self._lists.items() if self._is_near(*key)}

    def _receive(self) -> None:
        with self._lock, suppress(zmq.Again):
            while True:
                content = self._inward.recv(zmq.NOBLOCK)
                with suppress(msgspec.MsgspecError):
                    coming = msgspec.msgpack.decode(content, type=Coming)
                    if 0 <= coming.rank < self.rank.count and self._is_near(coming.rank, coming.number):
                        self._lists[coming.rank, coming.number] = coming.rows

    def _is_near(self, rank: int, number: int) -> bool:
        return 0 <= number - self._begun[rank] < MOST_LISTS


def close(context: Context, address: FileAddress, pid: int) -> None:
    if os.getpid() == pid:  # not forked from it
        context.destroy(linger=0)
        with suppress(OSError, RowcastError):
            address.close()


JOINED = weakref.WeakSet[ComingRows]()
