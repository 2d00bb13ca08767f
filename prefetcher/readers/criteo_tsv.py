"""Criteo's TSV: label, 13 integers, 26 hashes of 8 hex digits, between tabs, without a header; plain or gzip, any field but the
label may be empty.

    dense = log(max(x, 0) + 1) in float64, rounded to float32; empty = 0
    id    = hash mod num_embeddings, unsigned; empty = 0

Opening a data set counts its lines and notes where each chunk of lines starts, so a truncated file is refused before the first step
and an epoch can begin at any row.
"""

import gzip
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv

from prefetcher.readers.assemble import StreamedReader
from prefetcher.readers.criteo_line import NUM_DENSE, NUM_SPARSE, refuse_line
from prefetcher.readers.files import Span, cumulative, data_files, eval_path, file_spans, sizes_of
from prefetcher.readers.ids import IdCheck, job_features, numbered_columns, refuse_weights
from prefetcher.readers.rows import Floats, Ids
from protocol.batch import Batch
from protocol.errors import ConfigError, DataError
from protocol.job import Job

FILE_NAMES = r"(.*\.(tsv|txt)|day_\d+)(\.gz)?"  # of a folder's data files
CHUNK_BYTES = 4 * 2**20
INVALID = 0xFFFF


def hex_pairs() -> npt.NDArray[np.uint16]:
    """[65536] two ASCII hex digits, read as a little-endian uint16 -> their value, INVALID for anything else."""
    digit = np.full(256, INVALID, np.uint32)
    for text in (b"0123456789abcdef", b"0123456789ABCDEF"):
        digit[list(text)] = np.arange(16)
    values = digit[None, :] << 4 | digit[:, None]  # the first digit is the low byte
    return np.where(values < 256, values, INVALID).astype(np.uint16).ravel()


HEX_PAIRS = hex_pairs()


@dataclass(frozen=True, kw_only=True, slots=True)
class TsvFile:
    path: Path
    offsets: list[int]  # bytes, uncompressed, where each chunk starts
    first_rows: list[int]  # row with which each chunk starts
    num_rows: int


def open_reader(job: Job) -> StreamedReader:
    """Raises ConfigError for a missing path or a feature that is not cat_0 to cat_25, DataError for a file that is empty or torn."""
    refuse_weights(job)
    numbered_columns(job, NUM_SPARSE, "Criteo TSV")
    assert job.data.path is not None, "the job file refuses criteo-tsv without a path"
    held_out = eval_path(job)
    rows = TsvRows(job, data_files(job.data.path, "data.path", FILE_NAMES))
    evaluation = None if held_out is None else TsvRows(job, data_files(held_out, "data.eval_path", FILE_NAMES))
    return StreamedReader(job, IdCheck(job), rows, evaluation)


class TsvRows:
    num_dense = NUM_DENSE

    def __init__(self, job: Job, paths: list[Path]) -> None:
        self._columns = numbered_columns(job, NUM_SPARSE, "Criteo TSV")
        self._moduli = np.array([feature.num_embeddings for feature in job_features(job)], np.int64)
        self.file_sizes = sizes_of(paths)
        self._files = [index_file(path) for path in paths]
        self._bounds = cumulative([file.num_rows for file in self._files])

    @property
    def num_rows(self) -> int:
        return self._bounds[-1]

    def blocks(self, span: Span) -> Iterator[Batch]:
        for index, part in file_spans(self._bounds, span):
            file = self._files[index]
            yield from (self._decode(lines, file.path, row) for row, lines in line_blocks(file, part))

    def _decode(self, lines: bytes, path: Path, first_row: int) -> Batch:
        """Whole lines, the first of which is row `first_row` of the file."""
        names = [f"I{i}" for i in range(NUM_DENSE)]
        try:
            table = parse(lines, ["label", *names, *dict.fromkeys(f"C{i}" for i in self._columns)])
            labels = table["label"].to_numpy()
            hashes = {i: hash_column(table[f"C{i}"]) for i in self._columns}
        except (pa.ArrowInvalid, ValueError) as error:
            raise refuse_line(lines, path, first_row + 1, str(error)) from None
        if table["label"].null_count or not ((labels == 0) | (labels == 1)).all():
            raise refuse_line(lines, path, first_row + 1, "a label is not 0 or 1")
        ids = np.stack([hashes[i] for i in self._columns]) % self._moduli[:, None]
        dense = np.stack([dense_column(table[name]) for name in names], axis=1)
        return Batch(dense=dense, labels=labels.astype(np.float32), ids=ids.ravel())


def parse(lines: bytes, columns: list[str]) -> Any:
    """The pyarrow table of `columns`. Raises ArrowInvalid or ValueError for a line that is not Criteo TSV."""
    names = ["label", *(f"I{i}" for i in range(NUM_DENSE)), *(f"C{i}" for i in range(NUM_SPARSE))]
    types = dict.fromkeys(names, pa.binary()) | {name: pa.int64() for name in names[: NUM_DENSE + 1]}
    table = csv.read_csv(
        pa.py_buffer(lines),
        read_options=csv.ReadOptions(use_threads=False, block_size=len(lines) + 1, column_names=names),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False, double_quote=False, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(
            column_types=types, include_columns=columns, null_values=[""], strings_can_be_null=False, check_utf8=False
        ),
    ).combine_chunks()
    if table.num_rows != count_lines(lines):
        raise ValueError("a line holds a carriage return")
    return table


def hash_column(column: Any) -> Ids:
    """Column of 8 hex digits or nothing -> i64 0 to 2^32 - 1. Raises ValueError for anything else."""
    chunk = column.chunk(0)
    _, bounds, data = chunk.buffers()
    offsets = np.frombuffer(bounds, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
    lengths = np.diff(offsets)
    present = lengths == 8
    if not (present | (lengths == 0)).all():
        raise ValueError("a hash has not 8 digits")
    digits = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.zeros(0, np.uint8)
    pairs = HEX_PAIRS[digits.view("<u2")].reshape(-1, 4)
    if (pairs == INVALID).any():
        raise ValueError("a hash holds a character that is not a hex digit")
    high, low = pairs[:, 0].astype(np.int64) << 8 | pairs[:, 1], pairs[:, 2].astype(np.int64) << 8 | pairs[:, 3]
    hashes = np.zeros(len(chunk), np.int64)
    hashes[present] = high << 16 | low
    return hashes


def dense_column(column: Any) -> Floats:
    values = column.fill_null(0).to_numpy()
    return cast(Floats, np.log(np.maximum(values, 0) + 1.0).astype(np.float32))


def index_file(path: Path) -> TsvFile:
    """One pass over the file's bytes. Raises DataError where it holds no line or ends within its compression."""
    offsets, first_rows, at, rows = [], [], 0, 0
    with open_lines(path) as stream:
        for lines in chunks(stream, path):
            offsets.append(at)
            first_rows.append(rows)
            at, rows = at + len(lines), rows + count_lines(lines)
    if not rows:
        raise DataError(f"{path}: the file is empty; give a file with at least one line")
    return TsvFile(path=path, offsets=offsets, first_rows=first_rows, num_rows=rows)


def line_blocks(file: TsvFile, part: Span) -> Iterator[tuple[int, bytes]]:
    """(row of the first line, whole lines) of the rows `part` of one file."""
    chunk = bisect_right(file.first_rows, part.start) - 1
    row = file.first_rows[chunk]
    with open_lines(file.path) as stream:
        stream.seek(file.offsets[chunk])
        for lines in chunks(stream, file.path):
            num_lines = count_lines(lines)
            start, stop = max(part.start - row, 0), min(part.stop - row, num_lines)
            if start < stop:
                yield row + start, some_lines(lines, start, stop, num_lines)
            row += num_lines
            if row >= part.stop:
                return
    raise DataError(f"{file.path}: the file ends after {row} lines, but had {file.num_rows} when it was opened; leave it as it is")


def open_lines(path: Path) -> IO[bytes]:
    try:
        return cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def chunks(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    """The stream's bytes in pieces of about CHUNK_BYTES that end where a line ends."""
    rest = b""
    while data := read(stream, path):
        end = data.rfind(b"\n") + 1
        if end:
            yield rest + data[:end]
        elif len(rest) > CHUNK_BYTES:
            raise DataError(f"{path}: a line is longer than {CHUNK_BYTES} bytes; this is not Criteo TSV")
        rest = data[end:] if end else rest + data
    if rest:
        yield rest


def read(stream: IO[bytes], path: Path) -> bytes:
    try:
        return stream.read(CHUNK_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip file is truncated or damaged ({error}); fetch it again") from None


def count_lines(lines: bytes) -> int:
    return lines.count(b"\n") + (not lines.endswith(b"\n"))


def some_lines(lines: bytes, start: int, stop: int, num_lines: int) -> bytes:
    """Lines start to stop of `num_lines`."""
    return lines if (start, stop) == (0, num_lines) else b"\n".join(lines.split(b"\n")[start:stop]) + b"\n"
