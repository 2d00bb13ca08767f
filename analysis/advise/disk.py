"""Measures how many random 4 KiB pages per second a disk reads, bypassing the page cache.

A scratch file of random bytes is written and read by several threads at a time, each page once. It has no name, so a
kill leaves nothing behind. A disk of a virtual machine may still be served from its host's memory.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError

PAGE_BYTES = 4096
FILE_BYTES = 2**28
WRITTEN_AT_ONCE = 2**22
READERS = 16
MOST_SECONDS = 1.5  # for reading
IN_MEMORY = ("tmpfs", "ramfs")
CACHED = 0.5  # if a larger share of the pages needs no disk, the page cache still has the file


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRate:
    folder: str  # that exists: store.path, or the nearest one above it
    pages_s: float | None  # random 4 KiB pages per second; None: `why_not` has the reason
    why_not: str | None = None


def disk_rate(folder: Path, nbytes: int = FILE_BYTES) -> DiskRate:
    """Measures for about 2 s. `nbytes`: of the scratch file. Raises ConfigError if the folder's disk has no room for it
    or cannot be written."""
    place = next(part for part in (folder, *folder.absolute().parents) if part.is_dir())
    kind = file_system(place)
    if kind in IN_MEMORY:
        return DiskRate(folder=str(place), pages_s=None, why_not=f"{place} lies in memory ({kind})")
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            write(file.fileno(), nbytes)
            return measured(place, file.fileno(), nbytes // PAGE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"the disk of {place} cannot be measured with a file of {nbytes >> 20} MiB ({error.strerror}); "
            "free space there or set another store.path"
        ) from None


def file_system(folder: Path) -> str:
    """`ext4`, for example; an empty text if the kernel does not say."""
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == name:
            return after.split()[0]
    return ""


def write(descriptor: int, nbytes: int) -> None:
    block = np.random.default_rng(0).bytes(WRITTEN_AT_ONCE)  # not zeros, which a disk may not store
    for start in range(0, nbytes, WRITTEN_AT_ONCE):
        os.pwrite(descriptor, block[: nbytes - start], start)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def measured(place: Path, descriptor: int, num_pages: int) -> DiskRate:
    pages = np.random.default_rng(1).permutation(num_pages)
    direct = past_the_cache(descriptor)
    try:
        if direct is None and cached_share(descriptor, pages[:256]) > CACHED:
            return DiskRate(
                folder=str(place),
                pages_s=None,
                why_not=f"{place} cannot be read past the page cache ({file_system(place)})",
            )
        return DiskRate(folder=str(place), pages_s=pages_a_second(descriptor if direct is None else direct, pages))
    finally:
        if direct is not None:
            os.close(direct)


def past_the_cache(descriptor: int) -> int | None:
    """Opens the same file again, so that reads bypass the page cache; None if its file system cannot do that."""
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        os.preadv(direct, [mmap.mmap(-1, PAGE_BYTES)], 0)
    except OSError:
        os.close(direct)
        return None
    return direct


def cached_share(descriptor: int, pages: I64) -> float:
    """Measures the share of these pages that are read without the disk."""
    buffer, found = mmap.mmap(-1, PAGE_BYTES), 0
    for page in pages.tolist():
        try:
            found += os.preadv(descriptor, [buffer], page * PAGE_BYTES, os.RWF_NOWAIT) == PAGE_BYTES
        except BlockingIOError:
            continue
        except OSError:  # this file system cannot say
            return 1.0
    return found / len(pages)


def pages_a_second(descriptor: int, pages: I64) -> float:
    ends_s = time.perf_counter() + MOST_SECONDS
    began_s = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        counts = readers.map(lambda own: read_until(descriptor, own.tolist(), ends_s), np.array_split(pages, READERS))
        total = sum(counts)
    return total / (time.perf_counter() - began_s)


def read_until(descriptor: int, pages: Sequence[int], ends_s: float) -> int:
    """Reads pages in this order until all are read or the time is over; returns how many."""
    buffer = [mmap.mmap(-1, PAGE_BYTES)]  # aligned to a page, as direct reads must be
    for number, page in enumerate(pages):
        os.preadv(descriptor, buffer, page * PAGE_BYTES)
        if time.perf_counter() > ends_s:
            return number + 1
    return len(pages)
