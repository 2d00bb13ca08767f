"""Ring files: refused before they take memory, with advice for each error of the system, and never left behind."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rowcast.protocol.transport import endpoint as doors
from rowcast.protocol.transport import ring_file
from rowcast.protocol.transport.endpoint import is_ipv6
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.protocol.transport.ring_file import RingFile, in_memory_buffer, remove_leftovers
from rowcast.runtime.disk import try_lock
from rowcast.runtime.errors import OS_ADVICE, ConfigError
from rowcast.runtime.run_directory import RunDirectory
from tests.support.facts import facts

NBYTES = 64 * 1024
OWNER = """
import sys
from pathlib import Path
from rowcast.protocol.transport.ring_file import RingFile
ring = RingFile.create(65536, "test", Path(sys.argv[1]))
if sys.argv[2] == "unlink":
    Path(ring.path).unlink()
print(ring.path, flush=True)
sys.stdin.read()
"""


def start_owner(directory: Path, mode: str) -> tuple["subprocess.Popen[str]", Path]:
    """A process that creates a ring and lives until it is killed."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_both_sides_map_the_same_bytes(tmp_path: Path) -> None:
    with closing(RingFile.create(NBYTES, "test", tmp_path)) as owner:
        peer = RingFile.attach(owner.path, NBYTES)
        assert Path(owner.path).stat().st_mode & 0o777 == 0o600
        Path(owner.path).unlink()
        assert list(tmp_path.iterdir()) == []
        writer, reader = RingWriter(owner.buffer), RingReader(peer.buffer)
        piece = writer.try_allocate(100)
        assert piece is not None
        piece.payload[:] = 9
        payload = reader.view(writer.commit(piece, 1, checksum=True), 1)
        peer.close()
        assert payload.tolist() == [9] * 100  # a mapping lives as long as its views


def test_buffers_are_page_aligned_and_have_exactly_the_bytes_asked_for(tmp_path: Path) -> None:
    with closing(RingFile.create(NBYTES + 100, "test", tmp_path)) as ring:
        assert len(ring.buffer) == NBYTES + 100
        assert ring.buffer.ctypes.data % os.sysconf("SC_PAGESIZE") == 0
        assert Path(ring.path).stat().st_blocks * 512 >= NBYTES + 100  # allocated, not sparse
    assert in_memory_buffer(100).ctypes.data % os.sysconf("SC_PAGESIZE") == 0


def test_the_default_directory_is_shared_memory() -> None:
    with closing(RingFile.create(NBYTES, "test")) as ring:
        assert ring.path.startswith("/dev/shm/rowcast-test-")
    assert not Path(ring.path).exists()


def test_a_full_shared_memory_is_refused_with_what_is_needed_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_file, "free_shared_memory", lambda directory: 8 * 2**20)
    with pytest.raises(ConfigError, match=facts("fetch ring", 8388609, 8388608, 'transport.ring = "2MiB"')):
        RingFile.create(8 * 2**20 + 1, "fetch", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_ring_that_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be opened .* one /dev/shm"):
        RingFile.attach(str(tmp_path / "rowcast-none"), NBYTES)


def test_a_ring_of_another_size_is_refused_with_both_sizes(tmp_path: Path) -> None:
    with (
        closing(RingFile.create(NBYTES, "test", tmp_path)) as ring,
        pytest.raises(ConfigError, match=f"{NBYTES} bytes .* {NBYTES * 2} bytes"),
    ):
        RingFile.attach(ring.path, NBYTES * 2)


def test_a_link_to_a_ring_is_refused(tmp_path: Path) -> None:
    with closing(RingFile.create(NBYTES, "test", tmp_path)) as ring:
        link = tmp_path / "link"
        link.symlink_to(ring.path)
        with pytest.raises(ConfigError, match="cannot be opened"):
            RingFile.attach(str(link), NBYTES)


def test_leftovers_are_removed_and_rings_of_living_processes_kept(tmp_path: Path) -> None:
    killed, left = start_owner(tmp_path, "keep")
    living, kept = start_owner(tmp_path, "keep")
    kill(killed)
    (tmp_path / "other").touch()
    (tmp_path / "rowcast-link-1-00000000").symlink_to("other")
    (tmp_path / "rowcast-backup.tar").touch()
    try:
        with closing(RingFile.create(NBYTES, "mine", tmp_path)) as mine:
            assert remove_leftovers(tmp_path) == [left]
            assert {path.name for path in tmp_path.iterdir()} == {
                kept.name,
                Path(mine.path).name,
                "other",
                "rowcast-link-1-00000000",
                "rowcast-backup.tar",
            }
    finally:
        kill(living)
    assert remove_leftovers(tmp_path) == [kept]


def test_a_ring_closed_while_its_views_live_no_longer_counts_as_owned(tmp_path: Path) -> None:
    ring = RingFile.create(NBYTES, "test", tmp_path)
    copy = tmp_path / "rowcast-copy-1-00000000"
    os.link(ring.path, copy)
    view = ring.buffer[:10]
    assert remove_leftovers(tmp_path) == []
    ring.close()
    assert remove_leftovers(tmp_path) == [copy]
    assert view.tolist() == [0] * 10


def test_a_ring_taken_for_a_leftover_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Path] = []
    lock = try_lock

    def lock_late(descriptor: int, path: Path) -> bool:
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].unlink()
        return lock(descriptor, path)

    monkeypatch.setattr(ring_file, "try_lock", lock_late)
    with closing(RingFile.create(NBYTES, "test", tmp_path)) as ring:
        assert taken
        assert list(tmp_path.iterdir()) == [Path(ring.path)]


def test_a_kill_after_both_sides_attached_leaves_nothing(tmp_path: Path) -> None:
    owner, path = start_owner(tmp_path, "unlink")
    kill(owner)
    assert path.name.startswith("rowcast-test-")
    assert list(tmp_path.iterdir()) == []


ADVICE = {
    errno.EMFILE: "raise the limit of open files",
    errno.ENFILE: "file handle",
    errno.ENOMEM: "free memory",
    errno.EROFS: "read-only",
    errno.EACCES: "writable for this user|choose another|as one user",
}


OPENED: dict[str, Callable[[Path], object]] = {
    "a new ring": lambda folder: RingFile.create(4096, "fetch", folder),
    "a ring's memory": lambda folder: RingFile.create(4096, "fetch", folder),
    "the peer's ring": lambda folder: RingFile.attach(str(folder / "ring"), 4096),
    "the run directory": lambda folder: RunDirectory(folder, "trainer").__enter__(),
}


@pytest.mark.parametrize("number", ADVICE)
@pytest.mark.parametrize("what", OPENED)
def test_each_error_of_opening_has_its_advice(
    what: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate" if what == "a ring's memory" else "open", fail)
    with pytest.raises(ConfigError, match=ADVICE[number]):
        OPENED[what](tmp_path)


def test_a_full_file_system_is_told_as_the_size_of_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(ConfigError, match="needs 4096 bytes"):
        RingFile.create(4096, "fetch", tmp_path)
    assert errno.ENOSPC in OS_ADVICE
    assert list(tmp_path.iterdir()) == []


ONLY_6 = [(socket.AF_INET6, 0, 0, "", ("::1", 1, 0, 0))]
BOTH = [(socket.AF_INET, 0, 0, "", ("127.0.0.1", 1)), *ONLY_6]


@pytest.mark.parametrize(
    ("endpoint", "found", "expected"),
    [
        ("tcp://[::1]:5555", BOTH, True),
        ("tcp://six:5555", ONLY_6, True),
        ("tcp://both:5555", BOTH, False),
        ("tcp://127.0.0.1:5555", BOTH[:1], False),
        ("tcp://not-yet:5555", None, False),
    ],
)
def test_a_name_with_only_an_ipv6_address_is_used_by_ipv6(
    endpoint: str, found: list[object] | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, port: str, **_: object) -> list[object]:
        if found is None:
            raise socket.gaierror
        return found

    monkeypatch.setattr(doors, "getaddrinfo", resolve)
    assert is_ipv6(endpoint) == expected
