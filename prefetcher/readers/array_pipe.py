"""Sends Python objects with large arrays through a pipe to or from a child process, without copying the arrays.

    pickle and the arrays' sizes | array 0 | array 1 | ...

`multiprocessing.connection` would copy the arrays' bytes three times on arrival, so they are read and written directly.
Pickle is safe here and only here: both ends are this program.
"""

import os
import pickle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


def send(connection: Connection, content: object) -> None:
    """Waits until the pipe has taken everything. Raises BrokenPipeError if the other end is closed."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    raws = [buffer.raw() for buffer in buffers]
    connection.send((head, [raw.nbytes for raw in raws]))
    for raw in raws:
        write(connection.fileno(), raw)


def receive(connection: Connection) -> Any:
    """Waits for an object. Its arrays own their memory and are writable. Raises EOFError if the other end is closed."""
    head, sizes = connection.recv()
    buffers = [np.empty(nbytes, np.uint8) for nbytes in sizes]
    for buffer in buffers:
        read(connection.fileno(), buffer.data)
    return pickle.loads(head, buffers=buffers)  # noqa: S301


def write(pipe: int, content: memoryview) -> None:
    while content.nbytes:
        content = content[os.write(pipe, content) :]


def read(pipe: int, content: memoryview) -> None:
    while content.nbytes:
        num_read = os.readv(pipe, [content])
        if not num_read:
            raise EOFError(f"the pipe ended {content.nbytes} bytes before the end of an array")
        content = content[num_read:]
