"""Hands objects with large arrays from a child process to its parent, which uses them where the child wrote them.

    child                                       parent
    arrays ──> segment of shared memory ══════> arrays, which use the segment
    pickle, segment, sizes ───── socket ──────> receive
    free segments <───────────── socket ─────── segments whose arrays are all gone

A segment is an anonymous file that both map, so nothing is left behind however either process ends. The child reuses a
segment once no array of the parent uses it. It makes another rather than wait for one, because only the parent knows
how many objects it keeps; but it waits until each object is received. Pickle is safe here and only here: both ends are
this program.
"""

import mmap
import os
import pickle
import socket
import weakref
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes; where an array begins
SPARE = 1.25  # a segment's size over that of the first object in it, since later ones may be larger


@dataclass(frozen=True, kw_only=True)  # no slots: Python would unpickle them field by field
class Head:
    content: bytes  # pickled, without the arrays
    segment: int
    segment_bytes: int
    is_new: bool  # its descriptor follows
    dropped: tuple[int, ...]  # segments that will not be used again
    sizes: tuple[int, ...]  # bytes of each array


def starts(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    """Returns where each array begins in its segment, and how many bytes all take."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] - (-size // ALIGNMENT) * ALIGNMENT)
    return ends[:-1], max(1, ends[-1])


class ArraySender:
    """The child's end. Used by one thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._segments: dict[int, mmap.mmap] = {}
        self._free: set[int] = set()
        self._num_made = 0

    def send(self, content: object) -> int:
        """Sends an object, and waits until it is received. Returns the bytes of its arrays, at least 1. Raises
        BrokenPipeError if the other end is closed."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
        raws = [buffer.raw() for buffer in buffers]
        sizes = tuple(raw.nbytes for raw in raws)
        positions, nbytes = starts(sizes)
        dropped = self._drop_small(nbytes)
        fitting = min(self._free, key=lambda number: len(self._segments[number]), default=None)
        descriptor = None if fitting is not None else os.memfd_create("rowcast-batch")
        try:
            segment = self._made(descriptor, nbytes) if descriptor is not None else fitting
            assert segment is not None
            self._free.discard(segment)
            for position, raw in zip(positions, raws, strict=True):
                self._segments[segment][position : position + raw.nbytes] = raw
            head = Head(
                content=pickled,
                segment=segment,
                segment_bytes=len(self._segments[segment]),
                is_new=descriptor is not None,
                dropped=dropped,
                sizes=sizes,
            )
            self._connection.send(head)
            if descriptor is not None:
                with socket.socket(fileno=os.dup(self._connection.fileno())) as own:
                    socket.send_fds(own, [b"\0"], [descriptor])
        finally:
            if descriptor is not None:
                os.close(descriptor)
        try:
            self._free.update(self._connection.recv())
        except (EOFError, ConnectionResetError):
            raise BrokenPipeError from None
        return nbytes

    def _made(self, descriptor: int, nbytes: int) -> int:
        size = -(-int(SPARE * nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(descriptor, size)
        self._num_made += 1
        self._segments[self._num_made] = mmap.mmap(descriptor, size)
        return self._num_made

    def _drop_small(self, nbytes: int) -> tuple[int, ...]:
        """Gives up the free segments that cannot hold `nbytes`."""
        small = tuple(number for number in self._free if len(self._segments[number]) < nbytes)
        for number in small:
            self._segments.pop(number).close()
        self._free.difference_update(small)
        return small


class ArrayReceiver:
    """The parent's end. Used by one thread; received arrays may be given up by any."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._segments: dict[int, mmap.mmap] = {}
        self._freed: deque[int] = deque()  # no lock: an array may be given up while this thread holds one

    def receive(self) -> Any:
        """Waits for an object. Its arrays are writable. Raises EOFError or OSError if the other end is closed."""
        head: Head = self._connection.recv()
        for number in head.dropped:
            del self._segments[number]
        if head.is_new:
            with socket.socket(fileno=os.dup(self._connection.fileno())) as own:
                _, descriptors, _, _ = socket.recv_fds(own, 1, 1)
            if not descriptors:
                raise EOFError("the other end closed before it sent a segment's descriptor")
            descriptor = descriptors[0]
            try:
                self._segments[head.segment] = mmap.mmap(descriptor, head.segment_bytes)
            finally:
                os.close(descriptor)
        # every array that is made from it keeps it, by way of its memoryview
        lease = np.frombuffer(self._segments[head.segment], np.uint8)
        weakref.finalize(lease, self._freed.append, head.segment).atexit = False
        view = lease.data
        positions, _ = starts(head.sizes)
        buffers = [view[start : start + size] for start, size in zip(positions, head.sizes, strict=True)]
        del lease, view
        content = pickle.loads(head.content, buffers=buffers)  # noqa: S301
        del buffers
        self._connection.send([self._freed.popleft() for _ in range(len(self._freed))])
        return content
