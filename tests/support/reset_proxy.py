"""A TCP proxy whose connections can be reset, as by a firewall that has forgotten them: what is under way is lost."""

import os
import selectors
import socket
import struct
import threading
from contextlib import suppress
from typing import Self

HOST = "127.0.0.1"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST


class ResetProxy:
    """A context manager."""

    def __init__(self, port: int) -> None:
        """`port`: of the server."""
        self.num_reset = 0  # connections
        self._target = port
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._wake = os.eventfd(0)
        self._asked, self._done, self._closing = False, threading.Event(), False
        self._others: dict[socket.socket, socket.socket] = {}  # the other end of each connection
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        for source in (self._listener, self._wake):
            self._selector.register(source, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self.reset()
        self._thread.join()
        self._listener.close()
        self._selector.close()
        os.close(self._wake)

    def reset(self) -> None:
        """Resets all connections."""
        self._asked = True
        self._done.clear()
        os.eventfd_write(self._wake, 1)
        self._done.wait()

    def _run(self) -> None:
        while not (self._closing and self._done.is_set()):
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._forward(key.fileobj)
                else:
                    os.eventfd_read(self._wake)
            if self._asked:
                self._asked = False
                for end in list(self._others):
                    self._end(end)
                self._done.set()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection((HOST, self._target))
        except OSError:
            client.close()
            return
        for source, sink in ((client, server), (server, client)):
            self._others[source] = sink
            self._selector.register(source, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        if source not in self._others:
            return  # reset in this turn
        with suppress(OSError):
            if received := source.recv(2**12):
                self._others[source].sendall(received)
                return
        self._end(source)

    def _end(self, source: socket.socket) -> None:
        sink = self._others.pop(source, None)
        if sink is None:
            return
        del self._others[sink]
        self.num_reset += 1
        for end in (source, sink):
            self._selector.unregister(end)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.close()
