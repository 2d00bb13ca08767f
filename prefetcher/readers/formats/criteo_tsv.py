"""Reads Criteo's TSV: label, 13 integers, 26 hashes of 8 hex digits, between tabs, without a header; plain or gzip.

Any field except the label may be empty.

    dense = log(max(x, 0) + 1) in float64, rounded to float32; empty = 0
    id    = hash mod num_embeddings, unsigned; empty = 0

Explains why a line is not Criteo TSV, by reading field by field after the fast parser has refused its block.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import Ids
from rowcast.prefetcher.readers.copies import CopiedFiles, TextRules, batches_of_lines, each_a_line
from rowcast.prefetcher.readers.id_check import (
    IdCheck,
    Location,
    dense_names,
    job_features,
    numbered_columns,
    refuse_weights,
)
from rowcast.prefetcher.readers.reader import Columns
from rowcast.prefetcher.readers.row_reader import ColumnRows, RowReader, open_files
from rowcast.prefetcher.readers.text_files import lines_of, refuse_line
from rowcast.protocol.batch import Lookups, Samples
from rowcast.runtime.arrays import F32, U16, U32

NUM_DENSE, NUM_SPARSE = 13, 26
NUM_FIELDS = 1 + NUM_DENSE + NUM_SPARSE
HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")


def line_error(line: bytes) -> str | None:
    """Returns the sentence after the line's number, or None for a good line."""
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != NUM_FIELDS:
        return (
            f": {len(fields)} fields between tabs instead of {NUM_FIELDS} "
            f"(label, {NUM_DENSE} integers, {NUM_SPARSE} hashes)"
        )
    if fields[0] not in (b"0", b"1"):
        return f", column label: {shown(fields[0])} is not 0 or 1"
    for i, field in enumerate(fields[1 : 1 + NUM_DENSE]):
        if field and not (field.removeprefix(b"-").isdigit() and -(2**63) <= int(field) < 2**63):
            return f", column int_{i}: {shown(field)} is not an integer of 64 bits"
    for i, field in enumerate(fields[1 + NUM_DENSE :]):
        if field and (len(field) != 8 or not HEX_DIGITS.issuperset(field)):
            return f", column cat_{i}: {shown(field)} is not 8 hex digits"
    return None


def shown(field: bytes) -> str:
    return repr(field[:40].decode("utf-8", "replace"))


DENSE = [f"int_{i}" for i in range(NUM_DENSE)]
SPARSE = [f"cat_{i}" for i in range(NUM_SPARSE)]
INVALID = 0xFFFF


def hex_pairs() -> U16:
    """Maps two ASCII hex digits, read as a little-endian uint16, to their value or INVALID. u16 [65536]."""
    digit = np.full(256, INVALID, np.uint32)
    for text in (b"0123456789abcdef", b"0123456789ABCDEF"):
        digit[list(text)] = np.arange(16)
    values = digit[None, :] << 4 | digit[:, None]  # the first digit is the low byte
    return np.where(values < 256, values, INVALID).astype(np.uint16).ravel()


HEX_PAIRS = hex_pairs()


def open_reader(job: Job, columns: Columns = "all") -> RowReader:
    """Raises ConfigError for a missing path or a feature that is not cat_0 to cat_25, DataError for an empty or torn
    file."""
    refuse_weights(job)
    numbered_columns(job, NUM_SPARSE, "Criteo TSV")
    ids = IdCheck(job)
    return open_files(job, ids, partial(rows_of, job, ids, columns))


def rows_of(job: Job, ids: IdCheck, part: Columns, paths: list[Path]) -> ColumnRows:
    names: dict[Columns, list[str]] = {"dense": ["label", *DENSE], "ids": job.features}
    names["all"] = [*names["dense"], *names["ids"]]
    columns = [*names["dense"], *dict.fromkeys(SPARSE[i] for i in sorted(map(SPARSE.index, job.features)))]
    rules = TextRules(
        known=["criteo-tsv", columns],
        header_lines=0,
        columns=partial(batches_of_lines, partial(decode, columns)),
        place=each_a_line,
    )
    moduli = [feature.num_embeddings for feature in job_features(job)]
    decoder = TsvDecoder(job.features, moduli)
    return ColumnRows(CopiedFiles(job, paths, rules), names[part], decoder, dense_names(NUM_DENSE), part)


class TsvDecoder:
    def __init__(self, features: list[str], moduli: list[int]) -> None:
        self._features, self._moduli = features, moduli

    def dense(self, table: Any, location: Location) -> Samples:
        return Samples(
            dense=np.stack([table[name].to_numpy() for name in DENSE], axis=1), labels=table["label"].to_numpy()
        )

    def lengths(self, table: Any) -> dict[str, Ids]:
        return {}

    def ids(self, table: Any, location: Location) -> Lookups:
        columns = zip((table[name].to_numpy() for name in self._features), self._moduli, strict=True)
        ids = np.concatenate([remainder(column, modulus) for column, modulus in columns])
        return Lookups(size=table.num_rows, ids=ids)


def decode(names: list[str], lines: bytes, num_lines: int, location: Location) -> Any:
    """Returns a pyarrow.RecordBatch of typed columns: f32, and of hashes u32, with 0 for a missing one."""
    try:
        table = parse(lines, num_lines, names)
        sparse = [name for name in names if name in SPARSE]
        hashes = hash_columns([table[name].chunk(0) for name in sparse])
    except (pa.ArrowInvalid, ValueError) as error:
        raise refuse_line(lines_of(lines), location, str(error), line_error) from None
    labels = table["label"].to_numpy()
    if table["label"].null_count or not ((labels == 0) | (labels == 1)).all():
        raise refuse_line(lines_of(lines), location, "a label is not 0 or 1", line_error)
    dense = {name: logarithms(table[name].chunk(0)) for name in DENSE}
    return pa.RecordBatch.from_pydict(
        {"label": labels.astype(np.float32), **dense, **dict(zip(sparse, hashes, strict=True))}
    )


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


def hash_columns(columns: list[Any]) -> U32:
    """Turns columns of 8 hex digits or nothing into u32 [columns, n], 0 to 2^32 - 1. Raises ValueError for others."""
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
    hashes = np.zeros(lengths.shape, np.uint32)
    hashes[present] = pairs.astype(np.uint8).view(">u4")
    return hashes


def remainder(hashes: U32, modulus: int) -> Ids:
    """Divides, because numpy vectorizes division but not the remainder."""
    if modulus >= 2**32:
        return hashes.astype(np.int64)
    divisor = np.uint32(modulus)
    return (hashes - hashes // divisor * divisor).astype(np.int64)


def logarithms(column: Any) -> F32:
    values = (column.fill_null(0) if column.null_count else column).to_numpy()
    rounded: F32 = np.log(np.maximum(values, 0) + 1.0).astype(np.float32)
    return rounded
