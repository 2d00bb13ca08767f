"""The link between two real processes: order, either start, loss of the peer, and nobody in between."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
import zmq

from rowcast.protocol.transport import zmq_link
from rowcast.protocol.transport.endpoint import socket_path
from rowcast.protocol.transport.zmq_ends import MAX_MESSAGE_BYTES
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.errors import LocalProtocolError, RemoteProtocolError
from rowcast.runtime.run_directory import Role
from tests.protocol.peer import (
    GREETING,
    NUM_FRAMES,
    Bell,
    numbered,
    receive,
    received_until_error,
    send_numbered,
    wait_gone,
)

ROOT = Path(__file__).parents[2]
Start = Callable[[str, str], "subprocess.Popen[str]"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    return tmp_path / "sockets"


@pytest.fixture
def start(run_dir: Path, sockets: Path) -> Iterator[Start]:
    """Starts the other process; all are killed after the test."""
    peers: list[subprocess.Popen[str]] = []

    def start_peer(role: str, what: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.protocol.peer", role, str(run_dir), str(sockets), what]
        peers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.kill()
        peer.communicate()


def said(peer: "subprocess.Popen[str]") -> str:
    assert peer.stdout is not None
    return peer.stdout.readline().strip()


def test_ten_thousand_frames_arrive_in_order_when_the_prefetcher_starts_first(
    run_dir: Path, sockets: Path, start: Start
) -> None:
    bell = Bell()
    with ZmqLink.of("prefetcher", run_dir, bell.ring, sockets) as link:
        start("trainer", "echo")
        assert receive(link, bell) == GREETING
        link.send(b"go")
        send_numbered(link)
        for number in range(NUM_FRAMES):
            assert receive(link, bell) == numbered(number)
        assert link.last_received_s is not None
        assert link.last_received_s <= time.monotonic()


def link_of(role: Role, run_dir: Path, bell: Bell, sockets: Path) -> ZmqLink:
    return ZmqLink.of(role, run_dir, bell.ring, sockets)


@pytest.mark.parametrize(("role", "peer_role"), [("prefetcher", "trainer"), ("trainer", "prefetcher")])
def test_all_that_a_peer_sent_before_it_left_is_received(
    role: Role, peer_role: str, run_dir: Path, sockets: Path, start: Start
) -> None:
    bell = Bell()
    with link_of(role, run_dir, bell, sockets) as link:
        if role == "trainer":
            link.send(GREETING)
        start(peer_role, "send")
        wait_gone(link, bell)
        assert link.receive() == (GREETING, ())
        assert [link.receive() for _ in range(NUM_FRAMES)] == [(numbered(number), ()) for number in range(NUM_FRAMES)]
        assert link.receive() is None


@pytest.mark.parametrize(("role", "peer_role"), [("prefetcher", "trainer"), ("trainer", "prefetcher")])
def test_a_killed_peer_is_noticed(role: Role, peer_role: str, run_dir: Path, sockets: Path, start: Start) -> None:
    bell = Bell()
    with link_of(role, run_dir, bell, sockets) as link:
        if role == "trainer":
            link.send(GREETING)
        peer = start(peer_role, "stay")
        assert receive(link, bell) == GREETING
        assert not link.peer_gone
        peer.send_signal(signal.SIGKILL)
        wait_gone(link, bell)
        assert link.peer_gone_s is not None
        assert link.receive() is None
        link.send(b"to nobody")
        link.close()


def test_a_trainer_whose_prefetcher_is_gone_does_not_call_the_next_one(run_dir: Path, sockets: Path) -> None:
    trainer_bell, bell = Bell(), Bell()
    with ZmqLink.of("trainer", run_dir, trainer_bell.ring, sockets) as trainer:
        with ZmqLink.of("prefetcher", run_dir, bell.ring, sockets) as first:
            trainer.send(GREETING)
            assert receive(first, bell) == GREETING
        wait_gone(trainer, trainer_bell)
        trainer.send(b"stale")
        with (
            ZmqLink.of("prefetcher", run_dir, bell.ring, sockets) as second,
            ZmqLink.of("trainer", run_dir, silent_bell, sockets) as other,
        ):
            other.send(GREETING)
            assert receive(second, bell) == GREETING
            assert second.refused == 0


def silent_bell() -> None:
    """Nobody listens."""


def test_a_second_trainer_is_refused_with_a_sentence_and_the_first_one_stays(
    run_dir: Path, sockets: Path, start: Start
) -> None:
    bell, trainer_bell = Bell(), Bell()
    with (
        ZmqLink.of("prefetcher", run_dir, bell.ring, sockets) as link,
        ZmqLink.of("trainer", run_dir, trainer_bell.ring, sockets) as first,
    ):
        first.send(GREETING)
        assert receive(link, bell) == GREETING
        second = start("trainer", "refused")
        assert said(second) == "started"
        assert "another trainer is connected" in said(second)
        assert said(second) == "closed"
        first.send(b"still here")
        assert receive(link, bell) == b"still here"
        assert link.refused == 1
        assert not link.peer_gone


def test_close_gives_up_on_a_stopped_peer(run_dir: Path, sockets: Path, start: Start) -> None:
    bell = Bell()
    link = ZmqLink.of("prefetcher", run_dir, bell.ring, sockets)
    link.start()
    peer = start("trainer", "stay")
    assert receive(link, bell) == GREETING
    peer.send_signal(signal.SIGSTOP)
    for _ in range(16):
        link.send(b"x" * 2**20)  # more than the socket's buffers take
    link.close()
    link.close()
    assert not socket_path(run_dir, sockets).exists()
    with ZmqLink.of("prefetcher", run_dir, directory=sockets):
        pass  # and the run directory can be served again


def test_a_trainer_whose_prefetcher_left_before_it_had_taken_everything_closes(run_dir: Path, sockets: Path) -> None:
    bell, trainer_bell = Bell(), Bell()
    with ZmqLink.of("trainer", run_dir, trainer_bell.ring, sockets) as trainer:
        with ZmqLink.of("prefetcher", run_dir, bell.ring, sockets) as link:
            trainer.send(GREETING)
            assert receive(link, bell) == GREETING
            for _ in range(64):
                trainer.send(b"x" * 2**20)  # more than the socket's buffers take
        wait_gone(trainer, trainer_bell)


@pytest.mark.parametrize("role", get_args(Role))
def test_a_link_whose_peer_never_came_closes_with_frames_queued(role: Role, run_dir: Path, sockets: Path) -> None:
    with ZmqLink.of(role, run_dir, directory=sockets) as link:
        link.send(GREETING)
    with pytest.raises(LocalProtocolError, match="not open"):
        link.send(b"late")


def test_a_queue_beyond_all_credits_is_refused(run_dir: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_link, "QUEUE_FRAMES", 10)
    with ZmqLink.of("prefetcher", run_dir, directory=sockets) as link:
        for _ in range(10):
            link.send(b"to a trainer that has not come")
        with pytest.raises(LocalProtocolError, match="10 frames wait"):
            link.send(b"one more")


def test_an_error_in_the_thread_is_raised_after_the_frames_that_came_before_it(run_dir: Path, sockets: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the bell is broken")

    link = ZmqLink.of("prefetcher", run_dir, fail, sockets)
    with link, ZmqLink.of("trainer", run_dir, directory=sockets) as trainer:
        trainer.send(GREETING)
        frames: list[bytes] = []
        with pytest.raises(RuntimeError, match="the bell is broken"):
            received_until_error(link, frames)
        assert frames == [GREETING]
        with pytest.raises(RuntimeError, match="the bell is broken"):
            link.send(b"welcome")


def test_a_frame_beyond_the_limit_ends_the_connection(run_dir: Path, sockets: Path) -> None:
    bell, trainer_bell = Bell(), Bell()
    with (
        ZmqLink.of("prefetcher", run_dir, bell.ring, sockets) as link,
        ZmqLink.of("trainer", run_dir, trainer_bell.ring, sockets) as trainer,
    ):
        trainer.send(GREETING)
        assert receive(link, bell) == GREETING
        trainer.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        wait_gone(link, bell)
        wait_gone(trainer, trainer_bell)


def test_a_message_of_several_parts_is_refused(run_dir: Path, sockets: Path) -> None:
    bell = Bell()
    with (
        ZmqLink.of("prefetcher", run_dir, bell.ring, sockets) as link,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        stranger.connect(f"ipc://{socket_path(run_dir, sockets)}")
        stranger.send(GREETING)
        stranger.send_multipart([b"one", b"two"])
        frames: list[bytes] = []
        with pytest.raises(RemoteProtocolError, match="2 parts arrived"):
            received_until_error(link, frames)
        assert frames == [GREETING]
