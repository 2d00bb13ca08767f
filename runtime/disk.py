"""Writes durable files, recognizes files that rowcast wrote, opens files that others may have put there, seals JSON.

Tests record the operations of `Disk` and make them fail.

What survives a power loss, which decides the order of all writes:

    content of a file      writes before its last `sync`
    an entry of a folder   (a file's name, a rename, an unlink) changes before the folder's last `sync_folder`
"""

import errno
import fcntl
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, TypeVar

import msgspec
import xxhash

from rowcast.runtime.errors import ConfigError, DataError, Unreadable, advice

# of an open or a read: something else than the file is there; all other errors are of the host
NOT_THE_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG, errno.EINVAL}
Content = bytes | memoryview
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW  # a link's target is not ours


class FileWrite:
    """A file that is written from its first byte. Every method raises OSError."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, WRITE_FLAGS, 0o666)

    def write(self, content: Content) -> None:
        """Appends all of `content`, or raises."""
        assert self._descriptor is not None, "a closed file is not written"
        rest = memoryview(content).cast("B")
        while len(rest):
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Makes what was written durable. After an error the content is unknown, and the file must be discarded."""
        assert self._descriptor is not None, "a closed file is not synced"
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file without syncing it. Idempotent."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


class Disk:
    """Every method raises OSError."""

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> FileWrite:
        """Creates an empty file; an existing one is replaced."""
        return FileWrite(path)

    def rename(self, source: Path, target: Path) -> None:
        """Moves a file atomically; an existing `target` is replaced."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def rmdir(self, path: Path) -> None:
        """Removes an empty folder."""
        path.rmdir()

    def sync_folder(self, path: Path) -> None:
        """Makes the folder's entries durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_own_file(path: Path, names: re.Pattern[str]) -> bool:
    """Returns whether it is a file with such a name, not a link. True for a file that is gone. Raises OSError."""
    try:
        return names.fullmatch(path.name) is not None and stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True


def own_files_in(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """Lists rowcast's files in a folder; none if the folder is a link or does not exist. Raises OSError."""
    if not folder.is_dir() or folder.is_symlink():
        return []
    return [path for path in sorted(folder.iterdir()) if is_own_file(path, names)]


def partial_of(path: Path) -> Path:
    """Returns a name beside `path` for a file that becomes it once it is whole: no other file has it, nor another
    writer."""
    return path.with_name(f"{path.name}.{token_hex(4)}.partial")


def listed_in(folder: Path) -> list[str]:
    """Returns the names in a folder; none if it does not exist. Raises Unreadable."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error) from None


def unreadable(path: Path, error: OSError) -> Unreadable:
    change = advice(error.errno, "let this user read it")
    return Unreadable(f"{path}: cannot be read ({error.strerror}); {change}")


def try_lock(descriptor: int, path: Path) -> bool:
    """Returns whether this process now holds the lock of an open file, which no other process holds. `path`: in the
    error. Raises ConfigError where nothing can be locked."""
    return flocked(descriptor, path, fcntl.LOCK_EX)


def is_locked(descriptor: int, path: Path) -> bool:
    """Returns whether another process holds the lock of an open file; then close it. Raises as `try_lock`."""
    return not flocked(descriptor, path, fcntl.LOCK_SH)


def flocked(descriptor: int, path: Path, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        change = advice(error.errno, "mount it with locks (of NFS, those of its server), or choose another folder")
        raise ConfigError(f"{path.parent}: no file there can be locked ({error.strerror}); {change}") from None
    return True


def not_a_link(name: str, flags: int) -> int:
    """The `opener` of a file that is written at a place where others may have put a link or a pipe."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError if it is no regular file; never waits for the other end of a pipe."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - the caller closes it
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a regular file", str(path))


class Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small JSON file with a checksum inside, which detects a change of any bit."""

    version: int
    checksum: str = ""  # xxh3_64 of the file with "" here, 16 hex digits; `seal` fills it in


class Versioned(msgspec.Struct):
    version: int


AnySealed = TypeVar("AnySealed", bound=Sealed)


def render(content: Sealed) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1)


def seal(content: AnySealed) -> AnySealed:
    checksum = xxhash.xxh3_64_hexdigest(render(msgspec.structs.replace(content, checksum="")))
    return msgspec.structs.replace(content, checksum=checksum)


def read_sealed(path: Path, kinds: Mapping[int, type[AnySealed]], name: str) -> AnySealed:
    """`kinds`: the type of each version. `name`: the file's name in errors. Raises DataError if it has a different
    version or changed since it was written, and OSError."""
    with open_regular(path) as file:
        content = file.read()
    try:
        found = msgspec.json.decode(content, type=Versioned).version
        if found not in kinds:
            known = " and ".join(map(str, kinds))
            raise DataError(f"{path}: {name} version {found}, but this version reads {known}")
        sealed = msgspec.json.decode(content, type=kinds[found])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not a {name} that this version can read ({error})") from None
    checksum = xxhash.xxh3_64_hexdigest(content.replace(sealed.checksum.encode(), b"", 1))
    if checksum != sealed.checksum:
        raise DataError(
            f"{path}: the {name} has checksum {checksum}, but says {sealed.checksum!r}: "
            "it was changed after it was written"
        )
    return sealed
