"""A run's link over tcp on this host's loopback, with keys of its own."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rowcast.job.schema import Transport
from rowcast.prefetcher.run.make_keys import make_keys
from rowcast.protocol.transport.zmq_link import ZmqLink
from tests.protocol.peer import GREETING, Bell, receive

RING_BYTES = 2 * 2**20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TcpRun:
    """Keys for both sides in one folder, and the transport section of their job file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = folder / "keys"
        make_keys(self.keys, ["trainer"])
        self.port = free_port()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"

    def transport(self, keys: Path | None = None) -> Transport:
        return Transport(endpoint=self.endpoint, keys=str(keys or self.keys), ring=f"{RING_BYTES}B")

    def prefetcher(self, bell: Bell) -> ZmqLink:
        return ZmqLink.of("prefetcher", self.folder, bell.ring, transport=self.transport())

    def trainer(self, bell: Bell, keys: Path | None = None) -> ZmqLink:
        return ZmqLink.of("trainer", self.folder, bell.ring, transport=self.transport(keys))

    def greet(self, trainer: ZmqLink, prefetcher: ZmqLink, bell: Bell) -> None:
        trainer.send(GREETING)
        assert receive(prefetcher, bell) == GREETING


@pytest.fixture
def run(tmp_path: Path) -> TcpRun:
    return TcpRun(tmp_path)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
