"""The contents of CSV and Parquet columns: kind, range, missing and distinct values, over every row.

Memory does not grow with the data: a share of the values' hashes is kept, and halved whenever there are too many.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from rowcast.analysis.progress import AnalysisProgress, Tick
from rowcast.job.formats import FORMATS
from rowcast.prefetcher.readers.arrow_rows import is_list
from rowcast.prefetcher.readers.data_files import data_files
from rowcast.prefetcher.readers.formats.csv import (
    HEADER_BYTES,
    CsvLayout,
    beginning,
    decode,
    require_header,
    split_cells,
)
from rowcast.prefetcher.readers.formats.csv_line import FALSE, TRUE, Cell
from rowcast.prefetcher.readers.formats.parquet_files import file_facts
from rowcast.prefetcher.readers.hashed_ids import can_hash, value_bytes
from rowcast.prefetcher.readers.id_check import Location
from rowcast.prefetcher.readers.text_files import open_text, whole_lines
from rowcast.runtime.arrays import F64, I64, U64
from rowcast.runtime.errors import ConfigError, DataError, RowcastError

Kind = Literal["integer", "number", "time", "text", "other"]
Hashes = U64
TEXT = "text"  # the type of every column of CSV
MOST_HASHES = 2**18  # kept per column
DELIMITERS = (",", ";", "\t", "|")
LIST_SEPARATOR = "|"
PARQUET_ROWS = 65536  # read together


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnFacts:
    name: str
    kind: Kind
    type: str  # as in Parquet, or TEXT
    is_list: bool
    num_values: int  # values of lists count one by one, missing ones not at all
    missing: int
    distinct: int  # of values; an estimate beyond 262,144
    low: float  # of integers and numbers; 0 without values
    high: float
    mean: float
    whole: bool  # every number is integral
    words: bool  # True and False

    @property
    def is_binary(self) -> bool:
        numbers = self.kind in ("integer", "number") and self.whole and not self.is_list
        return numbers and not self.missing and (self.low, self.high) == (0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    path: str  # as given
    format: Literal["csv", "parquet"]
    delimiter: str
    num_files: int
    num_rows: int
    columns: list[ColumnFacts]

    def named(self, name: str) -> ColumnFacts | None:
        return next((column for column in self.columns if column.name == name), None)


class Distinct:
    """Estimates the number of distinct hashes from those whose low bits are 0, with more bits as their number grows."""

    def __init__(self) -> None:
        self._kept: Hashes = np.zeros(0, np.uint64)
        self._bits = 0

    def add(self, hashes: Hashes) -> None:
        self._kept = np.union1d(self._kept, self._sampled(hashes))
        while len(self._kept) > MOST_HASHES:
            self._bits += 1
            self._kept = self._sampled(self._kept)

    def _sampled(self, hashes: Hashes) -> Hashes:
        sampled: Hashes = hashes[hashes & np.uint64(2**self._bits - 1) == 0]
        return sampled

    @property
    def count(self) -> int:
        return len(self._kept) << self._bits


class Watch:
    """One column, added array by array. A CSV column gets the first kind that fits all values so far."""

    def __init__(self, name: str, kind: Kind, type_name: str, separator: str | None = None) -> None:
        """`separator`: splits a text cell into a list, if it occurs in one."""
        self.name, self._kind, self._type, self._separator = name, kind, type_name, separator
        self._missing_items = 0
        self._is_list = self._whole = self._words = False
        self._num_values, self._missing, self._total = 0, 0, 0.0
        self._range: tuple[float, float] | None = None
        self._all_whole, self._distinct = True, Distinct()

    def add(self, values: Any) -> None:
        if self._separator and pc.any(pc.match_substring(values, self._separator)).as_py():
            values = split_cells(values, Cell(kind="text", separator=self._separator))
        if is_list(values.type):
            self._is_list, values = True, values.flatten()
            self._missing_items += values.null_count
        else:
            self._missing += values.null_count
        self._num_values += len(values) - values.null_count
        if self._kind == "other" or len(values) == values.null_count:
            return
        counted = (
            (values.dictionary_decode() if pa.types.is_dictionary(values.type) else values).drop_null().value_counts()
        )
        own, counts = counted.field("values"), counted.field("counts").to_numpy()
        numbers = self._numbers(own)
        if numbers is not None:
            self._add_numbers(numbers, counts)
        if can_hash(own.type):
            texts = value_bytes(own)
            self._distinct.add(np.fromiter(map(xxhash.xxh3_64_intdigest, texts), np.uint64, len(texts)))

    def _numbers(self, own: Any) -> F64 | None:
        """Distinct values as numbers; None if they are not numbers."""
        if self._type != TEXT:
            return as_floats(own) if self._kind in ("integer", "number") else None
        try:
            own = own.cast(pa.string())
        except pa.ArrowInvalid:  # not UTF-8: the bytes are hashed
            self._kind = "text"
        while self._kind in ("integer", "number"):
            words = set(own.to_pylist())
            if self._kind == "integer" and words <= {*TRUE, *FALSE}:
                self._words = True
                return np.array([float(word in TRUE) for word in own.to_pylist()])
            try:
                numbers = own.cast(pa.int64() if self._kind == "integer" else pa.float64())
                return as_floats(numbers)
            except pa.ArrowInvalid:
                self._kind = "number" if self._kind == "integer" else "time"
        if self._kind == "time":
            try:
                own.cast(pa.timestamp("us"))
            except pa.ArrowInvalid:
                self._kind = "text"
        return None

    def _add_numbers(self, numbers: F64, counts: I64) -> None:
        finite = np.isfinite(numbers)
        self._missing += int(counts[~finite].sum())  # NaN, which training refuses too
        self._num_values -= int(counts[~finite].sum())
        numbers, counts = numbers[finite], counts[finite]
        if len(numbers):
            low, high = self._range or (np.inf, -np.inf)
            self._range = min(low, float(numbers.min())), max(high, float(numbers.max()))
            self._total += float(numbers @ counts)
            self._all_whole = self._all_whole and bool((numbers == np.floor(numbers)).all())

    def column(self) -> ColumnFacts:
        low, high = self._range or (0.0, 0.0)
        return ColumnFacts(
            name=self.name,
            kind=self._kind if self._num_values else "other",
            type=self._type,
            is_list=self._is_list,
            num_values=self._num_values,
            missing=self._missing_items if self._is_list else self._missing,
            distinct=self._distinct.count,
            low=low,
            high=high,
            mean=self._total / max(1, self._num_values),
            whole=self._all_whole,
            words=self._words,
        )


def look_at(path: str, progress: AnalysisProgress) -> DataSet:
    """Reads every row of the files. Raises ConfigError for a path of neither kind, DataError for files that a run would
    refuse.
    """
    names = {format: FORMATS[format].file_names for format in ("csv", "parquet")}
    files = {format: found(path, pattern) for format, pattern in names.items()}
    if not files["csv"] and not files["parquet"]:
        data_files(path, "--data", "|".join(f"({pattern})" for pattern in names.values()))  # raises if nothing is there
        raise ConfigError(
            f"--data {path}: neither CSV (.csv, .csv.gz) nor Parquet (.parquet, .pq); other formats: docs/job-file.md"
        )
    if files["csv"] and files["parquet"]:
        raise ConfigError(
            f"--data {path}: the folder has CSV and Parquet files; name files of one kind, for example {path}/*.csv"
        )
    tick = progress.begin("reading the data", len(files["csv"] + files["parquet"]))
    return look_at_csv(path, files["csv"], tick) if files["csv"] else look_at_parquet(path, files["parquet"], tick)


def found(path: str, pattern: str) -> list[Path]:
    try:
        return [file for file in data_files(path, "--data", pattern) if re.fullmatch(pattern, file.name)]
    except RowcastError:
        return []


def look_at_csv(path: str, files: list[Path], tick: Tick) -> DataSet:
    with open_text(files[0]) as stream:
        first_line = stream.readline(HEADER_BYTES)
    delimiter = max(DELIMITERS, key=lambda each: first_line.count(each.encode()))
    header, _ = beginning(files[0], delimiter)
    layout = CsvLayout(header=header, delimiter=delimiter, cells={name: Cell(kind="text") for name in header})
    watches = [Watch(name, "integer", TEXT, LIST_SEPARATOR if delimiter != LIST_SEPARATOR else None) for name in header]
    num_rows = 0
    for file in files:
        require_header(file, beginning(file, delimiter)[0], files[0], header)
        line = 1
        with open_text(file) as stream:
            for text in whole_lines(stream, file):
                rows = text.partition(b"\n")[2] if line == 1 else text
                rows = rows + b"\n" if rows and not rows.endswith(b"\n") else rows
                num_lines = rows.count(b"\n")
                first = line + (line == 1)
                if num_lines:
                    piece = decode(rows, num_lines, layout, lines_of(file, first))
                    for watch in watches:
                        watch.add(piece[watch.name])
                line, num_rows = first + num_lines, num_rows + num_lines
        tick()
    return DataSet(
        path=path,
        format="csv",
        delimiter=delimiter,
        num_files=len(files),
        num_rows=num_rows,
        columns=[watch.column() for watch in watches],
    )


def lines_of(file: Path, first: int) -> Location:
    """Names lines for errors; the first is line `first` of the file."""
    return lambda i: f"{file}, line {first + i}"


def look_at_parquet(path: str, files: list[Path], tick: Tick) -> DataSet:
    schemas, num_rows = zip(*((schema, sum(counts)) for schema, counts in map(file_facts, files)), strict=True)
    watches = [Watch(field.name, kind_of(field.type), str(field.type)) for field in schemas[0]]
    for file, schema in zip(files, schemas, strict=True):
        lacking = [watch.name for watch in watches if watch.name not in schema.names]
        if lacking:
            raise DataError(
                f"{file}: column {lacking[0]} is missing, but {files[0]} has it; give all files the same columns"
            )
        with pq.ParquetFile(file) as opened:
            for piece in opened.iter_batches(batch_size=PARQUET_ROWS):
                for watch in watches:
                    watch.add(piece[watch.name])
        tick()
    return DataSet(
        path=path,
        format="parquet",
        delimiter=",",
        num_files=len(files),
        num_rows=sum(num_rows),
        columns=[watch.column() for watch in watches],
    )


def as_floats(numbers: Any) -> F64:
    floats: F64 = numbers.cast(pa.float64(), safe=False).to_numpy()
    return floats


def kind_of(kind: Any) -> Kind:
    single = kind.value_type if is_list(kind) else kind
    if pa.types.is_integer(single) or pa.types.is_boolean(single):
        return "integer"
    if pa.types.is_floating(single):
        return "number"
    if pa.types.is_temporal(single):
        return "time"
    return "text" if can_hash(single) else "other"
