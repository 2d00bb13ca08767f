"""Turns text files into typed columns once, and keeps them as Arrow files, which later starts map.

    <copies>/<name>-<xxh3_64 of path and rules>.arrow    record batches of typed columns (`arrow_rows.py`)
    ...                                         .json    `Made`: source bytes, conversion rules, checksums
    ...                                         .lock    held by the process that makes it; others wait

A source of the recorded size, times and inode is taken to be the same. If one differs, all its bytes are hashed,
and the copy stays if the hash is the recorded one. A copy that is torn, damaged or of other rules is made again: the
whole file is covered by checksums, that of a record batch is verified when a process first uses it. Nothing is removed
but what a dead process has left unfinished.

Lets one process make files in a folder while others wait for them.
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from rowcast.job.schema import Job, digest
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.readers.columns import FileRows, Ids
from rowcast.prefetcher.readers.data_files import FileState, cumulative, file_state, no_rows
from rowcast.prefetcher.readers.id_check import Location, decoding, line_location
from rowcast.prefetcher.readers.mapped_files import MappedFile
from rowcast.prefetcher.readers.text_files import CHUNK_BYTES, HashingReader, open_hashed, pieces, text_of
from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.disk import Disk, FileWrite, Sealed, own_files_in, partial_of, read_sealed, render, seal, try_lock
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.telemetry.format_numbers import human_bytes
from rowcast.runtime.telemetry.logs import get_logger, said_if_slow

LONGEST_WAIT_S = 1800.0  # without a change of the files that the holder makes


@contextmanager
def folder_lock(lock: Path, made: str) -> Iterator[None]:
    """Holds the lock file `lock`. Continues without it if the folder cannot be locked, or if the holder seems to be
    stopped: for so long no file that matches `made` has grown beside it."""
    descriptor = None
    with suppress(OSError, ConfigError):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        wait_for_lock(descriptor, lock, made)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def wait_for_lock(descriptor: int, lock: Path, made: str) -> None:
    seen, until_s = -1, 0.0
    while not try_lock(descriptor, lock):
        now = sum(own.stat().st_size for own in lock.parent.glob(made) if own.exists())
        if now != seen:
            seen, until_s = now, time.monotonic() + LONGEST_WAIT_S
        if time.monotonic() > until_s:
            return
        time.sleep(0.05)


VERSION = 1
EVERY_S = 5.0  # between lines of the log
LEAST_LIMIT, MOST_GROWTH = 2**30, 100  # data.copies_limit = "auto"


class Made(Sealed, frozen=True, kw_only=True):
    rules: str  # conversion rules and the path of the source
    state: FileState
    digest: str  # of the source's bytes, xxh3_128
    num_rows: list[int]  # of each record batch
    by_line: bool = True  # each line is a row
    bounds: list[int]  # bytes of the copy: 0, the first record batch, ..., the end of the last, the end
    checksums: list[str]  # of the bytes between two bounds, xxh3_64


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRules:
    """How lines become typed columns."""

    known: object  # all that the columns depend on, as JSON
    header_lines: int  # of each file, before its rows
    # of a file and its text: pyarrow.RecordBatches, and the number of lines of each
    columns: Callable[[Path, IO[bytes]], Iterator[tuple[Any, int]]]
    place: Callable[[Path, int], str]  # names a row, from 0, of a file that has a row in several lines


def each_a_line(path: Path, row: int) -> str:
    raise AssertionError(f"{path}: row {row} has a line of its own")


def batches_of_lines(
    columns: Callable[[bytes, int, Location], Any], path: Path, stream: IO[bytes]
) -> Iterator[tuple[Any, int]]:
    """`columns`: whole lines, their number and places -> a pyarrow.RecordBatch with a row for each."""
    for first, num_lines, text in pieces(stream, path, 0):
        location = line_location(path, first)
        with decoding(location, num_lines):
            batch = columns(text, num_lines, location)
        yield batch, num_lines


def copies_limit(job: Job, source: Path) -> int:
    """Returns the most bytes of a file's columns. Raises ConfigError."""
    given = job.data.copies_limit
    return max(LEAST_LIMIT, MOST_GROWTH * file_state(source).nbytes) if given == "auto" else parse_bytes(given)


class CopiedFiles:
    """Text files as typed columns; files without rows are left out."""

    def __init__(self, job: Job, paths: Sequence[Path], rules: TextRules) -> None:
        """Makes the copies that are missing. Raises what reading the text raises, DataError if no file has rows, and
        ConfigError if a copy cannot be written."""
        folder = job.run_dir.parent / "columns" if job.data.copies is None else Path(job.data.copies)
        every = [Copy(path, folder, rules, copies_limit(job, path)) for path in paths]
        missing = [copy for copy in every if not copy.find()]
        progress = Progress(sum(file_state(copy.source).nbytes for copy in missing))
        for copy in missing:
            copy.make(progress)
        self._copies = [copy for copy in every if sum(copy.made.num_rows)]
        if not self._copies:
            raise no_rows(paths)
        self._rules, self.paths = rules, [copy.source for copy in self._copies]
        self._batch_bounds = [np.array(cumulative(copy.made.num_rows)) for copy in self._copies]
        self.bounds = np.array(cumulative([int(own[-1]) for own in self._batch_bounds]), np.int64)

    def cursor(self, names: Sequence[str]) -> "CopyCursor":
        return CopyCursor(self, names)

    def take(self, rows: FileRows, names: Sequence[str]) -> Any:
        return self._copies[rows.file].take(rows.rows, self._batch_bounds[rows.file], names)

    def location(self, rows: FileRows) -> Location:
        path, first = self.paths[rows.file], self._rules.header_lines + 1
        if not self._copies[rows.file].made.by_line:
            return lambda i: self._rules.place(path, int(rows.rows[i]))
        return lambda i: f"{path}, line {rows.rows[i] + first}"


class Takes(Protocol):
    def take(self, rows: FileRows, names: Sequence[str]) -> Any: ...


class CopyCursor:
    """Of mapped files: there is nothing to hold."""

    def __init__(self, files: Takes, names: Sequence[str]) -> None:
        self._files, self._names = files, names

    def hold(self, within: range) -> None:
        return

    def take(self, rows: FileRows) -> Any:
        return self._files.take(rows, self._names)

    def close(self) -> None:
        return


class Progress:
    """Of making copies: says from time to time how far it is, and whether they fit on the disk."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes, self._began_s = total_bytes, time.monotonic()
        self._said_s = self._began_s
        self._read_bytes = self._written_bytes = 0  # of the files before
        self._needed_bytes = 0  # for the rest

    def tick(self, source: Path, folder: Path, read: int, written: int) -> None:
        """`read`, `written`: of this file so far. Raises ConfigError if the rest will not fit."""
        read, written, now_s = self._read_bytes + read, self._written_bytes + written, time.monotonic()
        self._needed_bytes = written * max(self._total_bytes - read, 0) // read
        if self._needed_bytes > free_bytes(folder):
            raise self.no_room(folder)
        if now_s > self._said_s + EVERY_S:
            self._said_s = now_s
            share = f"{100 * read // self._total_bytes} % of {human_bytes(self._total_bytes)}"
            rate = f"{human_bytes(read / (now_s - self._began_s))}/s"
            told = {"file": str(source), "share": share, "rate": rate, "columns": human_bytes(written)}
            get_logger().info("reading text into columns, once", **told)

    def end_file(self, read: int, written: int) -> None:
        self._read_bytes, self._written_bytes = self._read_bytes + read, self._written_bytes + written

    def no_room(self, folder: Path) -> ConfigError:
        needed, free = human_bytes(self._needed_bytes), human_bytes(free_bytes(folder))
        return ConfigError(
            f"data.copies: the columns of the data need about {needed} more in {folder}, which has {free} free; free "
            "space there, or name another folder"
        )


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


class Copy:
    """The typed columns of one text file."""

    def __init__(self, source: Path, folder: Path, rules: TextRules, limit: int) -> None:
        """`limit`: bytes."""
        self.source, self._rules, self._limit = source, rules, limit
        path = os.fsencode(os.path.abspath(source)).decode("utf-8", "replace")  # JSON can hold it
        self._key = digest([path, rules.known])
        name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', source.name)[:80]}-{xxhash.xxh3_64_hexdigest(self._key.encode())}"
        self._path, self._record, self._lock = (folder / f"{name}.{end}" for end in ("arrow", "json", "lock"))
        self._made: Made | None = None
        self._file: CheckedFile | None = None

    @property
    def made(self) -> Made:
        assert self._made is not None, "a copy is found or made before it is used"
        return self._made

    def take(self, rows: Ids, bounds: Ids, names: Sequence[str]) -> Any:
        """As `MappedFile.take`. Makes the copy again if it was damaged since it was opened."""
        assert self._file is not None, "a copy is found or made before it is used"
        try:
            return self._file.take(rows, bounds, names)
        except Damaged:
            before = self.made.digest
            with suppress(OSError):
                self._record.unlink()
            self.make(Progress(file_state(self.source).nbytes))
            if self.made.digest != before:
                raise changed(self.source) from None
            return self._file.take(rows, bounds, names)

    def find(self) -> bool:
        """Opens the copy of the source's bytes by these rules, if there is one."""
        state = file_state(self.source)
        try:
            made = read_sealed(self._record, {VERSION: Made}, "record of a copy")
            opened = CheckedFile(self._path, made)
        except (OSError, ValueError, DataError):  # Arrow's errors are ValueErrors
            return False
        if made.rules != self._key or made.state.nbytes != state.nbytes:
            return False
        if made.state != state:
            slow = f"{self.source} was touched; it is read to see whether its columns are still those that were kept"
            with said_if_slow(EVERY_S, slow), open_hashed(self.source) as file:
                while file.read(CHUNK_BYTES):
                    continue
            if file.digest != made.digest:
                return False
            made = msgspec.structs.replace(made, state=state)
            with suppress(OSError):
                write_durably(self._record, render(seal(made)))
        self._made, self._file = made, opened
        return True

    def make(self, progress: Progress) -> None:
        """Reads the source, unless another process has done so meanwhile. Raises ConfigError and DataError."""
        folder, partials = self._path.parent, re.compile(re.escape(self._path.name) + r"\.[0-9a-f]+\.partial")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with folder_lock(self._lock, f"{self._path.name}.*"):
                if not self.find():
                    for left in own_files_in(folder, partials):
                        left.unlink()
                    self._convert(progress)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise progress.no_room(folder) from None
            raise ConfigError(
                f"data.copies: the columns of {self.source} cannot be kept in {folder} ({error.strerror}); name a "
                "folder that can be written"
            ) from None

    def _convert(self, progress: Progress) -> None:
        before, unfinished, by_line = file_state(self.source), partial_of(self._path), True
        with closing(ArrowTarget(unfinished)) as target, open_hashed(self.source) as file:
            try:
                for columns, num_lines in self._columns(file):
                    target.add(columns)
                    by_line &= num_lines == columns.num_rows
                    if target.bounds[-1] > self._limit:
                        raise ConfigError(
                            f"data.copies_limit: {human_bytes(file.nbytes)} of {self.source} became "
                            f"{human_bytes(target.bounds[-1])} of columns, more than {human_bytes(self._limit)}; set a "
                            "higher limit if the file is no mistake"
                        )
                    progress.tick(self.source, unfinished.parent, file.nbytes, target.bounds[-1])
                target.finish()
                # without its last time, which another program changes by a link to the file
                if file.nbytes != before.nbytes or file_state(self.source)[:3] != before[:3]:
                    raise changed(self.source)
            except BaseException:
                with suppress(OSError):
                    unfinished.unlink()
                raise
            progress.end_file(file.nbytes, target.bounds[-1])
            made = Made(
                version=VERSION,
                rules=self._key,
                state=before,
                digest=file.digest,
                num_rows=target.num_rows,
                by_line=by_line,
                bounds=target.bounds,
                checksums=target.checksums,
            )
        Disk().rename(unfinished, self._path)
        write_durably(self._record, render(seal(made)))
        self._made, self._file = made, CheckedFile(self._path, made)

    def _columns(self, file: HashingReader) -> Iterator[tuple[Any, int]]:
        with text_of(file, self.source) as stream:
            yield from self._rules.columns(self.source, stream)


def changed(source: Path) -> DataError:
    return DataError(f"{source}: the file changed while it was read; leave it as it is while a run reads it")


class Damaged(ValueError):
    """A copy holds other bytes than were written."""


class CheckedFile(MappedFile):
    """A copy; raises Damaged for a part that was changed since."""

    def __init__(self, path: Path, made: Made) -> None:
        super().__init__(path)
        self._made = made
        if self.content.size != made.bounds[-1] or len(made.num_rows) + 2 != len(made.checksums):
            raise Damaged
        self._check(0)
        self._check(len(made.checksums) - 1)

    def batch(self, index: int) -> Any:
        self._check(1 + index)
        return super().batch(index)

    def _check(self, part: int) -> None:
        start, stop = self._made.bounds[part : part + 2]
        if xxhash.xxh3_64_hexdigest(memoryview(self.content)[start:stop]) != self._made.checksums[part]:
            raise Damaged


class ArrowTarget:
    """Writes an Arrow file, with a checksum of each part: before the record batches, each of them, and after."""

    def __init__(self, path: Path) -> None:
        self._file, self._hasher, self._nbytes = FileWrite(path), xxhash.xxh3_64(), 0
        self._writer: Any = None
        self.num_rows: list[int] = []
        self.bounds: list[int] = [0]
        self.checksums: list[str] = []
        self.closed = False  # this and the next two are what pyarrow writes to

    def write(self, content: Any) -> int:
        self._file.write(content)
        self._hasher.update(content)
        self._nbytes += len(content)
        return len(content)

    def flush(self) -> None:
        return

    def add(self, columns: Any) -> None:
        self._begin(columns.schema)
        self._writer.write_batch(columns)
        self.num_rows.append(columns.num_rows)
        self._end_part()

    def finish(self) -> None:
        """Makes the file durable."""
        self._begin(pa.schema([]))
        self._writer.close()
        self._end_part()
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _begin(self, schema: Any) -> None:
        if self._writer is None:
            self._writer = pa.ipc.new_file(pa.PythonFile(self, mode="w"), schema)
            self._end_part()

    def _end_part(self) -> None:
        self.bounds.append(self._nbytes)
        self.checksums.append(self._hasher.hexdigest())
        self._hasher.reset()
