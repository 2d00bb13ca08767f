"""Looks at every row of files of CSV and Parquet: what each column holds, its exceptions, range and distinct values.

Memory does not grow with the data: a share of the values' hashes is kept, and halved whenever there are too many.
Errors are those of a run.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from rowcast.analysis.progress import AnalysisProgress, Tick
from rowcast.job.formats import FORMATS
from rowcast.prefetcher.readers.arrow_rows import bag_lengths, is_list, lookup_location
from rowcast.prefetcher.readers.column_roles import require_single
from rowcast.prefetcher.readers.data_files import data_files, is_gzip
from rowcast.prefetcher.readers.formats.csv import CsvLayout, beginning, decode, split_cells
from rowcast.prefetcher.readers.formats.csv_line import FALSE, TRUE, Cell
from rowcast.prefetcher.readers.formats.parquet_files import ParquetFiles
from rowcast.prefetcher.readers.hashed_ids import can_hash, value_bytes
from rowcast.prefetcher.readers.id_check import Location
from rowcast.prefetcher.readers.text_files import CHUNK_BYTES, first_lines, open_text, whole_lines
from rowcast.runtime.arrays import F64, I64, U64, Bools
from rowcast.runtime.errors import ConfigError, DataError

Kind = Literal["integer", "number", "time", "text", "other"]
Hashes = U64
TEXT = "text"  # the type of every column of CSV
DELIMITERS = (",", ";", "\t", "|")
LIST_SEPARATOR = "|"
PARQUET_ROWS = 65536  # read together
MOST_HASHES = 2**18  # kept per column
FEW = 0.1  # this share of a column's cells or less are exceptions to the kind of the others
PADDED = r"^\s*-?0\d+\s*$"  # zip codes and other numbers that are never added
INTEGER, NUMBER = r"^\s*-?\d+\s*$", r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
# other cells in a column of numbers: none there, or with a comma or a unit
NO_NUMBER = (
    r"^(?i:\s*([-+]?(nan|inf|infinity)|null|none|na|n/a|#n/a|\\n|-|\?)\s*"
    r"|[^\w.,#]{0,4}-?\d+([., ']\d{3})*([.,]\d+)?[^\w.,#]{0,4})$"
)
TIME = r"^(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})([ T].*)?$"


@dataclass(kw_only=True, slots=True)
class Exceptions:
    """Cells to which a rule does not apply: how many, and the first."""

    count: int = 0
    where: str = ""
    value: str = ""

    def add(self, values: Any, own: Any, counts: I64, odd: Bools, location: Location) -> None:
        """`own` and `counts`: the distinct values of `values`; those of them that are `odd`."""
        if not odd.any():
            return
        if not self.count:
            first = int(np.argmax(pc.is_in(values, value_set=own.filter(pa.array(odd))).to_numpy(zero_copy_only=False)))
            self.where, self.value = location(first), shown(values[first].as_py())
        self.count += int(counts[odd].sum())

    def of(self, total: int, what: str) -> str:
        share = f"{self.count:,} of {total:,} values ({100 * self.count / total:.3g} %)"
        first = f"{self.value!r} in {self.where}" if self.value else f"in {self.where}"
        return f"{share} {'is' if self.count == 1 else 'are'} {what}, the first {first}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnFacts:
    name: str
    kind: Kind
    type: str  # as in Parquet, or TEXT
    is_list: bool
    num_values: int  # values of lists count one by one, missing ones not at all
    missing: Exceptions
    odd: Exceptions  # of CSV: cells that are no number, in a column of timestamps no timestamp
    fractions: Exceptions  # of CSV: numbers that are not written as integers
    not_binary: Exceptions  # cells that are no label
    binary: str  # what labels are called in this column
    distinct: int  # of values; an estimate beyond 262,144
    low: float  # of integers and numbers; 0 without values
    high: float
    mean: float
    whole: bool  # every number is integral
    words: bool  # True and False
    padded: bool  # of CSV: integers that begin with 0

    @property
    def is_binary(self) -> bool:
        numbers = self.kind in ("integer", "number") and self.whole and not self.is_list
        return numbers and not self.missing.count and not self.odd.count and (self.low, self.high) == (0, 1)

    @property
    def num_cells(self) -> int:
        return self.num_values + self.missing.count


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
    """One column, added array by array. What kind a CSV column has is known at its end."""

    def __init__(self, name: str, kind: Kind, type_name: str, separator: str | None = None) -> None:
        """`separator`: splits a text cell into a list, if it occurs in one."""
        self.name, self._kind, self._type, self._separator = name, kind, type_name, separator
        self._is_list, self._padded, self._all_whole = False, False, True
        self._num_values, self._total = 0, 0.0
        self._range: tuple[float, float] | None = None
        self._cells = dict.fromkeys(("integer", "number", "true", "false", "no number", "time", "text"), 0)  # of CSV
        self._missing, self._missing_items, self._not_binary = Exceptions(), Exceptions(), Exceptions()
        self._not_number, self._not_time, self._fractions = Exceptions(), Exceptions(), Exceptions()
        self._not_word = Exceptions()
        self._distinct = Distinct()

    def add(self, values: Any, location: Location) -> None:
        """`location(i)`: the place of row i of `values`."""
        if self._separator and pc.any(pc.match_substring(values, self._separator)).as_py():
            values = split_cells(values, Cell(kind="text", separator=self._separator))
        missing = self._missing
        if is_list(values.type):
            location = lookup_location(bag_lengths(values), location)
            self._is_list, values, missing = True, values.flatten(), self._missing_items
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if values.null_count:
            first = missing.where or location(int(np.argmax(values.is_null().to_numpy(zero_copy_only=False))))
            missing.count, missing.where = missing.count + values.null_count, first
        self._num_values += len(values) - values.null_count
        if self._kind == "other" or len(values) == values.null_count:
            return
        counted = values.drop_null().value_counts()
        own, counts = counted.field("values"), counted.field("counts").to_numpy()
        tally = partial(self._tally, values, own, counts, location)
        if self._type == TEXT:
            self._add_cells(own, counts, tally)
        elif self._kind in ("integer", "number"):
            numbers = as_floats(own)
            tally(missing, ~np.isfinite(numbers))  # training refuses NaN too
            self._num_values -= int(counts[~np.isfinite(numbers)].sum())
            self._add_numbers(numbers[np.isfinite(numbers)], counts[np.isfinite(numbers)])
            tally(self._not_binary, np.isfinite(numbers) & ~np.isin(numbers, (0, 1)))
        else:
            tally(self._not_binary, np.ones(len(own), bool))
        if can_hash(own.type, by_value=False):
            texts = value_bytes(own, by_value=False)
            self._distinct.add(np.fromiter(map(xxhash.xxh3_64_intdigest, texts), np.uint64, len(texts)))

    def _tally(self, values: Any, own: Any, counts: I64, location: Location, to: Exceptions, odd: Bools) -> None:
        to.add(values, own, counts, odd, location)

    def _add_cells(self, own: Any, counts: I64, tally: Callable[[Exceptions, Bools], None]) -> None:
        """Sorts distinct cells of CSV by what they look like."""
        is_number, is_integer = matches(own, NUMBER), matches(own, INTEGER)
        is_true, is_false = one_of(own, TRUE), one_of(own, FALSE)
        is_time, is_no_number = matches(own, TIME), matches(own, NO_NUMBER) & ~is_number
        numbers = own.filter(pa.array(is_number)).cast(pa.string())
        floats = as_floats(pc.utf8_trim_whitespace(numbers).cast(pa.float64()))
        self._add_numbers(floats, counts[is_number])
        is_text = ~(is_number | is_true | is_false | is_time | is_no_number)
        for kind, of_kind in zip(
            self._cells,
            (is_integer, is_number & ~is_integer, is_true, is_false, is_no_number, is_time, is_text),
            strict=True,
        ):
            self._cells[kind] += int(counts[of_kind].sum())
        self._padded = self._padded or bool(matches(own, PADDED).any())
        is_binary = np.zeros(len(own), bool)
        is_binary[is_number] = np.isin(floats, (0, 1))
        tally(self._not_binary, ~is_binary)
        tally(self._not_word, ~(is_true | is_false))
        tally(self._not_number, ~is_number)
        tally(self._not_time, ~is_time)
        tally(self._fractions, is_number & ~is_integer)

    def _add_numbers(self, numbers: F64, counts: I64) -> None:
        if len(numbers):
            low, high = self._range or (np.inf, -np.inf)
            self._range = min(low, float(numbers.min())), max(high, float(numbers.max()))
            self._total += float(numbers @ counts)
            self._all_whole = self._all_whole and bool((numbers == np.floor(numbers)).all())

    def _kind_of_cells(self) -> tuple[Kind, Exceptions]:
        """The kind, and the cells that are no numbers, or no timestamps where most are."""
        cells, enough = self._cells, (1 - FEW) * self._num_values
        numbers = cells["integer"] + cells["number"]
        if self._num_values in (cells["integer"], cells["true"] + cells["false"]):
            return "integer", Exceptions()
        if numbers == self._num_values:
            return "number", Exceptions()
        if numbers + cells["no number"] >= enough:
            return "number", self._not_number
        return ("time", self._not_time) if cells["time"] >= enough else ("text", self._not_number)

    def column(self) -> ColumnFacts:
        trues, falses = self._cells["true"], self._cells["false"]
        words = 0 < trues + falses == self._num_values
        mostly_words = 0 < trues + falses >= (1 - FEW) * self._num_values
        kind, odd = self._kind_of_cells() if self._type == TEXT else (self._kind, Exceptions())
        low, high = (float(not falses), float(trues > 0)) if words else self._range or (0.0, 0.0)
        return ColumnFacts(
            name=self.name,
            kind=kind if self._num_values else "other",
            type=self._type,
            is_list=self._is_list,
            num_values=self._num_values,
            missing=self._missing_items if self._is_list else self._missing,
            odd=odd,
            fractions=self._fractions,
            not_binary=self._not_word if mostly_words else self._not_binary,
            binary="yes nor no" if mostly_words else "0 nor 1",
            distinct=self._distinct.count,
            low=low,
            high=high,
            mean=(trues if words else self._total) / max(1, self._num_values),
            whole=self._all_whole,
            words=words,
            padded=self._padded,
        )


def matches(cells: Any, pattern: str) -> Bools:
    mask: Bools = pc.match_substring_regex(cells, pattern).to_numpy(zero_copy_only=False)
    return mask


def one_of(cells: Any, words: tuple[str, ...]) -> Bools:
    mask: Bools = pc.is_in(cells, value_set=pa.array(words, cells.type)).to_numpy(zero_copy_only=False)
    return mask


def shown(value: Any) -> str:
    return (value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value))[:40]


def as_floats(numbers: Any) -> F64:
    floats: F64 = numbers.cast(pa.float64(), safe=False).to_numpy()
    return floats


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
    return "text" if can_hash(single, by_value=False) else "other"
