"""Where the processes of a run meet."""

import os
from pathlib import Path

import pytest

from rowcast.protocol.transport.endpoint import EndpointLock, make_private, socket_directory, socket_path
from rowcast.runtime.errors import ConfigError


def test_both_processes_find_one_socket_whatever_they_call_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "retail").mkdir(parents=True)
    (tmp_path / "latest").symlink_to("runs/retail")
    monkeypatch.chdir(tmp_path / "runs")
    expected = socket_path(tmp_path / "runs" / "retail")
    assert socket_path(Path("retail")) == socket_path(tmp_path / "latest") == socket_path(Path("../latest")) == expected
    assert socket_path(Path("other")) != expected


def test_sockets_are_kept_in_the_runtime_directory_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallback = Path(f"/tmp/rowcast-{os.getuid()}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert socket_directory() == tmp_path / "rowcast"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert socket_directory() == fallback
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert socket_directory() == fallback
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert socket_directory() == fallback


def test_no_path_is_longer_than_a_socket_may_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="and may have 107"):
        socket_path(tmp_path, Path("/tmp") / ("d" * 90))


def test_the_directory_is_made_for_this_user_alone_and_others_are_refused(tmp_path: Path) -> None:
    make_private(tmp_path / "sockets")
    make_private(tmp_path / "sockets")
    assert (tmp_path / "sockets").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ConfigError, match=r"mode 0700, but .* mode 0755"):
        make_private(tmp_path / "open")
    (tmp_path / "link").symlink_to("sockets")
    with pytest.raises(ConfigError, match="must be a directory of user"):
        make_private(tmp_path / "link")


def test_a_lock_is_held_once_and_leaves_no_file(tmp_path: Path) -> None:
    socket = tmp_path / "a.sock"
    first, second = EndpointLock(socket, tmp_path), EndpointLock(socket, tmp_path)
    first.acquire()
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    second.release()
    assert list(tmp_path.iterdir()) == []
