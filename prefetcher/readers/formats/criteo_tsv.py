"""Reads Criteo's TSV: label, 13 integers, 26 hashes of 8 hex digits, between tabs, without a header; plain or gzip.

Any field except the label may be empty.

    dense = log(max(x, 0) + 1) in float64, rounded to float32; empty = 0
    id    = hash mod num_embeddings, unsigned; empty = 0

Opening a data set counts its lines, so a truncated file is refused before the first step; a run keeps the counts for
its next start (`line_index.py`). Only lines of requested batches are decoded. Each worker finds all line ends of a
file, which is cheap beside decoding, and decompresses all of a gzip file, which is not.
"""

from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import Floats, Ids
from rowcast.prefetcher.readers.formats.criteo_line import NUM_DENSE, NUM_SPARSE, refuse_line
from rowcast.prefetcher.readers.id_check import (
    IdCheck,
    Location,
    dense_names,
    job_features,
    numbered_columns,
    refuse_weights,
)
from rowcast.prefetcher.readers.line_index import lines_folder
from rowcast.prefetcher.readers.row_reader import RowReader, open_files
from rowcast.prefetcher.readers.text_files import TextCursor, TextIndex
from rowcast.protocol.batch import Batch
from rowcast.runtime.arrays import U16

DENSE = [f"int_{i}" for i in range(NUM_DENSE)]
SPARSE = [f"cat_{i}" for i in range(NUM_SPARSE)]
LINES_AT_ONCE = 8192  # decoded together, to fit the processor's cache
INVALID = 0xFFFF


def hex_pairs() -> U16:
    """Maps two ASCII hex digits, read as a little-endian uint16, to their value or INVALID. u16 [65536]."""
    digit = np.full(256, INVALID, np.uint32)
    for text in (b"0123456789abcdef", b"0123456789ABCDEF"):
        digit[list(text)] = np.arange(16)
    values = digit[None, :] << 4 | digit[:, None]  # the first digit is the low byte
    return np.where(values < 256, values, INVALID).astype(np.uint16).ravel()


HEX_PAIRS = hex_pairs()


def open_reader(job: Job) -> RowReader:
    """Raises ConfigError for a missing path or a feature that is not cat_0 to cat_25, DataError for an empty or torn
    file."""
    refuse_weights(job)
    numbered_columns(job, NUM_SPARSE, "Criteo TSV")
    return open_files(job, IdCheck(job), partial(TsvRows, job))


class TsvRows:
    dense_names = dense_names(NUM_DENSE)

    def __init__(self, job: Job, paths: list[Path]) -> None:
        self.columns = numbered_columns(job, NUM_SPARSE, "Criteo TSV")
        self.moduli = np.array([feature.num_embeddings for feature in job_features(job)], np.int64)
        self.paths = paths
        self.index = TextIndex(paths, lines_folder(job))

    @property
    def num_rows(self) -> int:
        return self.index.num_lines

    def cursor(self) -> AbstractContextManager["TsvCursor"]:
        return closing(TsvCursor(self))


class TsvCursor(TextCursor):
    def __init__(self, rows: TsvRows) -> None:
        super().__init__(rows.index)
        self._rows = rows

    def take(self, rows: Ids, within: range) -> Batch:
        parts = [self._decode(rows[at : at + LINES_AT_ONCE], within) for at in range(0, len(rows), LINES_AT_ONCE)]
        labels, dense, ids = zip(*parts, strict=True)
        return Batch(
            dense=np.concatenate(dense), labels=np.concatenate(labels), ids=np.concatenate(ids, axis=1).ravel()
        )

    def _decode(self, rows: Ids, within: range) -> tuple[Floats, Floats, Ids]:
        """Returns labels [n], dense [n, 13], ids [F, n]."""
        lines = self.lines(rows, within)
        labels, dense, hashes = decode(
            lines, len(rows), self._rows.columns, lambda i: self._rows.index.location(int(rows[i]))
        )
        return labels, dense, remainders(hashes, self._rows.moduli)


def decode(lines: bytes, num_lines: int, columns: list[int], location: Location) -> tuple[Floats, Floats, Ids]:
    """Returns labels [n], dense [n, 13], hashes [len(columns), n] of whole lines; `location(i)` names the i-th. Raises
    DataError."""
    try:
        table = parse(lines, num_lines, ["label", *DENSE, *dict.fromkeys(SPARSE[i] for i in columns)])
        hashes = hash_columns([table[SPARSE[i]].chunk(0) for i in columns])
    except (pa.ArrowInvalid, ValueError) as error:
        raise refuse_line(lines, location, str(error)) from None
    labels = table["label"].to_numpy()
    if table["label"].null_count or not ((labels == 0) | (labels == 1)).all():
        raise refuse_line(lines, location, "a label is not 0 or 1")
    return labels.astype(np.float32), dense_columns([table[name] for name in DENSE]), hashes


def parse(lines: bytes, num_lines: int, columns: list[str]) -> Any:
    """Returns a pyarrow table of `columns` in one chunk. Raises ArrowInvalid or ValueError for an invalid line."""
    names = ["label", *DENSE, *SPARSE]
    types = dict.fromkeys(names, pa.binary()) | {name: pa.int64() for name in names[: NUM_DENSE + 1]}
    table = csv.read_csv(
        pa.py_buffer(lines),
        read_options=csv.ReadOptions(use_threads=False, block_size=len(lines) + 1, column_names=names),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False, double_quote=False, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(
            column_types=types, include_columns=columns, null_values=[""], strings_can_be_null=False, check_utf8=False
        ),
    ).combine_chunks()
    if table.num_rows != num_lines:
        raise ValueError("a line holds a carriage return")
    return table


def hash_columns(columns: list[Any]) -> Ids:
    """Turns columns of 8 hex digits or nothing into i64 [columns, n], 0 to 2^32 - 1. Raises ValueError for others."""
    num_rows = len(columns[0])
    offsets = np.stack(
        [np.frombuffer(own.buffers()[1], np.int32)[own.offset : own.offset + num_rows + 1] for own in columns]
    )
    lengths = np.diff(offsets, axis=1)
    present = lengths == 8
    if not (present | (lengths == 0)).all():
        raise ValueError("a hash does not have 8 digits")
    texts = [
        np.frombuffer(own.buffers()[2] or b"", np.uint8)[at[0] : at[-1]]
        for own, at in zip(columns, offsets, strict=True)
    ]
    pairs = HEX_PAIRS.take(np.concatenate(texts).view("<u2"))
    if (pairs == INVALID).any():
        raise ValueError("a hash holds a character that is not a hex digit")
    hashes = np.zeros(lengths.shape, np.int64)
    hashes[present] = pairs.astype(np.uint8).view(">u4")
    return hashes


def remainders(hashes: Ids, moduli: Ids) -> Ids:
    """Reduces each column modulo its modulus. Divides, because numpy vectorizes division but not the remainder."""
    return np.stack([column - column // modulus * modulus for column, modulus in zip(hashes, moduli, strict=True)])


def dense_columns(columns: list[Any]) -> Floats:
    values = np.stack([(own.fill_null(0) if own.null_count else own).to_numpy() for own in columns])
    return np.ascontiguousarray(np.log(np.maximum(values, 0) + 1.0).astype(np.float32).T)
