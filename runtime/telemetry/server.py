"""Serves /metrics, /healthz and /readyz on one HTTP port: read-only, by default on loopback."""

import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from selectors import EVENT_READ, EVENT_WRITE, PollSelector
from typing import TYPE_CHECKING, Any, Self, TypeVar
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app

from rowcast.runtime.errors import ConfigError, advice
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.metrics import Health, Process

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

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
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, *_, (address, _, *scope) = min(addresses, key=lambda one: one[0] != socket.AF_INET)  # a name may have both
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
        return Reply(request, address, self).wfile.getvalue()  # type: ignore[arg-type]  # neither socket nor server


class Reply(WSGIRequestHandler):
    """The response to a request that has arrived completely."""

    request: Any
    wfile: BytesIO

    def setup(self) -> None:
        self.rfile, self.wfile = BytesIO(self.request), BytesIO()

    def finish(self) -> None:
        """Does nothing: there is nothing to close."""

    def log_message(self, format: str, *args: object) -> None:
        """Writes no access log: a scrape every few seconds would hide everything else."""


BIND_FAULTS = {
    errno.EADDRINUSE: "the port is in use; choose another one, or port 0 for any free one",
    errno.EACCES: "this user may not open the port; choose one above 1023",
    errno.EADDRNOTAVAIL: "this machine has no such address; use 127.0.0.1, or 0.0.0.0 to serve the network",
}


class TelemetryServer:
    """Serves one process's registry and health on its own thread. Reading them must be quick and change nothing."""

    def __init__(
        self,
        process: Process,
        configured: str,
        registry: CollectorRegistry,
        health: Health,
        certificate: tuple[str | None, str | None] = (None, None),
    ) -> None:
        """`configured`: "host:port", or "host:port+" for any free port if that one is in use. `certificate`: the PEM
        files of it and of its key, for https. Opens nothing."""
        self._process, self._configured, self._certificate = process, configured, certificate
        self._app = application(registry, health)
        self._server: HttpServer | None = None
        self.address = ""  # the bound "host:port", once started

    def start(self) -> str:
        """Binds, serves and returns the bound "host:port". Raises ConfigError for a bad address or certificate."""
        tls = tls_context(*self._certificate)
        try:
            listener = self._listening()
        except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: the host cannot be encoded
            raise ConfigError(f"[metrics] {self._process} = {self._configured!r}: {bind_fault(error)}") from None
        host, port = listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if tls is not None:  # accepted connections inherit it
            listener = tls.wrap_socket(listener, server_side=True, do_handshake_on_connect=False)
        self._server = HttpServer(listener, self._app)
        self._server.start()
        return self.address

    def _listening(self) -> socket.socket:
        host, _, given = self._configured.rpartition(":")
        host, port = host.strip("[]"), int(given.removesuffix("+"))
        try:
            return listening(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not given.endswith("+"):
                raise
        return listening(host, 0)

    def close(self) -> None:
        """Stops serving and frees the port. Idempotent, and allowed before `start`."""
        if self._server is not None:
            self._server.close()
        self._server = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def tls_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """None for plain http. Raises ConfigError if certificate and key cannot be read or do not match."""
    if certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"[metrics] certfile = {certfile!r}, keyfile = {keyfile!r}: "
            f"cannot be used ({error.strerror or error}); name a PEM certificate and its key, without a password"
        ) from None
    return context


def bind_fault(error: Exception) -> str:
    if isinstance(error, OverflowError):
        return "a port is a number from 0 to 65535"
    if not isinstance(error, OSError):
        return "this is not a host name; use 127.0.0.1"
    return BIND_FAULTS.get(
        error.errno or 0, f"cannot listen there ({error.strerror}); {advice(error.errno, 'change host:port')}"
    )


def application(registry: CollectorRegistry, health: Health) -> "WSGIApplication":
    metrics: WSGIApplication = make_wsgi_app(registry)

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            try:
                return metrics(environ, start_response)
            except (TypeError, ValueError):  # of an Accept header whose version is no number
                return metrics({**environ, "HTTP_ACCEPT": ""}, start_response)
        method = environ["REQUEST_METHOD"]
        if method not in ("GET", "HEAD"):
            status, text = "405 Method Not Allowed", "use GET"
        elif path in ("/healthz", "/readyz"):
            good, text = health.healthz() if path == "/healthz" else health.readyz()
            status = "200 OK" if good else "503 Service Unavailable"
        else:
            status, text = "404 Not Found", "try /metrics, /healthz or /readyz"
        body = f"{text}\n".encode()
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
        return [] if method == "HEAD" else [body]

    return answer
