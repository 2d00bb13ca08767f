"""The link over tcp: the same traffic as on one host, and nobody in without a key."""

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from rowcast.prefetcher.run.make_keys import make_keys
from rowcast.protocol.transport.callers import LOG_EVERY_S, Refusals, fingerprint, load_client
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import setup_logging
from tests.protocol.mirrors import exchange, make_end
from tests.protocol.peer import GREETING, Bell, numbered, receive, wait_gone
from tests.support.facts import facts
from tests.support.tcp_run import RING_BYTES, TcpRun, run, wait_for

__all__ = ["run"]
NUM_FRAMES = 2000


def test_pieces_of_all_lengths_travel_both_ways_and_their_space_is_released(run: TcpRun) -> None:
    bell = Bell()
    with run.prefetcher(bell) as prefetcher, run.trainer(bell) as trainer:
        run.greet(trainer, prefetcher, bell)
        exchange(
            make_end(prefetcher, RING_BYTES),
            make_end(trainer, RING_BYTES),
            num_pieces=40,
            chance=Random(1),
            wait=lambda: time.sleep(0.001),
        )
        assert trainer.received_bytes > 40 * 2**15
        assert prefetcher.refused == trainer.refused == 0
        assert not prefetcher.peer_gone


def test_frames_arrive_in_order_whoever_starts_first(run: TcpRun) -> None:
    bell, trainer_bell = Bell(), Bell()
    with run.trainer(trainer_bell) as trainer:
        for number in range(NUM_FRAMES):
            trainer.send(numbered(number) if number else GREETING)
        with run.prefetcher(bell) as prefetcher:
            receive(prefetcher, bell)
            for number in range(1, NUM_FRAMES):
                assert receive(prefetcher, bell) == numbered(number)
            prefetcher.send(b"welcome")
            assert receive(trainer, trainer_bell) == b"welcome"
        wait_gone(trainer, trainer_bell)


def test_a_trainer_that_leaves_is_noticed_and_the_port_can_be_served_again(run: TcpRun) -> None:
    bell = Bell()
    with run.prefetcher(bell) as prefetcher:
        with run.trainer(Bell()) as trainer:
            run.greet(trainer, prefetcher, bell)
        wait_gone(prefetcher, bell)
    with run.prefetcher(bell) as again, run.trainer(Bell()) as trainer:
        run.greet(trainer, again, bell)


def test_a_port_that_is_taken_is_refused_with_a_sentence(run: TcpRun) -> None:
    with run.prefetcher(Bell()):
        other = run.prefetcher(Bell())
        with pytest.raises(ConfigError, match=facts(run.endpoint, "Address already in use")):
            other.start()
        other.close()


@pytest.mark.parametrize("role", ["prefetcher", "trainer"])
def test_a_run_whose_secret_others_may_read_does_not_start(role: str, run: TcpRun) -> None:
    name = "server.key_secret" if role == "prefetcher" else "clients/trainer.key_secret"
    (run.keys / name).chmod(0o644)
    link = run.prefetcher(Bell()) if role == "prefetcher" else run.trainer(Bell())
    with pytest.raises(ConfigError, match="no more than mode 0600"):
        link.start()
    link.close()


def ask_in(trainer: ZmqLink, bell: Bell) -> bytes:
    """The answer. A refusal is raised by whatever comes after it: this frame may be sent before or behind it."""
    trainer.send(b"let me in")
    return receive(trainer, bell)


def strangers_keys(run: TcpRun) -> Path:
    """Keys of another run, but for the public key of this prefetcher."""
    keys = run.folder / "stranger"
    make_keys(keys, ["stranger"])
    (keys / "server.key").write_text((run.keys / "server.key").read_text())
    return keys


def test_a_key_that_is_not_allowed_is_refused_and_both_logs_say_so(
    run: TcpRun, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("prefetcher", "info", json=False)
    bell, trainer_bell = Bell(), Bell()
    keys = strangers_keys(run)
    refusal = f"the prefetcher at {run.endpoint} refuses this trainer's key; put its public part"
    with run.prefetcher(bell) as prefetcher:
        with run.trainer(trainer_bell, keys) as trainer, pytest.raises(ConfigError, match=refusal):
            ask_in(trainer, trainer_bell)
        wait_for(lambda: prefetcher.refused == 1)
        with run.trainer(Bell()) as trainer:  # and the right one gets in
            run.greet(trainer, prefetcher, bell)
        assert prefetcher.receive() is None
    said = capsys.readouterr().err
    assert 'event="refused a caller whose key is not in clients/"' in said
    assert f"address=127.0.0.1 key={fingerprint(load_client(keys)[0].public)}" in said


def test_a_key_is_revoked_by_taking_its_file_away_and_given_back_without_a_restart(run: TcpRun) -> None:
    bell = Bell()
    public = run.keys / "clients" / "trainer.key"
    with run.prefetcher(bell) as prefetcher:
        public.rename(run.folder / "aside")
        revoked_bell = Bell()
        with run.trainer(revoked_bell) as revoked, pytest.raises(ConfigError, match="refuses this trainer's key"):
            ask_in(revoked, revoked_bell)
        wait_for(lambda: prefetcher.refused == 1)
        (run.folder / "aside").rename(public)
        with run.trainer(Bell()) as trainer:
            run.greet(trainer, prefetcher, bell)


def test_a_list_of_keys_that_cannot_be_read_lets_nobody_in(run: TcpRun) -> None:
    bell, trainer_bell = Bell(), Bell()
    with run.prefetcher(bell) as prefetcher, run.trainer(trainer_bell, strangers_keys(run)) as trainer:
        (run.keys / "clients").rename(run.folder / "aside")
        with pytest.raises(ConfigError, match=facts(run.endpoint, "key", "clients/")):
            ask_in(trainer, trainer_bell)
        assert prefetcher.receive() is None


def test_a_trainer_with_another_servers_key_is_never_heard_and_hears_nothing(
    run: TcpRun, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("trainer", "info", json=False)
    bell = Bell()
    keys = run.folder / "theirs"
    make_keys(keys, ["trainer"])
    with run.prefetcher(bell) as prefetcher, run.trainer(Bell(), keys) as trainer:
        trainer.send(b"who are you")
        wait_for(lambda: bool(prefetcher.refused and trainer.refused))
        assert prefetcher.receive() is None
        assert trainer.receive() is None
    assert "the prefetcher ended the handshake; does it have another server.key?" in capsys.readouterr().err


def test_nothing_of_a_payload_can_be_read_on_the_wire(run: TcpRun) -> None:
    """A proxy between the two, which keeps all that passes."""
    secret = b"row row row your boat" * 1000
    seen: list[bytes] = []
    bell, trainer_bell = Bell(), Bell()
    with run.prefetcher(bell) as prefetcher, Proxy(run.port, seen) as proxy:
        run.endpoint = f"tcp://127.0.0.1:{proxy.port}"
        with run.trainer(trainer_bell) as trainer:
            run.greet(trainer, prefetcher, bell)
            prefetcher.send(b"frame of rows", memoryview(secret))
            while (arrived := trainer.receive()) is None:
                trainer_bell.wait()
            frame, payload = arrived
            assert (frame, b"".join(payload)) == (b"frame of rows", secret)
    passed = b"".join(seen)
    assert len(passed) > len(secret)
    assert b"row row" not in passed
    assert b"frame of" not in passed


class Proxy:
    """Takes one caller to `port`, and keeps the bytes of both directions in `seen`."""

    def __init__(self, port: int, seen: list[bytes]) -> None:
        self._target = port
        self._seen = seen
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> "Proxy":
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()
        return self

    def _serve(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        self._ends += [near, far]
        for source, sink in ((near, far), (far, near)):
            self._threads.append(threading.Thread(target=self._pump, args=(source, sink)))
            self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # either side has closed
            while data := source.recv(65536):
                self._seen.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def __exit__(self, *_: object) -> None:
        self._threads[0].join()
        for end in self._ends:
            with suppress(OSError):  # closed by the other side
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for end in (*self._ends, self._listener):
            end.close()


def test_refusals_are_all_counted_and_not_all_logged(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("prefetcher", "info", json=False)
    now_s = [0.0]
    refusals = Refusals(clock=lambda: now_s[0])
    for second in range(100):
        now_s[0] = second * 2 * LOG_EVERY_S / 100
        refusals.note("refused this", key=second)
    refusals.note("refused that")
    assert refusals.count == 101
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("event=")[2] for line in lines] == [
        '"refused this" key=0 more=0',
        '"refused this" key=50 more=49',
        '"refused that" more=0',
    ]
