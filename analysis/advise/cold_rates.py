"""Measures a cold tier: how many random 4 KiB pages per second a disk reads, or how long Redis servers take for a row.

Disk: a scratch file of random bytes is written and read by several threads at a time, each page once, past the page
cache. It has no name, so a kill leaves nothing behind. A disk of a virtual machine may still be served from its host's
memory.

Servers: rows of a trial are written beside those of any run and deleted again. The calls are those of the staging
thread: one after the other, each with as many rows as a run brings at once.
"""

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.cold.cold_rows import ColdRows
from rowcast.prefetcher.stores.redis_store import trial_rows
from rowcast.prefetcher.stores.tiered_store import AT_ONCE_BYTES
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError, RowcastError

PAGE_BYTES = 4096
FILE_BYTES = 2**28
WRITTEN_AT_ONCE = 2**22
READERS = 16
MOST_SECONDS = 1.5  # for reading a disk, or for all groups of servers
IN_MEMORY = ("tmpfs", "ramfs")

MOST_ROWS = 10_000  # a call
ROUND_TRIPS = 20


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
        if direct is None:
            return DiskRate(
                folder=str(place),
                pages_s=None,
                why_not=f"{place} cannot be read past the page cache ({file_system(place)})",
            )
        return DiskRate(folder=str(place), pages_s=pages_a_second(direct, pages))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRate:
    servers: tuple[str, ...]
    rows_a_call: int
    row_us: tuple[float, ...] | None  # microseconds per row read and written, by group; None: `why_not` says why
    round_trip_ms: float | None = None  # what a call for one row takes
    why_not: str | None = None


def server_rate(job: Job, groups: Sequence[GroupSpec]) -> ServerRate:
    """Measures for less than 3 s."""
    row_us: list[float] = []
    servers: tuple[str, ...] = ()
    trip_ms, count = 0.0, 0
    try:
        for group in groups:
            with trial_rows(job, group) as rows:
                servers = tuple(rows.server_names)
                count = min(MOST_ROWS, max(1, AT_ONCE_BYTES // group.record_bytes))
                row_us.append(1e6 / count * median_call_s(rows, group, count, MOST_SECONDS / len(groups)))
                trip_ms = 1e3 * statistics.median(call_s(rows, group, 1)[0] for _ in range(ROUND_TRIPS))
    except RowcastError as error:
        return ServerRate(servers=servers, rows_a_call=count, row_us=None, why_not=str(error))
    return ServerRate(servers=servers, rows_a_call=count, row_us=tuple(row_us), round_trip_ms=trip_ms)


def median_call_s(rows: ColdRows, group: GroupSpec, count: int, seconds: float) -> float:
    """The median time of one call, over reads, writes and deletions of `count` rows."""
    found: list[float] = []
    end_s = time.perf_counter() + seconds
    while not found or time.perf_counter() < end_s:
        found.append(sum(call_s(rows, group, count)))
    return statistics.median(found)


def call_s(rows: ColdRows, group: GroupSpec, count: int) -> tuple[float, float]:
    """Returns the seconds of a read, and of a write and the deletion of the old copies."""
    keys = np.arange(count, dtype=np.int64)
    records = np.random.default_rng(0).integers(0, 256, (count, group.record_bytes), np.uint8)
    began_s = time.perf_counter()
    places = rows.write(keys, records)
    middle_s = time.perf_counter()
    rows.read(keys, places, records)
    read_s = time.perf_counter() - middle_s
    rows.free(keys, places)
    rows.tidy()
    return read_s, time.perf_counter() - began_s - read_s
