import http.client
import shutil
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from rowcast.deploy.health import LOOPBACKS, USUAL_PORTS
from rowcast.deploy.health import ask as ask_health
from rowcast.deploy.health import main as check_health
from rowcast.job.schema import Metrics
from rowcast.protocol.scrape import CountersCollector, new_registry
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.metrics import Health, build_info
from rowcast.runtime.telemetry.server import TelemetryServer
from tests.support import three_steps
from tests.support.certificates import certificate
from tests.support.facts import facts

FREE = "127.0.0.1:0"


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def server(health: Health) -> Iterator[TelemetryServer]:
    counters, _ = three_steps.run_of_three_steps()
    collector = three_steps.prefetcher_collector(counters, health)
    with TelemetryServer("prefetcher", FREE, new_registry(collector), health) as server:
        yield server


def ask(server: TelemetryServer, path: str, method: str = "GET") -> tuple[int, str]:
    connection = HTTPConnection(server.address, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_metrics_are_served_as_prometheus_reads_them(server: TelemetryServer) -> None:
    status, text = ask(server, "/metrics")
    assert status == 200
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert sum(sample.value for sample in found["rowcast_lookups"].samples) == 120
    (info,) = found["rowcast_build_info"].samples
    assert info.labels["process"] == "prefetcher"
    assert info.labels["job_name"] == "retail"


def test_health_follows_the_stages_and_readiness_the_state(server: TelemetryServer, health: Health) -> None:
    assert ask(server, "/healthz") == (200, "ok\n")
    assert ask(server, "/healthz", "HEAD") == (200, "")
    assert ask(server, "/readyz") == (503, "starting\n")
    health.state = "connecting"
    assert ask(server, "/readyz") == (503, "connecting\n")
    health.state = "running"
    assert ask(server, "/readyz") == (200, "running\n")
    health.dead_stage = lambda: "fetcher"
    assert ask(server, "/healthz") == (503, "fetcher is dead\n")
    assert ask(server, "/readyz") == (503, "fetcher is dead\n")
    health.dead_stage = lambda: None
    health.state = "stopping"
    assert ask(server, "/healthz") == (200, "ok\n")
    assert ask(server, "/readyz") == (503, "stopping\n")


def test_other_paths_and_methods_are_refused(server: TelemetryServer) -> None:
    assert ask(server, "/")[0] == 404
    assert ask(server, "/metricsx")[0] == 404
    assert ask(server, "/healthz", "POST")[0] == 405
    assert ask(server, "/metrics", "DELETE")[0] == 405


def test_requests_leave_no_trace_on_stderr(server: TelemetryServer, capfd: pytest.CaptureFixture[str]) -> None:
    ask(server, "/metrics")
    ask(server, "/nothing")
    with socket.create_connection(address(server), timeout=10) as raw:
        raw.sendall(b"\x16\x03\x01 garbage\r\n\r\n")
        assert b"400" in raw.recv(4096)
    assert capfd.readouterr() == ("", "")


def test_a_counter_that_cannot_be_read_answers_500_and_serving_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    class Broken(CountersCollector[Any, Any]):
        process = "trainer"

        def samples(self) -> list[tuple[str, tuple[str, ...], float]]:
            raise RuntimeError("the ring is gone")

    registry = new_registry(
        Broken(three_steps.run_of_three_steps()[1], lambda: None, build_info("trainer", "retail"), Health())
    )
    with TelemetryServer("trainer", FREE, registry, Health()) as server:
        assert ask(server, "/metrics")[0] == 500
        assert ask(server, "/healthz")[0] == 200
    assert "the ring is gone" in capfd.readouterr().err


def test_only_the_loopback_address_listens(server: TelemetryServer) -> None:
    host, port = address(server)
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=10)


def test_a_port_in_use_is_a_sentence_with_the_address_and_the_key(server: TelemetryServer) -> None:
    second = TelemetryServer("trainer", server.address, CollectorRegistry(), Health())
    with pytest.raises(ConfigError) as caught:
        second.start()
    assert str(caught.value).startswith(f"[metrics] trainer = '{server.address}': the port is in use;")
    second.close()


@pytest.mark.parametrize(
    ("configured", "sentence"),
    [
        ("127.0.0.1:99999", "a port is a number from 0 to 65535"),
        ("192.0.2.1:0", "this machine has no such address"),
        ("no-such-host.invalid:0", "cannot listen there"),
        ("\u00e4..b:0", "this is not a host name"),
    ],
)
def test_an_address_that_cannot_be_had_is_a_sentence(configured: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        TelemetryServer("trainer", configured, CollectorRegistry(), Health()).start()


def test_close_frees_the_port_and_may_be_repeated() -> None:
    first = TelemetryServer("trainer", FREE, CollectorRegistry(), Health())
    first.close()
    bound = first.start()
    first.close()
    first.close()
    with TelemetryServer("trainer", bound, CollectorRegistry(), Health()) as second:
        assert second.address == bound


def address(server: TelemetryServer) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl, which is not here")
def test_with_a_certificate_it_serves_https_and_nothing_else(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    made = TelemetryServer("trainer", FREE, CollectorRegistry(), Health(state="running"), (str(cert), str(key)))
    with made as server:
        trusted = ssl.create_default_context(cafile=str(cert))
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))):  # a client that never shakes hands keeps nobody out
            with urllib.request.urlopen(f"https://{server.address}/readyz", timeout=10, context=trusted) as answer:
                assert answer.read() == b"running\n"
            with pytest.raises((OSError, http.client.HTTPException)):
                urllib.request.urlopen(f"http://{server.address}/readyz", timeout=10)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"https://{server.address}/readyz", timeout=10)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl, which is not here")
def test_a_certificate_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path, "one")
    _, other_key = certificate(tmp_path, "other")
    for keyfile in (other_key, tmp_path / "missing.key"):
        with pytest.raises(ConfigError, match=facts("certfile", "one.pem", "PEM")):
            TelemetryServer("trainer", FREE, CollectorRegistry(), Health(), (str(cert), str(keyfile))).start()


@pytest.mark.parametrize("configured", ["[::1]:0", "[::]:0", "localhost:0", "0.0.0.0:0"])
def test_ipv6_and_names_are_served_at_the_address_that_is_said(configured: str, health: Health) -> None:
    with TelemetryServer("trainer", configured, CollectorRegistry(), health) as server:
        host, _, port = server.address.rpartition(":")
        assert host == {"localhost": "127.0.0.1"}.get(configured.removesuffix(":0"), configured.removesuffix(":0"))
        assert ask(server, "/healthz")[0] == 200
        reached = [answer for loopback in LOOPBACKS if (answer := ask_health(int(port), loopback)) is not None]
        assert len(reached) == (2 if host == "[::]" else 1)
        assert check_health([int(port)]) == 0


def test_no_accept_header_fails_or_writes_to_stderr(server: TelemetryServer, capfd: pytest.CaptureFixture[str]) -> None:
    for accept in (
        *("text/plain; version=a.b.c", "text/plain; version=", "text/plain; version=1.0.0; escaping=x"),
        *("application/openmetrics-text; version=a", "application/openmetrics-text; version=99.9.9"),
        *("x" * 99, ";;;,", "\xff"),
    ):
        connection = HTTPConnection(server.address, timeout=10)
        connection.request("GET", "/metrics", headers={"Accept": accept.encode("latin1")})
        answer = connection.getresponse()
        assert (answer.status, b"rowcast_lookups_total" in answer.read()) == (200, True), accept
        connection.close()
    assert capfd.readouterr().err == ""


def test_a_default_port_that_is_in_use_gives_way_and_one_that_was_set_does_not(health: Health) -> None:
    with TelemetryServer("trainer", FREE, CollectorRegistry(), health) as first:
        for configured in (f"{first.address}+", f"127.0.0.1:{address(first)[1]}+"):
            with TelemetryServer("trainer", configured, CollectorRegistry(), health) as second:
                assert second.address not in (first.address, "127.0.0.1:0")
                assert ask(second, "/healthz")[0] == 200
        with pytest.raises(ConfigError, match="the port is in use"):
            TelemetryServer("trainer", first.address, CollectorRegistry(), health).start()
    with TelemetryServer("trainer", f"{first.address}+", CollectorRegistry(), health) as third:
        assert third.address == first.address
    assert {Metrics().prefetcher, Metrics().trainer} == {f"127.0.0.1:{port}+" for port in USUAL_PORTS}
