"""Reads any lines of text files, plain or gzip by their first bytes.

    file  | chunk 0 | chunk 1 | chunk 2 | ...    chunks of whole lines, found in one pass at the first opening
                      a b c d e                  one of them in memory, with the starts of its lines
                        b   d   -> "b\\nd\\n"      the requested lines

A plain file is read from the requested chunk; a gzip file is decompressed up to it.
"""

import gzip
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np

from rowcast.prefetcher.readers.columns import Ids, as_slice
from rowcast.prefetcher.readers.data_files import cumulative, is_gzip, no_rows
from rowcast.prefetcher.readers.line_index import Pieces, forget, kept_pieces
from rowcast.runtime.errors import ConfigError, DataError

CHUNK_BYTES = 4 * 2**20
OTHER_FILES = {  # first bytes -> what the file is, and what to do
    b"PK\x03\x04": "a zip archive (or an Excel file); unpack it, or save it as CSV",
    b"PAR1\x15": "Parquet; name it .parquet",
    b"\xff\xfe": "text in UTF-16; write it as UTF-8",
    b"\xfe\xff": "text in UTF-16; write it as UTF-8",
    b"BZh91AY&": "compressed by bzip2; unpack it, or compress it with gzip",
    b"\xfd7zXZ": "compressed by xz; unpack it, or compress it with gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it, or compress it with gzip",
}
MAX_CHUNKS = 3  # limit of a chunk in CHUNK_BYTES: a line of up to two before it ends, and the lines after it


class Chunk(NamedTuple):
    path: Path
    first_line: int  # of the file, from 0
    num_lines: int
    offset: int  # bytes, uncompressed
    nbytes: int


class TextIndex:
    """The lines of all files, counted from 0 over all of them."""

    def __init__(self, paths: list[Path], kept_in: Path | None = None) -> None:
        """Reads every file once, or, if the counts are kept in a folder, only files that changed since.

        Raises ConfigError for a file that cannot be read, DataError for one that is torn, or if all are empty.
        """
        counts = (
            map(count_lines, paths)
            if kept_in is None
            else kept_pieces(paths, kept_in, count_lines, MAX_CHUNKS * CHUNK_BYTES)
        )
        self.chunks = [chunk for path, pieces in zip(paths, counts, strict=True) for chunk in chunks_of(path, pieces)]
        if not self.chunks:
            raise no_rows(paths)
        self._bounds = cumulative([chunk.num_lines for chunk in self.chunks])
        self._kept_in = kept_in

    @property
    def num_lines(self) -> int:
        return self._bounds[-1]

    def chunk_of(self, line: int) -> int:
        return bisect_right(self._bounds, line) - 1

    def first_line(self, chunk: int) -> int:
        return self._bounds[chunk]

    def location(self, line: int) -> str:
        index = self.chunk_of(line)
        chunk = self.chunks[index]
        return f"{chunk.path}, line {chunk.first_line + line - self._bounds[index] + 1}"

    def ends_file(self, chunk: int) -> bool:
        return chunk + 1 == len(self.chunks) or self.chunks[chunk + 1].first_line == 0

    def differs(self, chunk: int, found: int) -> DataError:
        """Returns the error for a chunk whose lines changed since they were counted. Makes the next start recount
        them."""
        path, first_line, num_lines, *_ = self.chunks[chunk]
        if self._kept_in is not None:
            forget(path, self._kept_in)
        now = "others" if found == num_lines else found
        return DataError(
            f"{path}: the {num_lines} lines from line {first_line + 1} on are {now} now; "
            "leave the file as it is while it is read"
        )


class Lines(NamedTuple):
    """A chunk in memory."""

    first: int  # line, counted over all files
    text: bytes
    starts: Ids  # [n + 1] bytes: the start of each line, and the end of the last


class TextCursor:
    """Reads lines; holds one file open, and the chunks of the last call."""

    def __init__(self, index: TextIndex) -> None:
        self._index = index
        self._held: dict[int, Lines] = {}
        self._open: tuple[Path, IO[bytes]] | None = None

    def close(self) -> None:
        self._held = {}
        if self._open is not None:
            self._open[1].close()
        self._open = None

    def lines(self, numbers: Ids, within: range) -> bytes:
        chunks = range(self._index.chunk_of(within.start), self._index.chunk_of(within.stop - 1) + 1)
        self._held = {chunk: self._held[chunk] if chunk in self._held else self._read(chunk) for chunk in chunks}
        held = list(self._held.values())
        run = as_slice(numbers)
        return (
            scattered_lines(held, run)
            if isinstance(run, np.ndarray)
            else b"".join(line_run(lines, run) for lines in held)
        )

    def _read(self, index: int) -> Lines:
        chunk = self._index.chunks[index]
        text = read_at(self._stream(chunk.path), chunk)
        is_cut = len(text) < chunk.nbytes or not (text.endswith(b"\n") or self._index.ends_file(index))
        text = text if text.endswith(b"\n") or not text else text + b"\n"
        starts = np.append(0, np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1)
        if is_cut or len(starts) - 1 != chunk.num_lines:
            raise self._index.differs(index, len(starts) - 1)
        return Lines(self._index.first_line(index), text, starts)

    def _stream(self, path: Path) -> IO[bytes]:
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = path, open_text(path)
        return self._open[1]


def line_run(lines: Lines, run: slice) -> bytes:
    last = len(lines.starts) - 1
    start, stop = min(max(run.start - lines.first, 0), last), min(max(run.stop - lines.first, 0), last)
    return lines.text[lines.starts[start] : lines.starts[stop]]


def scattered_lines(held: list[Lines], numbers: Ids) -> bytes:
    chunks = np.searchsorted([lines.first for lines in held], numbers, side="right") - 1
    starts, stops = np.empty_like(numbers), np.empty_like(numbers)
    for index, lines in enumerate(held):
        here = chunks == index
        own = numbers[here] - lines.first
        starts[here], stops[here] = lines.starts[own], lines.starts[own + 1]
    bounds = zip(chunks.tolist(), starts.tolist(), stops.tolist(), strict=True)
    return b"".join([held[chunk].text[start:stop] for chunk, start, stop in bounds])


def count_lines(path: Path) -> Pieces:
    """Counts lines in one pass. Raises DataError if the compression is cut off."""
    with open_text(path) as stream:
        return [(text.count(b"\n") + (not text.endswith(b"\n")), len(text)) for text in whole_lines(stream, path)]


def chunks_of(path: Path, pieces: Pieces) -> Iterator[Chunk]:
    line = offset = 0
    for num_lines, nbytes in pieces:
        yield Chunk(path=path, first_line=line, num_lines=num_lines, offset=offset, nbytes=nbytes)
        line, offset = line + num_lines, offset + nbytes


def open_text(path: Path) -> IO[bytes]:
    """Raises ConfigError for a file that cannot be read, DataError for one that is neither text nor gzip."""
    try:
        require_text(path)
        return cast(IO[bytes], gzip.open(path) if is_gzip(path) else path.open("rb"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def require_text(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(max(map(len, OTHER_FILES)))
    for first_bytes, what in OTHER_FILES.items():
        if start.startswith(first_bytes):
            raise DataError(f"{path}: the file is {what}")


def whole_lines(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yields the stream's bytes in blocks of about CHUNK_BYTES that end at a line end."""
    rest = b""
    while data := read(stream, path, CHUNK_BYTES):
        end = data.rfind(b"\n") + 1
        if end:
            yield rest + data[:end]
        elif len(rest) > CHUNK_BYTES:
            raise DataError(f"{path}: a line is longer than {CHUNK_BYTES} bytes; give a file of one sample per line")
        rest = data[end:] if end else rest + data
    if rest:
        yield rest


def first_lines(path: Path) -> tuple[bytes, bytes]:
    """Returns a file's first two lines with their line ends; b"" for one that it does not have."""
    with open_text(path) as stream, whole_gzip(path):
        return stream.readline(MAX_CHUNKS * CHUNK_BYTES), stream.readline(MAX_CHUNKS * CHUNK_BYTES)


def read(stream: IO[bytes], path: Path, nbytes: int, offset: int | None = None) -> bytes:
    with whole_gzip(path):
        if offset is not None and stream.tell() != offset:
            stream.seek(offset)
        return stream.read(nbytes)


@contextmanager
def whole_gzip(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip file is truncated or damaged ({error}); fetch it again") from None


def read_at(stream: IO[bytes], chunk: Chunk) -> bytes:
    return read(stream, chunk.path, chunk.nbytes, chunk.offset)
