"""Serves HTTP requests on one thread, for a few callers at a time: slow callers cannot block scrapes and probes.

    accept -> handshake, with TLS -> request -> answer -> close

No step waits for its caller, so one thread serves all. A caller gets REQUEST_S for all steps together; beyond
MOST_CALLERS the oldest is cut off. In a rush, callers wait in the kernel's queue, and each then gets LEAST_S: a caller
that sends its request as it connects is answered, even beside 1,000 that never send one.
"""

import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from selectors import EVENT_READ, EVENT_WRITE, PollSelector
from typing import TYPE_CHECKING, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler

from rowcast.runtime.telemetry.logs import get_logger

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

MOST_CALLERS = 16
REQUEST_S = 5.0  # from the connection to the end of the response
LEAST_S = 0.02  # so at most 800 connections are accepted per second
QUEUE = 1024  # connections that the kernel queues, unless the host allows fewer
MOST_BYTES = 2**14  # of a request
POLL_S = 0.1  # `close` waits at most this long for the thread
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)

Value = TypeVar("Value")
Waits = Generator[int, None, Value]  # yields the event of the socket to wait for


@dataclass(slots=True, eq=False)
class Caller:
    connection: socket.socket
    began_s: float  # monotonic clock
    steps: Waits[None]
    awaits: int = 0  # the event that the selector looks for


def listening(host: str, port: int) -> socket.socket:
    """`::` serves IPv4 too. Raises OSError, OverflowError or UnicodeError for an unusable address."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, *_, (address, _, *scope) = min(found, key=lambda one: one[0] != socket.AF_INET)  # a name may have both
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier process's connections may linger
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port, *scope))
        listener.listen(QUEUE)
    except BaseException:
        listener.close()
        raise
    return listener


class HttpServer:
    """Serves a WSGI application, which must answer quickly. A connection carries one request, without a body."""

    def __init__(self, listener: socket.socket, app: "WSGIApplication") -> None:
        """`listener`: of `listening`, with TLS or without; closed with the server."""
        self._listener = listener
        self._site = Site(listener, app)
        self._callers: dict[Caller, None] = {}  # oldest first
        self._selector = PollSelector()  # unlike epoll's, its register and unregister keep the GIL
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="telemetry", daemon=True)

    def start(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, EVENT_READ)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for caller in list(self._callers):
            self._part_with(caller)
        self._selector.close()
        self._listener.close()

    @property
    def _is_full(self) -> bool:
        return len(self._callers) == MOST_CALLERS

    def _serve(self) -> None:
        while not self._closing.is_set():
            ready: list[Caller | None] = [key.data for key, _ in self._selector.select(POLL_S)]
            for caller in ready:
                if caller is not None:
                    self._advance(caller)
            late_s = time.monotonic() - REQUEST_S
            for caller in [caller for caller in self._callers if caller.began_s < late_s]:
                self._part_with(caller)
            if None in ready:  # the listener
                self._accept()
                if self._is_full:  # then it accepts callers in batches, which is cheaper
                    time.sleep(LEAST_S)

    def _accept(self) -> None:
        """Accepts some waiting callers. They all stay until the next call."""
        for _ in range(MOST_CALLERS):
            try:
                connection, address = self._listener.accept()
                connection.setblocking(False)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NO_DESCRIPTOR:  # otherwise the caller has left
                    time.sleep(LEAST_S)
                return
            if self._is_full:
                self._part_with(next(iter(self._callers)))
            steps = converse(connection, partial(self._site.answer, address))
            caller = Caller(connection, time.monotonic(), steps)
            self._callers[caller] = None
            self._advance(caller)

    def _advance(self, caller: Caller) -> None:
        """Runs the steps that need not wait."""
        awaits = 0
        try:
            awaits = next(caller.steps, 0)
        except OSError:  # it has left, or does not speak TLS
            pass
        except Exception:  # noqa: BLE001 - one request must not end the thread
            get_logger().exception("a request failed")
        if not awaits:
            self._part_with(caller)
        elif awaits != caller.awaits:
            if caller.awaits:
                self._selector.unregister(caller.connection)
            self._selector.register(caller.connection, awaits, caller)
            caller.awaits = awaits

    def _part_with(self, caller: Caller) -> None:
        del self._callers[caller]
        if caller.awaits:
            self._selector.unregister(caller.connection)
        caller.connection.close()


def converse(connection: socket.socket, answer: Callable[[bytes], bytes]) -> Waits[None]:
    """One request and its answer, over a socket that never blocks."""
    if isinstance(connection, ssl.SSLSocket):
        yield from patient(connection.do_handshake, EVENT_READ)
    request = b""
    while b"\r\n\r\n" not in request:
        received = yield from patient(lambda: connection.recv(MOST_BYTES), EVENT_READ)
        request += received
        if not received or len(request) > MOST_BYTES:
            return
    rest = answer(request)
    while rest:
        sent = yield from patient(lambda: connection.send(rest), EVENT_WRITE)  # noqa: B023 - called at once
        rest = rest[sent:]


def patient(step: Callable[[], Value], event: int) -> Waits[Value]:
    """Retries `step` until it need not wait. TLS may have to read before it can write, and the reverse."""
    while True:
        try:
            return step()
        except ssl.SSLWantReadError:
            yield EVENT_READ
        except ssl.SSLWantWriteError:
            yield EVENT_WRITE
        except BlockingIOError:
            yield event


class Site:
    """The attributes of a server that WSGIRequestHandler reads."""

    def __init__(self, listener: socket.socket, app: "WSGIApplication") -> None:
        host, port = listener.getsockname()[:2]
        self.base_environ = {"SERVER_NAME": host, "SERVER_PORT": str(port), "SCRIPT_NAME": ""}
        self._app = app

    def get_app(self) -> "WSGIApplication":
        return self._app

    def answer(self, address: tuple[str, int], request: bytes) -> bytes:
        """`request`: at least up to the end of its headers."""
        return Answer(request, address, self).wfile.getvalue()  # type: ignore[arg-type]  # neither socket nor server


class Answer(WSGIRequestHandler):
    """The response to a request that has arrived completely."""

    request: Any
    wfile: BytesIO

    def setup(self) -> None:
        self.rfile, self.wfile = BytesIO(self.request), BytesIO()

    def finish(self) -> None:
        """Does nothing: there is nothing to close."""

    def log_message(self, format: str, *args: object) -> None:
        """Writes no access log: a scrape every few seconds would hide everything else."""
