"""An error of the system comes with the advice for that error."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rowcast.protocol.transport import endpoint as doors
from rowcast.protocol.transport.endpoint import is_ipv6
from rowcast.protocol.transport.ring_file import RingFile
from rowcast.runtime.errors import OS_ADVICE, ConfigError
from rowcast.runtime.run_directory import RunDirectory

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
