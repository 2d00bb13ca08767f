"""Any lines of text files, plain or gzip.

    file  | chunk 0 | chunk 1 | chunk 2 | ...    chunks of whole lines, noted in one pass when the files are opened
                      a b c d e                  one of them in memory, with where its lines start
                        b   d   -> "b\\nd\\n"      the lines that are wanted

A plain file is read from the chunk that is needed; a gzip file is decompressed up to it.
"""

import gzip
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np

from prefetcher.readers.files import Span, cumulative
from prefetcher.readers.rows import Ids, as_slice
from protocol.errors import ConfigError, DataError

CHUNK_BYTES = 4 * 2**20


class Chunk(NamedTuple):
    path: Path
    first_line: int  # of the file, from 0
    num_lines: int
    offset: int  # bytes, uncompressed
    nbytes: int


class TextIndex:
    """The lines of all files, counted through from 0."""

    def __init__(self, paths: list[Path]) -> None:
        """Reads every file once. Raises ConfigError for one that cannot be read, DataError for one that is empty or torn."""
        self.chunks = [chunk for path in paths for chunk in index_file(path)]
        self._bounds = cumulative([chunk.num_lines for chunk in self.chunks])

    @property
    def num_lines(self) -> int:
        return self._bounds[-1]

    def chunk_of(self, line: int) -> int:
        return bisect_right(self._bounds, line) - 1

    def first_line(self, chunk: int) -> int:
        return self._bounds[chunk]

    def place(self, line: int) -> str:
        index = self.chunk_of(line)
        chunk = self.chunks[index]
        return f"{chunk.path}, line {chunk.first_line + line - self._bounds[index] + 1}"


class Lines(NamedTuple):
    """A chunk in memory."""

    first: int  # line, all files counted through
    text: bytes
    starts: Ids  # [n + 1] bytes, where each line starts and the last one ends


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

    def lines(self, numbers: Ids, within: Span) -> bytes:
        """The text of these lines, all of them `within`, in the given order."""
        chunks = range(self._index.chunk_of(within.start), self._index.chunk_of(within.stop - 1) + 1)
        self._held = {chunk: self._held[chunk] if chunk in self._held else self._read(chunk) for chunk in chunks}
        held = list(self._held.values())
        run = as_slice(numbers)
        return scattered_lines(held, run) if isinstance(run, np.ndarray) else b"".join(line_run(lines, run) for lines in held)

    def _read(self, index: int) -> Lines:
        chunk = self._index.chunks[index]
        text = read_at(self._stream(chunk.path), chunk)
        text = text if text.endswith(b"\n") or not text else text + b"\n"
        starts = np.append(0, np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1)
        if len(starts) - 1 != chunk.num_lines:
            raise DataError(
                f"{chunk.path}: the {chunk.num_lines} lines from line {chunk.first_line + 1} on are {len(starts) - 1} now; "
                "leave the file as it is while it is read"
            )
        return Lines(self._index.first_line(index), text, starts)

    def _stream(self, path: Path) -> IO[bytes]:
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = path, open_text(path)
        return self._open[1]


def line_run(lines: Lines, run: slice) -> bytes:
    """Those of `lines` that stand in a run of lines."""
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


def index_file(path: Path) -> Iterator[Chunk]:
    """One pass over the file's bytes. Raises DataError where it holds no line or ends within its compression."""
    offset = line = 0
    with open_text(path) as stream:
        for text in whole_lines(stream, path):
            num_lines = text.count(b"\n") + (not text.endswith(b"\n"))
            yield Chunk(path=path, first_line=line, num_lines=num_lines, offset=offset, nbytes=len(text))
            offset, line = offset + len(text), line + num_lines
    if not line:
        raise DataError(f"{path}: the file is empty; give a file with at least one line")


def open_text(path: Path) -> IO[bytes]:
    try:
        return cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def whole_lines(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    """The stream's bytes in pieces of about CHUNK_BYTES that end where a line ends."""
    rest = b""
    while data := read(stream, path, CHUNK_BYTES):
        end = data.rfind(b"\n") + 1
        if end:
            yield rest + data[:end]
        elif len(rest) > CHUNK_BYTES:
            raise DataError(f"{path}: a line is longer than {CHUNK_BYTES} bytes; give a file of one sample a line")
        rest = data[end:] if end else rest + data
    if rest:
        yield rest


def read(stream: IO[bytes], path: Path, nbytes: int, offset: int | None = None) -> bytes:
    """The next bytes of the stream, or those at `offset`."""
    try:
        if offset is not None and stream.tell() != offset:
            stream.seek(offset)
        return stream.read(nbytes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip file is truncated or damaged ({error}); fetch it again") from None


def read_at(stream: IO[bytes], chunk: Chunk) -> bytes:
    return read(stream, chunk.path, chunk.nbytes, chunk.offset)
