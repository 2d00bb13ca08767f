"""Reads text files, plain or gzip by their first bytes, once and in order, in pieces of whole lines."""

import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import xxhash

from rowcast.prefetcher.readers.id_check import Location
from rowcast.runtime.errors import ConfigError, DataError

CHUNK_BYTES = 4 * 2**20
MOST_LINE_BYTES = 3  # a line's limit in CHUNK_BYTES, as `whole_lines` allows
OTHER_FILES = {  # first bytes -> what the file is, and what to do
    b"PK\x03\x04": "a zip archive (or an Excel file); unpack it, or save it as CSV",
    b"PAR1\x15": "Parquet, not text; a run reads one format, data.format, and predict(frame) in Python reads any",
    b"\xff\xfe": "text in UTF-16; write it as UTF-8",
    b"\xfe\xff": "text in UTF-16; write it as UTF-8",
    b"BZh91AY&": "compressed by bzip2; unpack it, or compress it with gzip",
    b"\xfd7zXZ": "compressed by xz; unpack it, or compress it with gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it, or compress it with gzip",
}


class LinePiece(NamedTuple):
    first_line: int  # of the file, from 1
    num_lines: int
    text: bytes  # each line with its end


class HashingReader(io.RawIOBase):
    """A file that is read once, from its start; hashes and counts the bytes on the disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._hasher = xxhash.xxh3_128()
        self.nbytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        nbytes = self._file.readinto(buffer) or 0
        self._hasher.update(memoryview(buffer)[:nbytes])
        self.nbytes += nbytes
        return nbytes

    @property
    def digest(self) -> str:
        """xxh3_128 of the bytes so far, 32 hex digits."""
        return self._hasher.hexdigest()

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def open_text(path: Path) -> Iterator[IO[bytes]]:
    """Raises ConfigError for a file that cannot be read, DataError for one that is neither text nor gzip."""
    with open_hashed(path) as file, text_of(file, path) as stream:
        yield stream


def open_hashed(path: Path) -> HashingReader:
    """Raises ConfigError for a file that cannot be read."""
    try:
        return HashingReader(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


@contextmanager
def text_of(file: HashingReader, path: Path) -> Iterator[IO[bytes]]:
    """Raises DataError for a file that is neither text nor gzip."""
    with io.BufferedReader(file) as plain:
        start = plain.peek()
        for first_bytes, what in OTHER_FILES.items():
            if start.startswith(first_bytes):
                raise DataError(f"{path}: the file is {what}")
        text = gzip.GzipFile(fileobj=plain) if start.startswith(b"\x1f\x8b") else plain
        # lines of plain text that end in CR alone, as on old Macs
        has_old_ends = b"\r" in start[:-1] and b"\n" not in start and b"\x00" not in start
        yield cast(IO[bytes], io.BufferedReader(LineEnds(text)) if has_old_ends else text)


class LineEnds(io.RawIOBase):
    """Text whose lines end in CR, read with LF instead."""

    def __init__(self, text: io.BufferedIOBase) -> None:
        self._text = text

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._text.read(len(buffer)).replace(b"\r", b"\n")
        buffer[: len(data)] = data
        return len(data)


def pieces(stream: IO[bytes], path: Path, header_lines: int) -> Iterator[LinePiece]:
    """Yields all lines but the first ones and empty ones at the end of the file."""
    line, ends = 1, b""  # ends: of the empty lines since the last that is not
    for block in whole_lines(stream, path):
        text = block.removeprefix(b"\xef\xbb\xbf") if line == 1 else block
        stop = len(text)
        while text[stop - 1 : stop] in (b"\r", b"\n"):
            stop -= 1
        after = text[stop:]
        cut = after.find(b"\n") + 1 if stop else 0
        if not re.fullmatch(rb"(\r?\n)*", after[cut:]):
            cut = len(after)  # a carriage return within a line, which the format refuses
        if stop + cut:
            lines, ends = ends + text[: stop + cut], after[cut:]
            lines = lines if lines.endswith(b"\n") else lines + b"\n"
            skipped = header_lines if line == 1 else 0
            num_lines = lines.count(b"\n")
            if num_lines > skipped:
                rows = lines.split(b"\n", skipped)[-1] if skipped else lines
                yield LinePiece(line + skipped, num_lines - skipped, rows)
            line += num_lines
        else:
            ends += after


def whole_lines(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yields the stream's bytes in blocks of about CHUNK_BYTES that end at a line end."""
    rest = b""
    while data := read(stream, path):
        end = data.rfind(b"\n") + 1
        if end:
            yield b"".join((rest, memoryview(data)[:end]))  # one copy, not two
        elif len(rest) > CHUNK_BYTES:
            raise DataError(f"{path}: a line is longer than {CHUNK_BYTES} bytes; give a file of one sample per line")
        rest = data[end:] if end else rest + data
    if rest:
        yield rest


def read(stream: IO[bytes], path: Path) -> bytes:
    with whole_gzip(path):
        return stream.read(CHUNK_BYTES)


def first_lines(path: Path) -> tuple[bytes, bytes]:
    """Returns a file's first two lines with their line ends; b"" for one that it does not have."""
    with open_text(path) as stream, whole_gzip(path):
        return stream.readline(MOST_LINE_BYTES * CHUNK_BYTES), stream.readline(MOST_LINE_BYTES * CHUNK_BYTES)


def lines_of(text: bytes) -> list[bytes]:
    return text.removesuffix(b"\n").split(b"\n")


def refuse_line(
    lines: Sequence[bytes], location: Location, reason: str, line_error: Callable[[bytes], str | None]
) -> DataError:
    """Returns the error of the first bad line; `location(i)` names the i-th line's file and number. `line_error`:
    returns the sentence after the line's number, None for a good line.

    `reason` is the fast parser's message, used if no line is bad."""
    for i, line in enumerate(lines):
        error = line_error(line)
        if error is not None:
            return DataError(f"{location(i)}{error}")
    return DataError(f"{location(0)}, or another of the {len(lines)} lines decoded with it: {reason}")


@contextmanager
def whole_gzip(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip file is truncated or damaged ({error}); fetch it again") from None
