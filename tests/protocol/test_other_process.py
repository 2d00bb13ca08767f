"""What is known of the process at the other end of a unix socket."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowcast.protocol.codec import encode
from rowcast.protocol.messages import Envelope
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.machine import OtherProcess, at_other_end, stat_of
from tests.support.sample_messages import hello

DEADLINE_S = 20.0
CONNECT = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); time.sleep(600)"


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", socket.socket]]:
    """A process, and the connection that it has made."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(DEADLINE_S)
        process = subprocess.Popen([sys.executable, "-c", CONNECT, path])
        try:
            connection, _ = listener.accept()
            with connection:
                yield process, connection
        finally:
            process.kill()
            process.wait()


def until_state(pid: int, states: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while (found := stat_of(pid)) is None or found.state not in states:
        assert time.monotonic() < deadline_s, found
        time.sleep(0.01)


def test_a_peer_runs_until_a_signal_stops_it_and_again_after_that(
    caller: tuple["subprocess.Popen[bytes]", socket.socket],
) -> None:
    process, connection = caller
    peer = at_other_end(connection.fileno())
    assert peer is not None
    assert peer.pid == process.pid
    assert peer.runs
    process.send_signal(signal.SIGSTOP)
    until_state(process.pid, "T")
    assert not peer.runs
    process.send_signal(signal.SIGCONT)
    until_state(process.pid, "SR")
    assert peer.runs


def test_a_peer_that_has_ended_does_not_run(caller: tuple["subprocess.Popen[bytes]", socket.socket]) -> None:
    process, connection = caller
    peer = at_other_end(connection.fileno())
    assert peer is not None
    process.kill()
    until_state(process.pid, "Z")
    assert not peer.runs
    process.wait()
    assert not peer.runs


def test_a_later_process_of_the_same_number_is_not_the_peer() -> None:
    own = stat_of(os.getpid())
    assert own is not None
    assert OtherProcess(os.getpid(), own.start).runs
    assert not OtherProcess(os.getpid(), str(int(own.start) - 1)).runs


def test_nobody_is_seen_over_tcp_or_where_nothing_is_connected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            assert at_other_end(far.fileno()) is None
            closed = far.fileno()
        assert at_other_end(closed) is None


def test_both_ends_of_a_link_know_the_other_process(tmp_path: Path) -> None:
    with (
        ZmqLink.of("prefetcher", tmp_path, directory=tmp_path) as near,
        ZmqLink.of("trainer", tmp_path, directory=tmp_path) as far,
    ):
        assert not near.peer_runs
        far.send(encode(Envelope(incarnation=0, sequence=0, message=hello())))
        deadline_s = time.monotonic() + DEADLINE_S
        while not (near.peer_runs and far.peer_runs):
            assert time.monotonic() < deadline_s, "both ends are in this process, which runs"
            time.sleep(0.01)
