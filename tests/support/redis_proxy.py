"""A TCP proxy in front of a Redis server: it can stop to forward."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from tests.support.redis_server import BOUND


class Proxy:
    """A context manager. Bytes go both ways as long as it is not cut; connections live until an end is closed."""

    def __init__(self, port: int) -> None:
        """`port`: of the server."""
        self._target = port
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server((BOUND, 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    @property
    def url_text(self) -> str:
        return f"redis://{BOUND}:{self.port}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._drop()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """Neither side hears of the other, nor that it is gone."""
        self._flows.clear()

    def heal(self) -> None:
        """What was under way is lost."""
        self._drop()

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is sent meanwhile arrives afterwards."""
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()

    def _drop(self) -> None:
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._flows.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((BOUND, self._target))
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                self._threads.append(threading.Thread(target=self._forward, args=(source, sink)))
                self._threads[-1].start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while received := source.recv(2**16):
                self._flows.wait()
                sink.sendall(received)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()
