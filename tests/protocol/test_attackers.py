"""Callers without a key beside a run: nobody hears them, and they do not cost memory or descriptors for long."""

import gc
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import pytest
import zmq

from rowcast.protocol.messages import Bye, Envelope
from rowcast.protocol.session import encode
from rowcast.protocol.transport import endpoint as doors
from rowcast.protocol.transport import zmq_ends as backlog
from rowcast.protocol.transport import zmq_link
from rowcast.protocol.transport.endpoint import Refusals, socket_path
from rowcast.protocol.transport.zmq_ends import MAX_MESSAGE_BYTES, MOST_STRANGERS, Dealer, Router
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.errors import RemoteProtocolError
from tests.protocol.attackers import KINDS, LONG_PART, Attacker, greeting, long_frame, ready
from tests.protocol.mirrors import End, exchange, make_end
from tests.protocol.peer import GREETING, Bell, receive, received_until_error
from tests.support.repeats import count
from tests.support.sample_messages import hello
from tests.support.tcp_run import RING_BYTES, TcpRun, run, wait_for

__all__ = ["run"]
NUM_CONNECTIONS = count(60, 2000)
STAYING = 40  # attackers that stay at once
GROWTH_BYTES = 48 * 2**20  # resident, over all of the attack: allocator and interpreter, not connections


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors() -> int:
    """Without those of earlier tests' garbage, which a later collection would close."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def converse(ends: tuple[End, End], chance: Random) -> None:
    exchange(*ends, num_pieces=3, chance=chance, wait=lambda: time.sleep(0.001))


def test_callers_without_a_key_are_never_heard_and_the_run_beside_them_goes_on(
    run: TcpRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "HANDSHAKE_MS", 1000)
    chance, bell = Random(5), Bell()
    with run.prefetcher(bell) as prefetcher, run.trainer(bell) as trainer:
        run.greet(trainer, prefetcher, bell)
        ends = make_end(prefetcher, RING_BYTES), make_end(trainer, RING_BYTES)
        converse(ends, chance)
        began_bytes, began_descriptors, most_bytes = resident_bytes(), num_descriptors(), 0
        staying: deque[Attacker] = deque()
        for number in range(NUM_CONNECTIONS):
            staying.append(Attacker(run.port, number, chance))
            for attacker in staying:
                attacker.send_more()
            while len(staying) > chance.randint(STAYING // 2, STAYING):
                staying.popleft().leave()
            if number % 20 == 0:
                converse(ends, chance)
                most_bytes = max(most_bytes, resident_bytes())
        for attacker in staying:
            attacker.wait_cut_off()
            attacker.leave()
        converse(ends, chance)
        assert most_bytes - began_bytes < GROWTH_BYTES + STAYING * MAX_MESSAGE_BYTES
        assert resident_bytes() - began_bytes < GROWTH_BYTES
        wait_for(lambda: num_descriptors() == began_descriptors)
        wait_for(lambda: prefetcher.refused == NUM_CONNECTIONS)
        assert prefetcher.receive() is None
        assert not prefetcher.peer_gone


def test_open_connections_are_limited_and_the_trainers_is_never_cut(run: TcpRun) -> None:
    bell = Bell()
    with run.prefetcher(bell) as prefetcher, run.trainer(bell) as trainer:
        run.greet(trainer, prefetcher, bell)
        before = num_descriptors()
        attackers = [Attacker(run.port, KINDS.index(KINDS[-1]), Random(n)) for n in range(2 * MOST_STRANGERS)]
        for attacker in attackers[: MOST_STRANGERS + 1]:  # all but the newest, and the trainer
            attacker.wait_cut_off()
        wait_for(lambda: num_descriptors() <= before + len(attackers) + MOST_STRANGERS)
        converse((make_end(prefetcher, RING_BYTES), make_end(trainer, RING_BYTES)), Random(1))
        assert not prefetcher.peer_gone
        for attacker in attackers:
            attacker.leave()
        wait_for(lambda: num_descriptors() == before)


def test_a_link_closes_while_it_is_under_attack(run: TcpRun) -> None:
    """From another thread, which stops only when the port is closed."""
    link = run.prefetcher(Bell())
    link.start()
    chance, num_made = Random(2), [0]

    def attack() -> None:
        try:
            while True:
                attacker = Attacker(run.port, chance.randrange(len(KINDS)), chance)
                attacker.send_more()
                attacker.leave()
                num_made[0] += 1
        except OSError:
            return

    thread = threading.Thread(target=attack)
    thread.start()
    wait_for(lambda: num_made[0] > 100)
    link.close()
    thread.join()
    assert link.receive() is None


def envelope(sequence: int, incarnation: int = 0) -> bytes:
    return encode(Envelope(incarnation=incarnation, sequence=sequence, message=hello(mode="train")))


NOT_GREETINGS = {
    "garbage": b"\xff\x00garbage",
    "nothing": b"",
    "a greeting out of order": envelope(1),
    "an old good-bye": encode(Envelope(incarnation=5, sequence=0, message=Bye())),
}


def is_refused(link: ZmqLink, number: int) -> bool:
    return link.refused == number


def test_only_one_who_greets_becomes_the_trainer(tmp_path: Path) -> None:
    """A trainer that was stopped for a while reconnects by itself, and sends frames of an earlier incarnation."""
    bell = Bell()
    with ZmqLink.of("prefetcher", tmp_path / "run", bell.ring, tmp_path / "sockets") as link, zmq.Context() as context:
        for number, frame in enumerate(NOT_GREETINGS.values(), start=1):
            with context.socket(zmq.DEALER) as stranger:
                stranger.connect(f"ipc://{socket_path(tmp_path / 'run', tmp_path / 'sockets')}")
                stranger.send(frame)
                wait_for(partial(is_refused, link, number))
        with ZmqLink.of("trainer", tmp_path / "run", lambda: None, tmp_path / "sockets") as trainer:
            trainer.send(GREETING)
            assert receive(link, bell) == GREETING
        assert link.refused == len(NOT_GREETINGS)


def test_a_greeting_of_another_version_is_heard_so_that_its_sender_is_told(tmp_path: Path) -> None:
    bell = Bell()
    frame = msgspec.msgpack.encode([0, 0, {"type": "Hello", "protocol_version": 99}])
    with (
        ZmqLink.of("prefetcher", tmp_path / "run", bell.ring, tmp_path / "sockets") as link,
        ZmqLink.of("trainer", tmp_path / "run", lambda: None, tmp_path / "sockets") as trainer,
    ):
        trainer.send(frame)
        assert receive(link, bell) == frame


def test_a_peer_that_sends_faster_than_it_is_read_ends_the_run_and_not_the_memory(
    run: TcpRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_link, "INBOX_BYTES", 2**20)
    bell = Bell()
    with run.prefetcher(bell) as prefetcher, run.trainer(Bell()) as trainer:
        trainer.send(GREETING)
        for _ in range(10):
            trainer.send(b"x" * 2**20)
        wait_for(lambda: prefetcher.received_bytes > 2**20 + RING_BYTES)
        frames: list[bytes] = []
        with pytest.raises(RemoteProtocolError, match="came faster than they are taken"):
            received_until_error(prefetcher, frames)
        assert 0 < sum(map(len, frames)) <= 2**20 + RING_BYTES


class OpenDoor(doors.TcpAddress):
    """Without keys: libzmq sends no part of a message before its last, so this caller sends raw bytes, which the tests
    cannot encrypt."""

    sockets = ()

    def open(self) -> None:
        pass

    def bind(self, context: doors.Context, socket: "zmq.Socket[bytes]") -> None:
        socket.bind(self.endpoint)

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        pass


def send_without_end(connection: socket.socket, done: Callable[[], bool]) -> None:
    connection.sendall(greeting(b"NULL") + ready(b"DEALER"))
    connection.setblocking(False)
    rest = part = long_frame(LONG_PART, 2**18) + bytes(2**18)
    while not done():
        with suppress(BlockingIOError, ConnectionError):
            rest = rest[connection.send(rest) :] or part


def test_a_caller_whose_message_has_no_end_is_cut_off_and_the_run_goes_on(
    run: TcpRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    bell, refusals, limit_bytes = Bell(), Refusals(), 2 * 2**20
    router = Router(OpenDoor(run.endpoint, run.keys, refusals), refusals, limit_bytes)
    dealer = Dealer(OpenDoor(run.endpoint, run.keys, refusals), refusals, limit_bytes)
    with (
        ZmqLink(router, bell.ring, refusals, limit_bytes) as prefetcher,
        ZmqLink(dealer, bell.ring, refusals, limit_bytes) as trainer,
        socket.create_connection(("127.0.0.1", run.port)) as hoarder,
    ):
        run.greet(trainer, prefetcher, bell)
        before_bytes = resident_bytes()
        send_without_end(hoarder, lambda: refusals.count > 0)
        converse((make_end(prefetcher, RING_BYTES), make_end(trainer, RING_BYTES)), Random(1))
        assert not prefetcher.peer_gone
        wait_for(lambda: resident_bytes() - before_bytes < GROWTH_BYTES)


def test_a_prefetcher_whose_message_has_no_end_ends_the_trainer(run: TcpRun, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    dealer = Dealer(OpenDoor(run.endpoint, run.keys, Refusals()), Refusals(), 2**20)
    with (
        socket.create_server(("127.0.0.1", run.port)) as hostile,
        ZmqLink(dealer, lambda: None, Refusals(), 2**20) as trainer,
    ):
        connection, _ = hostile.accept()
        with connection:
            send_without_end(connection, lambda: has_failed(trainer))
        with pytest.raises(RemoteProtocolError, match="message without end"):
            trainer.receive()


def has_failed(link: ZmqLink) -> bool:
    try:
        assert link.receive() is None
    except RemoteProtocolError:
        return True
    return False


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests are quick."""
    monkeypatch.setattr(zmq_link, "CHECK_MS", 20)
    monkeypatch.setattr(backlog, "SLACK_BYTES", 8 * 2**20)
