"""Keeps the line counts of text files between starts, so that only the first start reads whole files to count them.

    <run_dir>/lines/<xxh3_64 of the data file's path>.json    `Counted`, and its checksum before it

Each data file has one, so that only new files of a growing folder are read. An index that does not match its data file
exactly is recomputed. The counting process holds a lock; waiting processes read its counts.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import xxhash

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.data_files import is_gzip
from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.errors import ConfigError

VERSION = 1
CHECKSUM_BYTES = 16  # xxh3_64 as hex digits
MAX_KEPT_BYTES = 2**28  # far more than the counts of a file of 10 TB
LONGEST_WAIT_S = 1800.0  # for a different process's count; a terabyte takes 10 minutes

Pieces = list[tuple[int, int]]  # (lines, bytes uncompressed) of each piece of a file, in order


class Counted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    path: str  # absolute
    nbytes: int  # of the file on the disk
    mtime_ns: int
    pieces: Pieces


def lines_folder(job: Job) -> Path | None:
    return job.run_dir / "lines" if job.run_dir.is_dir() else None


def kept_pieces(paths: list[Path], folder: Path, count: Callable[[Path], Pieces], max_piece_bytes: int) -> list[Pieces]:
    """Returns each file's counts: those kept in `folder`, or else `count(path)`, which it then keeps. Ignores a folder
    that it cannot write to. Raises what `count` raises.
    """
    found = [load_pieces(path, folder, max_piece_bytes) for path in paths]
    if any(pieces is None for pieces in found):
        with counting_lock(folder):  # another process may count them meanwhile
            found = [
                load_pieces(path, folder, max_piece_bytes) or count_and_keep(path, folder, count) for path in paths
            ]
    return [pieces for pieces in found if pieces is not None]


def count_and_keep(path: Path, folder: Path, count: Callable[[Path], Pieces]) -> Pieces:
    before, pieces = file_state(path), count(path)
    nbytes, mtime_ns = file_state(path)
    if before == (nbytes, mtime_ns):
        counted = Counted(version=VERSION, path=path_text(path), nbytes=nbytes, mtime_ns=mtime_ns, pieces=pieces)
        content = msgspec.json.encode(counted)
        with suppress(OSError):
            write_durably(kept_file(path, folder), checksum(content) + content)
    return pieces


def load_pieces(path: Path, folder: Path, max_piece_bytes: int) -> Pieces | None:
    try:
        with kept_file(path, folder).open("rb") as file:
            found, content = file.read(CHECKSUM_BYTES), file.read(MAX_KEPT_BYTES)
        kept = msgspec.json.decode(content, type=Counted)
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    fits = (kept.version, kept.path, (kept.nbytes, kept.mtime_ns)) == (VERSION, path_text(path), file_state(path))
    whole = found == checksum(content)
    possible = all(1 <= num_lines <= nbytes <= max_piece_bytes for num_lines, nbytes in kept.pieces)
    if not (fits and whole and possible and kept.pieces):
        return None
    complete = sum(nbytes for _, nbytes in kept.pieces) == kept.nbytes or is_gzip(path)
    return kept.pieces if complete else None


def forget(path: Path, folder: Path) -> None:
    """Drops the counts of a file that changed with the same size and time."""
    with suppress(OSError):
        kept_file(path, folder).unlink(missing_ok=True)


def file_state(path: Path) -> tuple[int, int]:
    try:
        now = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    return now.st_size, now.st_mtime_ns


def path_text(path: Path) -> str:
    """Returns the absolute path in characters that JSON can hold."""
    return os.fsencode(os.path.abspath(path)).decode("utf-8", "replace")


def kept_file(path: Path, folder: Path) -> Path:
    return folder / f"{xxhash.xxh3_64_hexdigest(os.fsencode(os.path.abspath(path)))}.json"


def checksum(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode()


@contextmanager
def counting_lock(folder: Path) -> Iterator[None]:
    """Locks counting for this folder. Continues without a lock if the folder is not writable or the holder seems to be
    stopped.
    """
    lock = None
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        wait_for_lock(lock)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def wait_for_lock(lock: int) -> None:
    until_s = time.monotonic() + LONGEST_WAIT_S
    while not try_lock(lock) and time.monotonic() < until_s:
        time.sleep(0.05)


def try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
