"""Callers of the metrics port that are slow on purpose: they keep neither descriptors, nor threads, nor probes out."""

import os
import resource
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from rowcast.runtime.process import run_command
from rowcast.runtime.telemetry import server as http_server
from rowcast.runtime.telemetry.metrics import Health
from rowcast.runtime.telemetry.server import MOST_CALLERS, HttpServer, TelemetryServer, listening
from tests.support.certificates import certificate

DEADLINE_S = 20.0  # only a hang takes that long
HEALTHZ = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def server() -> Iterator[TelemetryServer]:
    with TelemetryServer("trainer", "127.0.0.1:0", CollectorRegistry(), Health()) as server:
        yield server


def port(server: TelemetryServer) -> int:
    return int(server.address.rpartition(":")[2])


def caller(server: TelemetryServer, said: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port(server)), timeout=DEADLINE_S)
    connection.sendall(said)
    return connection


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes; b"" also for a connection that it has reset."""
    received = b""
    try:
        while more := connection.recv(4096):
            received += more
    except ConnectionError:
        pass
    return received


def is_healthy(server: TelemetryServer) -> bool:
    with caller(server, HEALTHZ) as connection:
        return answer(connection).endswith(b"\r\n\r\nok\n")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it has not come to pass"
        time.sleep(0.01)


@pytest.mark.parametrize("said", [b"", b"GET /metr"], ids=["silent", "half a request"])
def test_a_new_caller_takes_the_place_of_the_oldest(said: bytes, server: TelemetryServer) -> None:
    callers = [caller(server, said) for _ in range(MOST_CALLERS + 5)]
    for oldest in callers[:5]:
        assert answer(oldest) == b""
    rest = callers[5:]
    for number, one in enumerate(rest):
        one.sendall(HEALTHZ if said == b"" else b"ics HTTP/1.1\r\n\r\n")
        assert answer(one).startswith(b"HTTP/1.0 200 OK"), number
    for one in callers:
        one.close()


def test_many_callers_take_no_more_threads_and_descriptors_than_a_few(server: TelemetryServer) -> None:
    threads, descriptors = threading.active_count(), num_descriptors()
    callers = [caller(server, b"G") for _ in range(300)]
    assert is_healthy(server)
    assert threading.active_count() == threads
    # both ends are in this process
    until(lambda: num_descriptors() <= descriptors + len(callers) + MOST_CALLERS)
    for one in callers:
        one.close()


def test_a_byte_now_and_then_gives_no_more_time(server: TelemetryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 1.0)
    with caller(server, b"GET /") as slow:
        slow.settimeout(0.1)
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            assert time.monotonic() < deadline_s, "the connection lives as long as bytes come"
            try:
                slow.sendall(b"x")
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break


def test_one_that_does_not_read_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.5)
    whole = 2**25

    def app(environ: object, start_response: Callable[..., object]) -> list[bytes]:
        start_response("200 OK", [("Content-Length", str(whole))])
        return [b"x" * whole]

    listener = listening("127.0.0.1", 0)
    served = HttpServer(listener, app)
    served.start()
    with socket.create_connection(listener.getsockname(), timeout=DEADLINE_S) as deaf:
        deaf.sendall(HEALTHZ)
        begun = deaf.recv(1)
        descriptors = num_descriptors()
        until(lambda: num_descriptors() < descriptors)
        assert len(begun + answer(deaf)) < whole
    served.close()


def test_a_request_without_end_is_cut_off(server: TelemetryServer) -> None:
    with caller(server) as endless:
        with pytest.raises(ConnectionError):
            endless.sendall(b"x" * 2**24)  # more than all buffers on the way hold
        assert is_healthy(server)


def test_without_a_free_descriptor_callers_wait_and_the_server_lives(server: TelemetryServer) -> None:
    waiting = socket.socket()
    waiting.settimeout(DEADLINE_S)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        waiting.connect(("127.0.0.1", port(server)))  # takes no new descriptor
        waiting.sendall(HEALTHZ)
        time.sleep(0.2)  # the server tries, and finds none
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert answer(waiting).endswith(b"ok\n")
    waiting.close()


def test_processes_may_open_as_many_files_as_the_host_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
        run_command("trainer", lambda: found.append(resource.getrlimit(resource.RLIMIT_NOFILE)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == [(hard, hard)]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl, which is not here")
def test_handshakes_that_never_end_keep_nobody_out(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    certificates = str(cert), str(key)
    with TelemetryServer("trainer", "127.0.0.1:0", CollectorRegistry(), Health(), certificates) as server:
        hello = bytes.fromhex("1603010200010001fc0303")  # the beginning of one
        callers = [caller(server, hello if number % 2 else b"") for number in range(3 * MOST_CALLERS)]
        trusted = ssl.create_default_context(cafile=str(cert))
        with trusted.wrap_socket(caller(server), server_hostname="127.0.0.1") as probe:
            probe.sendall(HEALTHZ)
            assert answer(probe).endswith(b"ok\n")
        for one in callers:
            one.close()
