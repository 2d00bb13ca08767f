"""Serves /metrics, /healthz and /readyz on one HTTP port: read-only, by default on loopback."""

import errno
import socket
import ssl
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, Self

from prometheus_client import CollectorRegistry, make_wsgi_app

from rowcast.runtime.errors import ConfigError, advice
from rowcast.runtime.telemetry.health import Health
from rowcast.runtime.telemetry.http_server import HttpServer, listening
from rowcast.runtime.telemetry.metrics import Process

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

BIND_FAULTS = {
    errno.EADDRINUSE: "the port is in use; choose another one, or port 0 for any free one",
    errno.EACCES: "this user may not open the port; choose one above 1023",
    errno.EADDRNOTAVAIL: "this machine has no such address; use 127.0.0.1, or 0.0.0.0 to serve the network",
}


class ServerSettings(Protocol):
    """The job file's section `[metrics]`."""

    @property
    def prefetcher(self) -> str: ...  # "host:port"

    @property
    def trainer(self) -> str: ...  # "host:port"

    @property
    def certfile(self) -> str | None: ...

    @property
    def keyfile(self) -> str | None: ...


class TelemetryServer:
    """Serves one process's registry and health on its own thread. Reading them must be quick and change nothing."""

    def __init__(self, process: Process, settings: ServerSettings, registry: CollectorRegistry, health: Health) -> None:
        """`settings` is the job file's section. Opens nothing."""
        self._process = process
        self._settings = settings
        self._configured: str = getattr(settings, process)
        self._app = application(registry, health)
        self._server: HttpServer | None = None
        self.address = ""  # the bound "host:port", once started

    def start(self) -> str:
        """Binds, serves and returns the bound "host:port". Raises ConfigError for a bad address or certificate."""
        tls = tls_context(self._settings)
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


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """None for plain http. Raises ConfigError if certificate and key cannot be read or do not match."""
    if settings.certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.certfile, settings.keyfile)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"[metrics] certfile = {settings.certfile!r}, keyfile = {settings.keyfile!r}: "
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
        status, text = (
            health_answer(health, path) if method in ("GET", "HEAD") else ("405 Method Not Allowed", "use GET")
        )
        body = f"{text}\n".encode()
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
        return [] if method == "HEAD" else [body]

    return answer


def health_answer(health: Health, path: str) -> tuple[str, str]:
    match path:
        case "/healthz":
            good, word = health.healthz()
        case "/readyz":
            good, word = health.readyz()
        case _:
            return "404 Not Found", "try /metrics, /healthz or /readyz"
    return "200 OK" if good else "503 Service Unavailable", word
