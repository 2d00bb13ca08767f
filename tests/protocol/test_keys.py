"""`prefetcher keys`: what it makes can be used, by its owner alone; what it finds wrong is said in one sentence."""

import os
import stat
from pathlib import Path

import pytest
import zmq
from typer.testing import CliRunner

from rowcast.command_line.prefetcher import app
from rowcast.prefetcher.run.make_keys import check_keys, make_keys
from rowcast.protocol.transport.callers import (
    allowed_clients,
    fingerprint,
    load_client,
    load_pair,
    load_public,
    load_server,
)
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts

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
