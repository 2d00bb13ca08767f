"""Where the processes of a run meet, and what each sees of the other."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rowcast.protocol.messages import Envelope
from rowcast.protocol.session import encode
from rowcast.protocol.transport import endpoint
from rowcast.protocol.transport.endpoint import (
    EndpointLock,
    FileAddress,
    make_private,
    remove_if_dead,
    socket_directory,
    socket_path,
)
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import OtherProcess, at_other_end, stat_of
from tests.support.sample_messages import hello


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


def test_a_directory_that_cannot_be_made_is_refused_with_the_place_and_the_user(tmp_path: Path) -> None:
    (tmp_path / "runtime").write_text("a file in the place of a directory")
    refusal = rf"{tmp_path}/runtime/rowcast, cannot be made \(Not a directory\); let user {os.getuid()} write to "
    with pytest.raises(ConfigError, match=refusal):
        make_private(tmp_path / "runtime" / "rowcast")


def test_a_lock_is_held_once_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REMOVED_WITHIN_S", 0.05)
    path = tmp_path / "a.sock"
    first, second = EndpointLock(path, tmp_path), EndpointLock(path, tmp_path)
    first.acquire()
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    second.release()
    assert list(tmp_path.iterdir()) == []


def bound(path: Path) -> None:
    """As zmq leaves it in a process that is killed."""
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(path))


def test_a_start_removes_the_sockets_of_killed_runs_and_of_no_others(tmp_path: Path) -> None:
    sockets = tmp_path / "sockets"
    make_private(sockets)
    killed, alive = (socket_path(tmp_path / name, sockets) for name in ("killed", "alive"))
    for path in (killed, alive):
        bound(path)
    killed.with_suffix(".lock").write_text("123\n")
    holder = EndpointLock(alive, tmp_path / "alive")
    holder.acquire()
    (sockets / "0123456789abcdef.lock").symlink_to("mine")
    (sockets / "0123456789abcde0.lock").mkdir()
    (sockets / "0123456789abcde1.lock").write_text("123\n")
    (sockets / "0123456789abcde1.sock").write_text("no socket")
    foreign = {"mine": "a", "my.lock": "b", "0123456789ABCDEF.lock": "c", "0123456789abcdef.lock.bak": "d"}
    for name, content in foreign.items():
        (sockets / name).write_text(content)
    server = FileAddress(tmp_path / "new", sockets)
    server.open()
    left = {path.name for path in sockets.iterdir()}
    own = socket_path(tmp_path / "new", sockets)
    ours = {alive.name, alive.with_suffix(".lock").name, own.with_suffix(".lock").name}
    assert left == {
        *foreign, *ours, "0123456789abcdef.lock", "0123456789abcde0.lock", "0123456789abcde1.sock",
    }  # fmt: skip
    server.close()
    holder.release()
    assert not own.with_suffix(".lock").exists()


def test_a_run_whose_dead_lock_is_being_removed_starts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "0123456789abcdef.sock"
    bound(path)
    lock = path.with_suffix(".lock")
    lock.write_text("123\n")
    taken, own = threading.Event(), EndpointLock(path, tmp_path)
    unlink = Path.unlink

    def slowly(found: Path, missing_ok: bool = False) -> None:
        if not taken.is_set():
            taken.set()
            threading.Event().wait(0.1)
        unlink(found, missing_ok)

    monkeypatch.setattr(Path, "unlink", slowly)
    other = threading.Thread(target=remove_if_dead, args=(lock, path))
    other.start()
    assert taken.wait(30)
    own.acquire()
    other.join()
    assert lock.read_text() == f"{os.getpid()}\n", "the lock that it holds is the one that others see"
    assert not path.exists()
    own.release()


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
