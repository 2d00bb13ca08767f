"""The link over tcp and its keys: the same traffic as on one host, and nobody in without a key."""

import os
import socket
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from typer.testing import CliRunner

from rowcast.command_line.prefetcher import app
from rowcast.prefetcher.run.make_keys import check_keys, make_keys
from rowcast.protocol.transport.endpoint import (
    LOG_EVERY_S,
    Refusals,
    allowed_clients,
    fingerprint,
    load_client,
    load_pair,
    load_public,
    load_server,
)
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import setup_logging
from tests.protocol.peer import GREETING, Bell, numbered, receive, wait_gone
from tests.support.facts import facts
from tests.support.tcp_run import TcpRun, run, wait_for

__all__ = ["run"]
NUM_FRAMES = 2000


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


DEFAULT_FILES = {
    "server.key": 0o644,
    "server.key_secret": 0o600,
    "clients/trainer.key": 0o644,
    "clients/trainer.key_secret": 0o600,
}


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_command_makes_a_folder_that_both_sides_can_use_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    before = os.umask(umask)
    try:
        result = CliRunner().invoke(app, ["keys", "--out", str(folder)])
    finally:
        os.umask(before)
    assert result.exit_code == 0
    assert modes(folder) == {name: mode & ~umask for name, mode in DEFAULT_FILES.items()}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "clients")] == [0o700, 0o700]
    server, (client, server_public) = load_server(folder), load_client(folder)
    assert server.public == server_public != client.public
    assert allowed_clients(folder) == {client.public: "trainer"}
    assert fingerprint(server.public) in result.output
    assert server.secret.decode() not in result.output + repr(server)
    checked = CliRunner().invoke(app, ["keys", "--check", str(folder)])
    assert checked.exit_code == 0
    assert f"clients/trainer: {fingerprint(client.public)} (public and secret)" in checked.output


def test_a_secret_file_is_never_readable_by_others_for_an_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, int, int]] = []
    really_open = os.open

    def watch(path: Path, flags: int, mode: int = 0o777) -> int:
        opened.append((Path(path).name, flags, mode))
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", watch)
    make_keys(tmp_path / "keys", ["a"])
    secret = [(flags, mode) for name, flags, mode in opened if name.endswith(".key_secret")]
    assert len(secret) == 2
    assert all(flags & os.O_EXCL and flags & os.O_CREAT and mode == 0o600 for flags, mode in secret)


def test_clients_are_added_to_a_folder_and_the_server_stays_who_it_is(tmp_path: Path) -> None:
    make_keys(tmp_path, ["a"])
    server = load_server(tmp_path)
    make_keys(tmp_path, ["b", "c"])
    assert load_server(tmp_path) == server
    assert sorted(allowed_clients(tmp_path).values()) == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="holds 3 secret keys"):
        load_client(tmp_path)


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [(["a"], "has a key of 'a' already"), (["b", "b"], "has a key of 'b'"), (["../x"], "up to 64")],
)
def test_nothing_is_made_where_a_name_cannot_be_used(clients: list[str], sentence: str, tmp_path: Path) -> None:
    make_keys(tmp_path, ["a"])
    before = modes(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        make_keys(tmp_path, ["new", *clients])
    assert modes(tmp_path) == before


def test_a_trainers_host_needs_only_its_own_secret_and_the_servers_public_key(tmp_path: Path) -> None:
    make_keys(tmp_path / "all", ["a", "b"])
    there = tmp_path / "there"
    (there / "clients").mkdir(parents=True, mode=0o700)
    for name in ("server.key", "clients/a.key_secret"):
        (tmp_path / "all" / name).rename(there / name)
    pair, _ = load_client(there)
    assert allowed_clients(tmp_path / "all")[pair.public] == "a"
    assert len(check_keys(there)) == 2
    with pytest.raises(ConfigError, match=facts("server.key_secret", "No such file")):
        load_server(there)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o700])
def test_a_secret_that_others_may_read_is_refused_with_the_command_that_mends_it(mode: int, tmp_path: Path) -> None:
    make_keys(tmp_path, ["a"])
    path = tmp_path / "clients" / "a.key_secret"
    path.chmod(mode)
    for use in (load_client, check_keys):
        with pytest.raises(ConfigError, match=facts("0600", f"{mode:04o}", "chmod 600")):
            use(tmp_path)
    path.chmod(0o400)
    load_client(tmp_path)


@pytest.mark.parametrize("name", [".", "clients"])
def test_a_folder_where_others_could_put_keys_is_refused(name: str, tmp_path: Path) -> None:
    make_keys(tmp_path, ["a"])
    (tmp_path / name).chmod(0o770)
    for use in (load_server, load_client, check_keys):
        with pytest.raises(ConfigError, match="mode 0770; chmod 700"):
            use(tmp_path)


def test_a_pair_that_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path, ["a", "b"])
    clients = tmp_path / "clients"
    (clients / "a.key").write_text((clients / "b.key").read_text())
    with pytest.raises(ConfigError, match="are not a pair"):
        check_keys(tmp_path)
    mixed = (
        (clients / "a.key_secret")
        .read_text()
        .replace(load_pair(clients / "a.key_secret").public.decode(), zmq.curve_keypair()[0].decode())
    )
    (clients / "a.key_secret").write_text(mixed)
    with pytest.raises(ConfigError, match="do not belong together"):
        load_pair(clients / "a.key_secret")


@pytest.mark.parametrize(
    "content",
    [b"", b"curve\n", b'public-key = "short"', b'public-key = "' + b"~" * 40 + b'"', b"\xff\x00" * 100, b"public-key"],
)
def test_a_file_that_holds_no_key_lets_nobody_in_and_shuts_nobody_out(content: bytes, tmp_path: Path) -> None:
    make_keys(tmp_path, ["a"])
    path = tmp_path / "clients" / "bad.key"
    path.write_bytes(content)
    assert list(allowed_clients(tmp_path).values()) == ["a"]
    with pytest.raises(ConfigError, match=r"bad\.key holds no"):
        check_keys(tmp_path)


def test_a_public_file_with_a_secret_in_it_or_open_to_writers_lets_nobody_in(tmp_path: Path) -> None:
    make_keys(tmp_path, ["a", "b", "c"])
    clients = tmp_path / "clients"
    (clients / "a.key").write_text((clients / "a.key_secret").read_text())
    (clients / "b.key").chmod(0o666)
    assert list(allowed_clients(tmp_path).values()) == ["c"]
    with pytest.raises(ConfigError, match=facts("a.key", "public", "secret")):
        load_public(clients / "a.key")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "say either --out DIR"),
        (["--check", "k", "--out", "k"], "say either"),
        (["--check", "k", "--client", "a"], "--client goes with --out"),
    ],
)
def test_the_command_says_what_it_needs(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["keys", *arguments])
    assert result.exit_code == 2
    assert sentence in result.output
