"""Reads the files of a folder as they arrive (data.follow), until a file named END does.

    the folder, once a second -> files after the last known -> ColumnRows of each -> batches, each once it is full

Batch k is rows k * data.batch_size up to the next batch's, of the files in their order. So a batch depends only on
the files: decoders, ranks and restarts agree on it without messages. Each decoder lists the folder for itself.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path, PurePath
from threading import Lock
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash
from msgspec.structs import replace

from rowcast.job.formats import format_of
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import FileRows
from rowcast.prefetcher.readers.data_files import (
    UNSEEN,
    FileState,
    NoRows,
    eval_path,
    file_state,
    files_of,
    is_data,
    numbered,
    sampled,
)
from rowcast.prefetcher.readers.id_check import IdCheck, Location
from rowcast.prefetcher.readers.reader import (
    Columns,
    DrawingReader,
    Part,
    Pending,
    Reader,
    RowOrder,
    job_of_files,
)
from rowcast.prefetcher.readers.row_reader import (
    ColumnCursor,
    ColumnRows,
    PendingRows,
    ReaderOfRows,
    RowReader,
    new_rows,
    rows_in_order,
)
from rowcast.protocol.batch import Kind
from rowcast.protocol.messages import DataDelay
from rowcast.protocol.parts import Rank
from rowcast.runtime.checkpoint_manifest import NOTHING_READ, DataFile, TrainingData
from rowcast.runtime.errors import ConfigError, DataError, instead

LIST_EVERY_S = 1.0
UNFINISHED = (".partial", ".tmp", ".crc")  # files with such names are not finished
END = "END"
ENDLESS = 2**62  # rows


class ReadFile(NamedTuple):
    """A file with rows, as a decoder has opened it."""

    file: DataFile
    rows: range  # counted over all files
    finished_s: float  # its time of change, in seconds since 1970


def checksum_of(files: Sequence[ReadFile]) -> int:
    """Returns a number by which ranks compare the files that they have read; 0 for none."""
    texts = [f"{read.file.checksum} {read.rows.start}" for read in files]
    return xxhash.xxh3_64_intdigest(" ".join(texts).encode()) if files else 0


class Arrivals:
    """What a decoder and its reader share."""

    def __init__(self, trained_on: TrainingData = NOTHING_READ, before_wait: Callable[[], None] = lambda: None) -> None:
        """`trained_on`: of the checkpoint from which the run goes on. `before_wait` is called before each wait."""
        self.trained_on, self.before_wait = trained_on, before_wait
        self.files: tuple[ReadFile, ...] = ()  # that have the rows of the last batch; none of an evaluation's


def is_gone(path: object) -> DataError:
    return DataError(f"{path}: the file is gone, and its rows are not trained yet; put it back")


def has_changed(path: object) -> DataError:
    return DataError(f"{path}: the file changed after it was read; give new rows in a new file")


def sorts_before(path: object, known: object) -> DataError:
    return DataError(
        f"{path} sorts before {known}, which was read already; let each file's name sort after those before it, and "
        "rename this one"
    )


def folder_of(job: Job) -> Path:
    """Returns data.path. Raises ConfigError unless it is a folder."""
    if not Path(job.data.path or "").is_dir():
        raise ConfigError(f"data.path = {job.data.path!r}: data.follow needs a folder; make it, or name another")
    return Path(job.data.path or "")


def place_of(job: Job) -> Callable[[Path], Any]:
    """Returns what gives a path's place in the reading order."""
    return cast(Callable[[Path], Any], Path if job.data.by_name else numbered)


class FilesRead:
    """The files of the batches that the decoders of a prefetcher have delivered. All must have read the same."""

    def __init__(self, trained_on: TrainingData) -> None:
        """`trained_on`: as in `Arrivals`."""
        self._before, self._lock = trained_on, Lock()
        self._files: dict[int, ReadFile] = {}  # by their first rows, which ascend
        self._num_rows = trained_on.rows_before
        self._last_done = trained_on.last_before  # the path of the last file whose rows are all trained
        self._delays_s = list[float]()  # of the last such file and the slowest one, from when each was finished

    def trained(self, num_rows: int) -> None:
        """Notes that so many rows of the run are trained."""
        with self._lock:
            done = [read for read in self._files.values() if read.rows.stop <= num_rows]
        if done and done[-1].file.path != self._last_done:
            delay_s = max(time.time() - done[-1].finished_s, 0.0)
            self._last_done, self._delays_s = done[-1].file.path, [delay_s, max([delay_s, *self._delays_s])]

    def delay(self, job: Job) -> DataDelay:
        """Counts no waiting file if the folder cannot be listed."""
        waiting, (last_s, longest_s) = 0, self._delays_s or (None, 0.0)
        with suppress(ConfigError):
            place = place_of(job)
            files = [path for path in files_of(job, "path") if not path.name.startswith(UNSEEN)]
            last = Path(job.data.path or "", PurePath(self._last_done).name)
            waiting = sum(not self._last_done or place(last) < place(path) for path in files)
        return DataDelay(waiting_files=waiting, last_s=last_s, longest_s=longest_s)

    def add(self, files: Sequence[ReadFile]) -> None:
        """Adds those of a batch. Raises DataError if another decoder has read another file in the place of one."""
        with self._lock:
            for read in files:
                if read.rows.start >= self._num_rows:
                    self._files[read.rows.start], self._num_rows = read, read.rows.stop
                elif (before := self._files.get(read.rows.start, read)) != read:
                    raise sorts_before(*sorted((read.file.path, before.file.path)))

    def trained_on(self, first_row: int) -> TrainingData:
        """Returns what a checkpoint keeps if the next batch begins at `first_row`. Forgets the files before it."""
        self.trained(first_row)  # while it still knows the files
        with self._lock:
            for gone in [read for read in self._files.values() if read.rows.stop <= first_row]:
                del self._files[gone.rows.start]
                self._before = replace(self._before, rows_before=gone.rows.stop, last_before=gone.file.path)
            return replace(self._before, files=tuple(read.file for read in self._files.values()))


class FollowedFile(NamedTuple):
    path: Path
    read: ReadFile
    state: FileState
    rows: ColumnRows
    cursor: ColumnCursor

    def check(self) -> None:
        """Raises DataError unless the file is the one that was opened. A link to it changes only its last time."""
        try:
            is_same = file_state(self.path)[:3] == self.state[:3]
        except ConfigError:
            raise is_gone(self.path) from None
        if not is_same:
            raise has_changed(self.path)


class FollowedFiles:
    """Implements `ColumnFiles` and its `ColumnCursor` for files that arrive, and leave once no batch needs them."""

    def __init__(self, job: Job, rows_of: Callable[[list[Path]], ColumnRows], arrivals: Arrivals) -> None:
        """Waits for the first file. Raises ConfigError unless data.path is a folder with one."""
        known, path = arrivals.trained_on, job.data.path or ""
        self._job, self._rows_of, self._arrivals, self._folder = job, rows_of, arrivals, folder_of(job)
        self._last = Path(path, PurePath(known.last_before).name) if known.last_before else None  # known file
        self._seen: set[str] | None = None  # names of the last listing; None before the first
        self._listed = deque[Path]()  # and not opened
        self._expected = deque(known.files)  # that the run had read, in order, and that are not opened yet
        self._ended = False
        self.files, self.paths, self.bounds = list[FollowedFile](), list[Path](), np.array([known.rows_before])
        if not self.grow() and not known.last_before:
            raise DataError(f"data.path: {path} has the file {END} and no file with rows; add some")
        # the form of all other files; after a restart with all rows trained, that of the last file
        self.first = self.files[0].rows if self.files else rows_of([Path(path, PurePath(known.last_before).name)])

    @property
    def num_rows(self) -> int:
        return int(self.bounds[-1])

    def within(self, rows: range) -> list[FollowedFile]:
        return [file for file in self.files if file.read.rows.start < rows.stop and rows.start < file.read.rows.stop]

    def location(self, rows: FileRows) -> Location:
        return self.files[rows.file].rows.files.location(rows._replace(file=0))

    def cursor(self, names: Sequence[str]) -> "FollowedFiles":
        return self

    def hold(self, within: range) -> None:
        gone = int(np.searchsorted(self.bounds[1:], within.start, side="right"))
        for file in self.files[:gone]:
            file.cursor.close()
        self.files, self.paths, self.bounds = self.files[gone:], self.paths[gone:], self.bounds[gone:]
        for file in self.within(within):
            start, stop = file.read.rows.start, file.read.rows.stop
            file.cursor.hold(range(max(within.start, start) - start, min(within.stop, stop) - start))

    def take(self, rows: FileRows) -> Any:
        return self.files[rows.file].cursor.take(rows._replace(file=0))

    def close(self) -> None:
        for file in self.files:
            file.cursor.close()

    def grow(self) -> bool:
        """Opens the next file with rows, waiting for it. Returns whether there is one. Raises DataError."""
        while True:
            while self._listed:
                if self._open(self._listed.popleft()):
                    return True
            if not self._ended:
                self._list()
            if not self._listed:
                for was in self._expected:
                    if not (self._folder / PurePath(was.path).name).exists():
                        raise is_gone(was.path)
                for file in self.files:
                    file.check()
                if self._ended:
                    return False
                self._arrivals.before_wait()
                time.sleep(LIST_EVERY_S)

    def _list(self) -> None:
        """Adds the files that were not in the last listing. Raises DataError if one sorts before a known file."""
        data, first_time = self._job.data, self._seen is None
        place = place_of(self._job)
        rule, where = format_of(data.format).file_names, f"data.path = {data.path!r}"
        try:
            names = {name for name in os.listdir(self._folder) if not name.startswith(UNSEEN)}
        except OSError as error:
            raise DataError(f"{where} cannot be listed ({error.strerror})") from None
        new = [self._folder / name for name in names - (self._seen or {END}) - {END} if not name.endswith(UNFINISHED)]
        new = sorted(
            (path for path in new if is_data(path, rule, where, Path(data.eval_path or os.devnull))), key=place
        )
        if first_time and self._last is not None:
            new = [path for path in new if place(self._last) < place(path)]
        if new and self._last is not None and place(new[0]) < place(self._last):
            raise sorts_before(new[0], self._last)
        self._seen, self._ended, self._last = names, END in names, new[-1] if new else self._last
        self._listed.extend(new)

    def _open(self, path: Path) -> bool:
        """Returns whether the file has rows."""
        is_first = len(self.bounds) == 1 and not self.files
        try:
            state, [sample], rows = file_state(path), sampled([path]), self._rows_of([path])
        except NoRows:
            return False
        except ConfigError as error:
            raise error if is_first else DataError(str(error)) from None
        if self._expected:
            was = self._expected.popleft()
            if path.name != PurePath(was.path).name:
                is_there = (self._folder / PurePath(was.path).name).exists()
                raise sorts_before(path, was.path) if is_there else is_gone(was.path)
            if (sample.nbytes, sample.checksum) != (was.nbytes, was.checksum):
                raise has_changed(path)
        if not is_first and rows.dense_names != self.first.dense_names:
            columns = instead(rows.dense_names, self.first.dense_names)
            raise DataError(f"{path} has the dense columns {columns} of the files before; give all the same")
        read = ReadFile(sample, range(self.num_rows, self.num_rows + rows.num_rows), state.mtime_ns / 1e9)
        self.files.append(FollowedFile(path, read, state, rows, rows.files.cursor(rows.names)))
        self.paths.append(path)
        self.bounds = np.append(self.bounds, read.rows.stop)
        return True


class FollowingReader(ReaderOfRows):
    """A `Reader` of the files that arrive, once, and of those of data.eval_path."""

    def __init__(self, job: Job, part: Columns, arrivals: Arrivals) -> None:
        """Waits for the first file. Raises as the reader of the format."""
        super().__init__(job, IdCheck(job))
        self._arrivals = arrivals
        rows_of: Callable[[list[Path]], ColumnRows]
        rows_of = partial(import_module(format_of(job.data.format).module).rows_of, job, self._ids, part)
        self._files = FollowedFiles(job, rows_of, arrivals)
        evaluations = [] if eval_path(job) is None else [rows_of(files_of(job, "eval_path"))]
        self._evaluations = [RowReader(job, self._ids, self._files.first, rows) for rows in evaluations]
        self.dense_names = self._files.first.dense_names
        self.paths = [path for rows in evaluations for path in rows.paths]

    def num_samples(self, split: Kind) -> int | None:
        return None if split == "train" else sum(reader.num_samples(split) or 0 for reader in self._evaluations)

    def pending(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Pending]:
        if split == "train":
            yield from self._training(epoch, start)
        self._arrivals.files = ()
        for reader in self._evaluations if split == "eval" else ():
            yield from reader.pending(split, epoch, start)

    def _training(self, epoch: int, start: int) -> Iterator[Pending]:
        data, files, first = self._job.data, self._files, self._files.first
        ordered = partial(RowOrder, seed=self._job.job.seed, epoch=epoch, window=data.shuffle_window)
        rows = ColumnRows(files, first.names, first.decoder, first.dense_names, first.part)
        order = ordered(num_rows=ENDLESS)
        with rows.cursor() as cursor:
            for row in count(start * data.batch_size, data.batch_size):
                while files.num_rows < order.within(row, row + data.batch_size).stop:
                    if not files.grow():
                        order = ordered(num_rows=files.num_rows)
                        break
                stop = min(row + data.batch_size, files.num_rows)
                if row >= stop:
                    return
                needed = files.within(order.within(row, stop))
                self._arrivals.files = tuple(file.read for file in needed)
                batch = PendingRows(cursor=cursor, order=order, origin=0, start=row, stop=stop)
                yield partial(unchanged, batch, needed)

    def untrained(self, batch: int) -> Iterator[Pending]:
        new = new_rows(self._job.data, batch, self._files.num_rows)
        for file in [file for file in self._files.files if file.read.rows.start in new]:
            for decode in rows_in_order(file.rows, range(file.rows.num_rows), self._job.data.batch_size):
                yield partial(unchanged, decode, [file])


def unchanged(batch: Pending, files: Sequence[FollowedFile], rank: Rank) -> Part:
    """Decodes a batch. Raises DataError if one of its files has changed, whatever else was wrong."""
    try:
        return batch(rank)
    finally:
        for file in files:
            file.check()


def open_followed(job: Job, columns: Columns, arrivals: Arrivals) -> Reader:
    """Waits for the first file. Raises as `open_reader`."""
    if job.data.negatives:
        return DrawingReader(job, FollowingReader(job_of_files(job), columns, arrivals))
    return FollowingReader(job, columns, arrivals)
