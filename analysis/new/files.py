"""Finds files of CSV and Parquet and shows every row to a watch for each column. Its errors are those of a run."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowcast.analysis.new.columns import NUMBER, TEXT, TIME, ColumnFacts, Kind, Watch
from rowcast.analysis.progress import AnalysisProgress, Tick
from rowcast.job.formats import FORMATS
from rowcast.prefetcher.readers.arrow_rows import is_list
from rowcast.prefetcher.readers.column_roles import require_single
from rowcast.prefetcher.readers.data_files import data_files, is_gzip
from rowcast.prefetcher.readers.formats.csv import CsvLayout, beginning, decode
from rowcast.prefetcher.readers.formats.csv_line import Cell
from rowcast.prefetcher.readers.formats.parquet_files import ParquetFiles
from rowcast.prefetcher.readers.hashed_ids import can_hash
from rowcast.prefetcher.readers.id_check import Location
from rowcast.prefetcher.readers.text_files import CHUNK_BYTES, first_lines, open_text, whole_lines
from rowcast.runtime.errors import ConfigError, DataError

DELIMITERS = (",", ";", "\t", "|")
LIST_SEPARATOR = "|"
PARQUET_ROWS = 65536  # read together


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    path: str  # as given
    format: Literal["csv", "parquet"]
    delimiter: str
    files: list[Path]  # in reading order, with those that have no row
    num_rows: int
    columns: list[ColumnFacts]

    def named(self, name: str) -> ColumnFacts | None:
        return next((column for column in self.columns if column.name == name), None)


def look_at(path: str, progress: AnalysisProgress) -> DataSet:
    """Reads every row of the files. Raises ConfigError for a path of neither kind, DataError for files that a run would
    refuse."""
    names = {kind: FORMATS[kind].file_names for kind in ("csv", "parquet")} | {
        "tsv": r".*\.tsv",
        "tsv.gz": r".*\.tsv\.gz",
    }
    every = data_files(path, "--data", "|".join(names.values()), by_name=False, apart="")
    files = {
        kind: [own for own in every if re.fullmatch(f"(?i:{pattern})", own.name)] for kind, pattern in names.items()
    }
    for kind in ("tsv", "tsv.gz"):  # a job must name these, as its reader takes `.csv` from a folder
        if not files["csv"] and not files["parquet"] and files[kind]:
            path, files["csv"] = f"{path}/*.{kind}" if Path(path).is_dir() else path, files[kind]
    if not files["csv"] and not files["parquet"]:
        raise ConfigError(
            f"--data {path}: neither CSV (.csv, .tsv, .csv.gz) nor Parquet (.parquet, .pq); rename it, or write the "
            "job yourself: docs/job-file.md"
        )
    if files["csv"] and files["parquet"]:
        raise ConfigError(
            f"--data {path}: the folder has CSV and Parquet files; name files of one kind, for example {path}/*.csv"
        )
    begin = partial(progress.begin, "looking at every row, in pieces")
    return look_at_csv(path, files["csv"], begin) if files["csv"] else look_at_parquet(path, files["parquet"], begin)


def look_at_csv(path: str, files: list[Path], begin: Callable[[int | None], Tick]) -> DataSet:
    sizes = [None if is_gzip(file) else -(-file.stat().st_size // CHUNK_BYTES) for file in files]
    tick = begin(None if None in sizes else sum(size or 0 for size in sizes))
    first_line = next(filter(None, (first_lines(file)[0] for file in files)), b"")
    delimiter = max(DELIMITERS, key=lambda each: first_line.count(each.encode()))
    filled, header, first_row = beginning(files, delimiter)
    require_names(filled[0], header, first_row)
    layout = CsvLayout(header=header, delimiter=delimiter, cells={name: Cell(kind="text") for name in header})
    watches = [Watch(name, "integer", TEXT, LIST_SEPARATOR if delimiter != LIST_SEPARATOR else None) for name in header]
    num_rows = 0
    for file in filled:
        line = 1
        with open_text(file) as stream:
            for text in whole_lines(stream, file):
                rows = text.partition(b"\n")[2] if line == 1 else text
                rows = rows + b"\n" if rows and not rows.endswith(b"\n") else rows
                num_lines = rows.count(b"\n")
                first = line + (line == 1)
                if num_lines:
                    piece = decode(rows, num_lines, layout, lines_of(file, first))
                    require_lines(rows, lines_of(file, first))
                    for watch in watches:
                        watch.add(piece[watch.name], lines_of(file, first))
                line, num_rows = first + num_lines, num_rows + num_lines
                tick()
    return DataSet(
        path=path,
        format="csv",
        delimiter=delimiter,
        files=files,
        num_rows=num_rows,
        columns=[watch.column() for watch in watches],
    )


def require_names(path: Path, header: list[str], first_row: dict[str, str]) -> None:
    """Raises DataError if the first line looks as the second does, and not like names."""
    if len(header) == 1:
        raise DataError(
            f"{path}, line 1: the header {header[0][:40]!r} names one column; separate columns by a comma, semicolon, "
            "tab or |"
        )
    values = [name for name in header if looks_like_a_value(name)]
    alike = all(not cell or looks_like_a_value(name) == looks_like_a_value(cell) for name, cell in first_row.items())
    if values and alike and header != [str(number) for number in range(len(header))]:
        raise DataError(
            f"{path}, line 1: the header holds values, such as {values[0][:40]!r}; add a line above with the names of "
            "the columns"
        )


def looks_like_a_value(cell: str) -> bool:
    return any(re.match(pattern, cell) for pattern in (NUMBER, TIME))


def require_lines(rows: bytes, location: Location) -> None:
    """Raises DataError for an empty line, in which the fast parser sees missing values."""
    whole = b"\n" + rows.replace(b"\r", b"")
    if (at := whole.find(b"\n\n")) >= 0:
        raise DataError(f"{location(whole[:at].count(bytes([10])))}: the line is empty; remove it")


def lines_of(file: Path, first: int) -> Location:
    """Names lines for errors; the first is line `first` of the file."""
    return lambda i: f"{file}, line {first + i}"


def rows_of(file: Path, first: int) -> Location:
    return lambda i: f"{file}, row {first + i}"


def look_at_parquet(path: str, files: list[Path], begin: Callable[[int | None], Tick]) -> DataSet:
    found = ParquetFiles(files)
    tick = begin(sum(-(-int(count) // PARQUET_ROWS) for count in np.diff(found.bounds)))
    watches = [Watch(field.name, kind_of(field.type), str(field.type)) for field in found.schemas[0]]
    for file, schema in zip(found.paths, found.schemas, strict=True):
        require_single(file, schema.names, schema.names)
        lacking = [watch.name for watch in watches if watch.name not in schema.names]
        if lacking:
            raise DataError(
                f"{file}: column {lacking[0]} is missing, but {found.paths[0]} has it; give all files the same columns"
            )
        first = 0
        with pq.ParquetFile(file) as opened:
            for piece in opened.iter_batches(batch_size=PARQUET_ROWS):
                for watch in watches:
                    watch.add(piece[watch.name], rows_of(file, first))
                first += piece.num_rows
                tick()
    return DataSet(
        path=path,
        format="parquet",
        delimiter=",",
        files=files,
        num_rows=found.num_rows,
        columns=[watch.column() for watch in watches],
    )


def kind_of(kind: Any) -> Kind:
    single = kind.value_type if is_list(kind) else kind
    if pa.types.is_integer(single) or pa.types.is_boolean(single):
        return "integer"
    if pa.types.is_floating(single):
        return "number"
    if pa.types.is_temporal(single):
        return "time"
    return "text" if can_hash(single) else "other"
