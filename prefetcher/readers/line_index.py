"""How many lines each piece of a text file has, kept between starts, so that only the first one reads the whole file to count them.

    <run_dir>/lines/<xxh3_64 of the data file's path>.json    `Counted`, and its checksum before it

One file a data file, so that of a folder that grows only new files are read. Whatever is not exactly what was written for the data file
as it is now is made again. The process that counts holds a lock, and those that wait for it read what it has kept.
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
from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.errors import ConfigError

VERSION = 1
CHECKSUM_BYTES = 16  # of xxh3_64, as hex digits
MAX_KEPT_BYTES = 2**28  # far more than those of a file of 10 TB
LONGEST_WAIT_S = 1800.0  # for another process to count; a terabyte takes 10 minutes

Pieces = list[tuple[int, int]]  # (lines, bytes uncompressed) of each piece of a file, in order


class Counted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    path: str  # absolute
    nbytes: int  # of the file, as it lies on the disk
    mtime_ns: int
    pieces: Pieces


def lines_folder(job: Job) -> Path | None:
    """Where the counts of the job's data files are kept; None before there is a run directory, which only a run makes."""
    return job.run_dir / "lines" if job.run_dir.is_dir() else None


def kept_pieces(paths: list[Path], folder: Path, count: Callable[[Path], Pieces], max_piece_bytes: int) -> list[Pieces]:
    """Of each file: what is kept of it in `folder`, or else `count(path)`, which is then kept. A folder that cannot be written does no
    harm. Raises what `count` raises.
    """
    found = [load_pieces(path, folder, max_piece_bytes) for path in paths]
    if any(pieces is None for pieces in found):
        with alone(folder):  # another process may have counted them meanwhile
            found = [
                load_pieces(path, folder, max_piece_bytes) or count_and_keep(path, folder, count) for path in paths
            ]
    return [pieces for pieces in found if pieces is not None]


def count_and_keep(path: Path, folder: Path, count: Callable[[Path], Pieces]) -> Pieces:
    before, pieces = state_of(path), count(path)
    nbytes, mtime_ns = state_of(path)
    if before == (nbytes, mtime_ns):
        counted = Counted(version=VERSION, path=name_of(path), nbytes=nbytes, mtime_ns=mtime_ns, pieces=pieces)
        content = msgspec.json.encode(counted)
        with suppress(OSError):
            write_durably(kept_file(path, folder), checksum(content) + content)
    return pieces


def load_pieces(path: Path, folder: Path, max_piece_bytes: int) -> Pieces | None:
    """What is kept of the file as it is now, or None."""
    try:
        with kept_file(path, folder).open("rb") as file:
            found, content = file.read(CHECKSUM_BYTES), file.read(MAX_KEPT_BYTES)
        kept = msgspec.json.decode(content, type=Counted)
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    fits = (kept.version, kept.path, (kept.nbytes, kept.mtime_ns)) == (VERSION, name_of(path), state_of(path))
    whole = found == checksum(content)
    possible = all(1 <= num_lines <= nbytes <= max_piece_bytes for num_lines, nbytes in kept.pieces)
    complete = path.suffix == ".gz" or sum(nbytes for _, nbytes in kept.pieces) == kept.nbytes
    return kept.pieces if fits and whole and possible and complete and kept.pieces else None


def forget(path: Path, folder: Path) -> None:
    """For a file that is not what was kept of it, although its size and time are."""
    with suppress(OSError):
        kept_file(path, folder).unlink(missing_ok=True)


def state_of(path: Path) -> tuple[int, int]:
    """(bytes, ns of its last change)"""
    try:
        now = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    return now.st_size, now.st_mtime_ns


def name_of(path: Path) -> str:
    """The absolute path, in characters that JSON can hold."""
    return os.fsencode(os.path.abspath(path)).decode("utf-8", "replace")


def kept_file(path: Path, folder: Path) -> Path:
    return folder / f"{xxhash.xxh3_64_hexdigest(os.fsencode(os.path.abspath(path)))}.json"


def checksum(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While no other process counts for this folder. Without a lock where the folder cannot be written, or where the one who holds it was
    stopped.
    """
    lock = None
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        wait_for(lock)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def wait_for(lock: int) -> None:
    until_s = time.monotonic() + LONGEST_WAIT_S
    while not taken(lock) and time.monotonic() < until_s:
        time.sleep(0.05)


def taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
