"""Writes durable files, opens and samples files that others may have put there, and loads only safe files.

Tests record the operations of `Disk` and make them fail.

What survives a power loss, which decides the order of all writes:

    content of a file      writes before its last `sync`
    an entry of a folder   (a file's name, a rename, an unlink) changes before the folder's last `sync_folder`

Samples show that a large file has other contents of the same size. Checkpoints keep the checksums, so this rule must
never change. It depends only on a file's size and two numbers:

    where blocks begin   the first at the start of the file, the last where it ends with the file, the others evenly
                         between; a file no longer than its blocks together is read whole
    checksum             xxh3_64 of the blocks, in order

Compiled code runs when it is loaded. It is safe if no other user could have written it:

    owner            this user or root
    others           may not write
    its group        may write only if it is ours alone: named as we are (or root) and without other members, or
                     without a name here, as that of a Kubernetes volume with fsGroup
"""

import atexit
import errno
import fcntl
import getpass
import grp
import os
import pwd
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
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
        """Flushes all writes to disk (fsync). After an error the content is unknown, and the file must be discarded."""
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
        version = msgspec.json.decode(content, type=Versioned).version
        if version not in kinds:
            known = " and ".join(map(str, kinds))
            raise DataError(f"{path}: {name} version {version}, but this version reads {known}")
        sealed = msgspec.json.decode(content, type=kinds[version])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not a {name} that this version can read ({error})") from None
    checksum = xxhash.xxh3_64_hexdigest(content.replace(sealed.checksum.encode(), b"", 1))
    if checksum != sealed.checksum:
        raise DataError(
            f"{path}: the {name} has checksum {checksum}, but says {sealed.checksum!r}: "
            "it was changed after it was written"
        )
    return sealed


CHECKSUM = re.compile(r"[0-9a-f]{16}")  # of xxh3_64, as files name it


def sampled_file(path: Path, num_blocks: int, block_bytes: int) -> tuple[int, str]:
    """Returns its size and the checksum of its sample, 16 hex digits. Raises OSError."""
    hasher = xxhash.xxh3_64()
    with open_regular(path) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # else the kernel reads far beyond each block
        nbytes = os.fstat(file.fileno()).st_size
        for start, stop in blocks(nbytes, num_blocks, block_bytes):
            hasher.update(os.pread(file.fileno(), stop - start, start))
    return nbytes, hasher.hexdigest()


def blocks(nbytes: int, num_blocks: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each, in bytes."""
    if nbytes <= num_blocks * block_bytes:
        yield 0, nbytes
        return
    for index in range(num_blocks):
        start = (nbytes - block_bytes) * index // (num_blocks - 1)
        yield start, start + block_bytes


FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def why_unsafe(status: os.stat_result) -> str:
    """Returns which other user could have written a file or folder, or ""."""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "every user may write there"
    if status.st_mode & stat.S_IWGRP and not is_private(status.st_gid):
        return f"group {status.st_gid} may write there"
    return ""


@cache
def is_private(group: int) -> bool:
    ours = {user.pw_name for user in pwd.getpwall() if user.pw_uid in (0, os.geteuid())}
    try:
        entry = grp.getgrgid(group)
    except KeyError:
        return True
    others = {user.pw_name for user in pwd.getpwall() if user.pw_gid == group} | {*entry.gr_mem}
    return entry.gr_name in ours and others <= ours


@contextmanager
def opened_safely(path: str) -> Iterator[str]:
    """Yields a name of the open file: what stands at `path` may change meanwhile. Raises OSError, and PermissionError
    if another user could have written it or its folder."""
    with ExitStack() as stack:
        folder = os.open(os.path.dirname(path), FOLDER)
        stack.callback(os.close, folder)
        file = os.open(os.path.basename(path), FILE, dir_fd=folder)
        stack.callback(os.close, file)
        for place, descriptor in ((os.path.dirname(path), folder), (path, file)):
            if why := why_unsafe(os.fstat(descriptor)):
                raise PermissionError(errno.EPERM, why, place)
        yield f"/proc/self/fd/{file}"


def unsafe_below(folder: Path) -> str:
    """Returns a place in the folder that another user could have written and why, or ""."""
    for place, _, names in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in names)):
            status = os.lstat(path)
            if why := ("it is a link" if stat.S_ISLNK(status.st_mode) else why_unsafe(status)):
                return f"{path}: {why}"
    return ""


def use_safe_caches() -> None:
    """Lets Triton and torch.compile, which load what lies in their cache folders, use new ones in place of folders that
    another user could have written, and says so."""
    folders = {
        "TRITON_CACHE_DIR": os.path.join(os.environ.get("TRITON_HOME", "~"), ".triton", "cache"),
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"),
    }
    for name, usual in folders.items():
        if why := unsafe_below(Path(os.environ.get(name) or usual).expanduser()):
            os.environ[name] = tempfile.mkdtemp(prefix="rowcast-")
            atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
            sys.stderr.write(
                f"rowcast: compiled kernels are not loaded, but compiled: {why}; set {name} to a folder of your own\n"
            )  # a reader of versions has no structlog
