"""Keeps a group's cold rows in an unnamed file, filled segment by segment.

    file       | segment | segment | ...        64 MiB each, or a 64th of store.disk; reserved before it is used
    segment    | page | page | ...              filled in order; used again after its last row was freed
    page       | checksum | keys | records |    4 KiB or a multiple (segments.py)

Rows are appended to a buffer, which serves reads until its pages are full and written. A row's place is its position
among all rows that fit into the file. Only the tiered store knows which rows are live; the file counts them to know
which segment is empty and which to empty.

    lock          guards                                                    held while
    _tidying      the piece that is being moved                             rows are read, moved and settled
    _writing      the end of what was appended                              the buffer is written to the file
    _lock         the buffer's rows, segments, counters                     memory is copied

A thread takes them in this order; readers take only the last one. The unnamed file disappears with the process, however
it ends. Nothing is synced: no later process reads the file.
"""

import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.cold.segments import (
    CHANGED,
    DONE,
    OTHER_ROW,
    SPARE,
    UNREADABLE,
    WORD_BYTES,
    SegmentPiece,
    Segments,
    column_constants,
    page_layout,
    put_rows,
    read_rows,
    seal,
    take_rows,
    whole_pages,
)
from rowcast.prefetcher.stores.row_loops import Words
from rowcast.prefetcher.stores.store import NOWHERE, Keys, Moved, Places, Records
from rowcast.runtime.arrays import I64, U64
from rowcast.runtime.errors import ConfigError, DataError, RowcastError

SEGMENT_BYTES = 2**26  # at most
SEGMENTS = 64  # at least
BUFFER_BYTES = 2**20
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
CHANCES, OWNER_SECONDS = 100, 0.05
RESTART = "then start again, from the newest checkpoint"


class SegmentFile:
    """Implements `ColdRows`. Created by `open`."""

    def __init__(self, group: GroupSpec, folder: Path, file: IO[bytes], disk_bytes: int, most: int) -> None:
        """See `open`."""
        self._group, self._folder, self._file, self._disk_bytes = group, folder, file, disk_bytes
        page = self._page = page_layout(group.record_bytes)
        pages = min(SEGMENT_BYTES, disk_bytes // SEGMENTS) // page.nbytes
        count = min(disk_bytes // (pages * page.nbytes), most // (pages * page.num_rows))
        self._segments = Segments(count, pages, pages * page.num_rows)
        self.most = count * pages * page.num_rows
        self._constants = column_constants(page.nbytes // 4)
        self._identities: I64 = np.zeros(count, np.int64)  # of the first page of each segment

        self._tidying, self._writing, self._lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._left = threading.Condition(self._lock)  # notified when a hold is left
        self._places_of: Callable[[Keys], Places] | None = None
        self._settle: Callable[[Moved], None] | None = None

        self._num_reserved = 0  # segments with space reserved on disk
        self._segment = 0  # being filled
        self._room = 0  # rows left in it
        self._failure: RowcastError | None = None  # of the buffer's write; it still serves reads
        self._buffer: U64 = np.zeros((max(1, min(BUFFER_BYTES // page.nbytes, pages)), page.num_words), np.uint64)
        self._halves = self._buffer.view(np.int32)
        self._first_page = 0  # of the buffer, in the file
        self._buffer_rows = 0  # that fit into it; fewer at the end of a segment
        self._filled = 0  # rows in it

        self.rows_read = self.rows_written = self.bytes_read = self.bytes_written = 0
        self.read_seconds = 0.0
        self.used_bytes = self.garbage_bytes = 0

    @classmethod
    def open(cls, group: GroupSpec, folder: Path, disk_bytes: int, most: int = NOWHERE - 1) -> "SegmentFile":
        """`disk_bytes`: the file's largest size. `most`: the largest number of places.

        Raises ConfigError if the folder cannot be used, or the disk's bytes are too few."""
        page = page_layout(group.record_bytes)
        if disk_bytes < SEGMENTS * page.nbytes:
            raise ConfigError(
                f"store.disk gives {disk_bytes} bytes to group {group.name}, whose rows of {group.record_bytes} bytes "
                f"need at least {SEGMENTS * page.nbytes}; raise store.disk"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"no file for cold rows can be made in {folder} ({error.strerror}); set store.path to another folder"
            ) from None
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # else reading a page would load its neighbours
        return cls(group, folder, file, disk_bytes, most)

    def attach(self, places_of: Callable[[Keys], Places], settle: Callable[[Moved], None]) -> None:
        self._places_of, self._settle = places_of, settle

    def close(self) -> None:
        self._file.close()

    # readers

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._lock:
            hold = self._segments.enter_hold()
        try:
            yield
        finally:
            with self._left:
                self._segments.leave_hold(hold)
                self._left.notify_all()

    def read(self, keys: Keys, places: Places, out: Records) -> None:
        order: I64 = np.argsort(places)
        ascending = places[order].astype(np.int64)
        with self.hold():
            start, end = self._read_buffer(keys, ascending, order, out.view(np.uint64))
            rest = np.r_[:start, end : len(order)]
            if len(rest):
                self._read_file(keys, ascending[rest], order[rest], out.view(np.uint64))

    def _read_buffer(self, keys: Keys, places: I64, order: I64, out: Words) -> tuple[int, int]:
        """Reads the rows whose places are in the buffer. Returns which of the ascending places these are."""
        rows = self._page.num_rows
        with self._lock:
            self.rows_read += len(keys)
            first = self._first_page * rows
            start, end = np.searchsorted(places, [first, first + self._filled]).tolist()
            own = slice(start, end)
            found = take_rows(self._buffer, rows, places[own] - first, order[own], keys, out)
        if start + found < end:
            raise self._other_row(int(keys[order[start + found]]), int(places[start + found]) // rows)
        return start, end

    def _read_file(self, keys: Keys, places: I64, order: I64, out: Words) -> None:
        page: U64 = np.empty((1, self._page.num_words), np.uint64)
        began, done, num_pages, outcome = time.perf_counter(), 0, 0, UNREADABLE
        while outcome == UNREADABLE:
            outcome, found, found_pages = read_rows(
                self._file.fileno(),
                (self._page.nbytes, self._page.num_rows),
                self._segments.num_pages,
                self._identities,
                self._constants,
                page,
                page.view(np.int32),
                places[done:],
                order[done:],
                keys,
                out,
            )
            done, num_pages = done + found, num_pages + found_pages
            if outcome != DONE:  # returns if the page is readable now, as after a signal on a network file system
                self._check_row(int(places[done]) // self._page.num_rows, int(keys[order[done]]), outcome)
        with self._lock:
            self.bytes_read += num_pages * self._page.nbytes
            self.read_seconds += time.perf_counter() - began

    def _check_row(self, page: int, key: int, outcome: int) -> None:
        if outcome == CHANGED:
            raise self._changed(page, self._group.row_name(key))
        if outcome == OTHER_ROW:
            raise self._other_row(key, page)
        try:
            found = len(os.pread(self._file.fileno(), self._page.nbytes, page * self._page.nbytes))
        except OSError as error:
            raise self._unreadable(page, str(error.strerror), self._group.row_name(key)) from None
        if found < self._page.nbytes:
            reason = f"it has {found} of {self._page.nbytes} bytes"
            raise self._unreadable(page, reason, self._group.row_name(key))

    def free(self, keys: Keys, places: Places) -> None:
        with self._lock:
            self._segments.free(places)
            self._count_garbage()

    def _count_garbage(self) -> None:
        self.garbage_bytes = self._segments.num_garbage * self._group.record_bytes

    # writers

    def write(self, keys: Keys, records: Records) -> Places:
        chances = CHANCES
        while chances:
            with self._writing:
                if self._make_room(len(keys), SPARE):
                    return self._append(keys, records.view(np.uint64))
            if not self._tidy(urgent=True) and not self._wait_for_holds():
                # another thread may have made room, or be about to free rows
                chances = chances - 1 if self._wait_for_owner() else min(chances - 1, 1)
        segments, nbytes = self._segments, self._group.record_bytes
        raise RowcastError(
            f"group {self._group.name} has {segments.num_live + len(keys)} cold rows of {nbytes} bytes, but store.disk "
            f"leaves it {self._disk_bytes} bytes, which hold {(segments.count - SPARE - 1) * segments.num_rows} of "
            "them; raise store.disk or store.memory"
        )

    def _wait_for_owner(self) -> bool:
        """Gives the tiered store time to settle new places and free rows. False if it has nothing left to settle."""
        with self._left:
            if not self._segments.try_again():
                return False
            self._left.wait(OWNER_SECONDS)
            return True

    def _wait_for_holds(self) -> bool:
        """Waits until one more segment is free. False if no hold keeps one from being freed."""
        with self._left:
            num_free = self._segments.num_free()
            if not self._segments.any_held:
                return False
            self._left.wait_for(lambda: self._segments.num_free() > num_free or not self._segments.any_held)
            return True

    def _make_room(self, num_rows: int, spare: int) -> bool:
        """Reserves the segments that `num_rows` more rows begin. False if fewer than `spare` would stay free."""
        if self._failure is not None:
            raise self._failure
        num_new = -(-max(0, num_rows - self._room) // self._segments.num_rows)
        with self._lock:
            if self._segments.num_free() - spare < num_new:
                return False
            following = self._segments.next_free(num_new)
        while following and self._num_reserved <= following[-1]:
            nbytes = self._segments.num_pages * self._page.nbytes
            try:
                reserve(self._file.fileno(), self._num_reserved * nbytes, nbytes)
            except OSError as error:
                raise self._unwritten(error, self._num_reserved * self._segments.num_pages, nbytes) from None
            self._num_reserved += 1
            self.used_bytes += nbytes
        return True

    def _append(self, keys: Keys, words: Words) -> Places:
        """Appends rows; there must be room."""
        places: Places = np.empty(len(keys), np.uint32)
        done = 0
        try:
            while done < len(keys):
                done += self._fill_buffer(keys[done:], words[done:], places[done:])
                if self._filled == self._buffer_rows:
                    self._write_buffer()
        except RowcastError:
            self.free(keys[:done], places[:done])
            raise
        return places

    def _fill_buffer(self, keys: Keys, words: Words, places: Places) -> int:
        """Appends as many rows as fit, and sets their places. Returns how many."""
        with self._lock:
            if self._filled == 0:
                self._begin_buffer()
            count = min(len(keys), self._buffer_rows - self._filled)
            put_rows(self._buffer, self._page.num_rows, self._filled, keys[:count], words[:count])
            first = self._first_page * self._page.num_rows + self._filled
            places[:count] = np.arange(first, first + count)
            self._filled += count
            self._room -= count
            self._segments.add(self._segment, count)
            self.rows_written += count
        return count

    def _begin_buffer(self) -> None:
        segments = self._segments
        if self._room == 0:
            self._segment = segments.begin()
            self._room = segments.num_rows
            self._first_page = self._segment * segments.num_pages
            self._identities[self._segment] = segments.uses[self._segment] * segments.count * segments.num_pages
            self._identities[self._segment] += self._first_page
            self._count_garbage()
        self._buffer_rows = min(len(self._buffer) * self._page.num_rows, self._room)

    def _write_buffer(self) -> None:
        num_pages = self._buffer_rows // self._page.num_rows
        identity = self._identities[self._segment] + self._first_page - self._segment * self._segments.num_pages
        identities = np.arange(identity, identity + num_pages)
        seal(self._buffer[:num_pages], self._halves[:num_pages], self._constants, identities)
        try:
            write_all(self._file.fileno(), self._buffer[:num_pages], self._first_page * self._page.nbytes)
        except OSError as error:
            self._failure = self._unwritten(error, self._first_page, num_pages * self._page.nbytes)
            raise self._failure from None
        with self._lock:
            self.bytes_written += num_pages * self._page.nbytes
            self._first_page += num_pages
            self._filled = 0
            if self._room == 0:
                self._segments.seal(self._segment)
                self._count_garbage()

    # garbage

    def tidy(self) -> bool:
        return self._tidy(urgent=False)

    def _tidy(self, *, urgent: bool) -> bool:
        """Moves the live rows of a piece."""
        with self._tidying, self.hold():
            with self._lock:
                piece = self._segments.next_piece(len(self._buffer), self._room, urgent=urgent)
            if piece is None:
                return False
            assert self._places_of is not None
            assert self._settle is not None
            keys, words, old = self._read_piece(piece)
            live = self._places_of(keys) == old
            if live.any():
                with self._writing:
                    has_room = self._make_room(int(live.sum()), 0)
                    assert has_room, f"{self._name} has no room for the rows of a segment that is tidied"
                    new = self._append(keys[live], words[live])
                self._settle(Moved(keys[live], old[live], new))
            return True

    def _read_piece(self, piece: SegmentPiece) -> tuple[Keys, Words, Places]:
        """Returns all rows of a piece, live or not, and their places."""
        first, rows = piece.segment * self._segments.num_pages + piece.first_page, self._page.num_rows
        pages: U64 = np.empty((piece.num_pages, self._page.num_words), np.uint64)
        try:
            nbytes = os.preadv(self._file.fileno(), [pages.data], first * self._page.nbytes)
        except OSError as error:
            raise self._unreadable(first, str(error.strerror)) from None
        if nbytes < pages.nbytes:
            raise self._unreadable(first + nbytes // self._page.nbytes, "it ends before")
        identity = int(self._identities[piece.segment]) + piece.first_page
        identities = np.arange(identity, identity + piece.num_pages)
        num_whole = whole_pages(pages, pages.view(np.int32), self._constants, identities)
        if num_whole < piece.num_pages:
            raise self._changed(first + num_whole)
        with self._lock:
            self.bytes_read += nbytes
        width = self._group.record_bytes // WORD_BYTES
        keys = pages[:, 1 : 1 + rows].reshape(-1).view(np.int64)
        words = pages[:, 1 + rows : 1 + rows + rows * width].reshape(-1, width)
        return keys, words, np.arange(first * rows, (first + piece.num_pages) * rows, dtype=np.uint32)

    # errors

    @property
    def _name(self) -> str:
        return f"the file of cold rows of group {self._group.name} in {self._folder}"

    def _unwritten(self, error: OSError, page: int, nbytes: int) -> RowcastError:
        if error.errno in NO_SPACE:
            return RowcastError(
                f"{self._name} has no space for {nbytes} more bytes ({error.strerror}); free space there, or have "
                f"that folder on a larger disk (store.path of a job), {RESTART}"
            )
        return DataError(
            f"{self._name} cannot be written at page {page} ({error.strerror}); check that disk or set store.path to "
            f"another one, {RESTART}"
        )

    def _unreadable(self, page: int, reason: str, row: str = "rows") -> DataError:
        return DataError(
            f"{self._name} cannot be read at page {page}, which has {row} ({reason}); check that disk or set "
            f"store.path to another one, {RESTART}"
        )

    def _changed(self, page: int, row: str = "rows") -> DataError:
        return DataError(
            f"page {page} of {self._name}, which has {row}, has other bytes than were written there; check that disk "
            f"and this machine's memory, {RESTART}"
        )

    def _other_row(self, key: int, page: int) -> DataError:
        return DataError(
            f"page {page} of {self._name} has another row where {self._group.row_name(key)} was "
            f"written; check this machine's memory, {RESTART}"
        )


def write_all(descriptor: int, pages: U64, offset: int) -> None:
    """Raises OSError."""
    rest = pages.data.cast("B")
    while len(rest):
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def reserve(descriptor: int, start: int, nbytes: int) -> None:
    """Reserves `nbytes` on the disk for a file, from `start` on. Raises OSError."""
    try:
        os.posix_fallocate(descriptor, start, nbytes)
    except OSError as error:
        if error.errno not in NO_FALLOCATE:
            raise
        os.ftruncate(descriptor, start + nbytes)
