"""What each column of a file holds: kinds of values, exceptions with their places, range, distinct values.

Every value is looked at as the text that CSV has for it, and whole numbers by their value, so a frame has one set of
facts in all formats: integers with empty cells, with nulls, and pandas' 35.0 beside NaN are whole numbers with missing
values. Memory does not grow with the data: of distinct values a share of the hashes is kept, and of rows a sample.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rowcast.job.formats import DecimalMark
from rowcast.prefetcher.readers.arrow_rows import WRITTEN, bag_lengths, is_list, lookup_location, written_numbers
from rowcast.prefetcher.readers.formats.csv import FALSE, TRUE, Cell, lists_of, without_empty
from rowcast.prefetcher.readers.hashed_ids import is_text
from rowcast.prefetcher.readers.id_check import Location
from rowcast.runtime.arrays import F64, I64, U64, Bools

Kind = Literal["integer", "number", "time", "text", "other"]
MOST_HASHES = 2**18  # kept per column
MOST_SAMPLED = 2**16  # rows of a sample; between half as many and all
MOST_VALUES = 64  # `--label label=2` takes a column with at most so many different values
FEW = 0.1  # this share of a column's cells or less are exceptions to the kind of the others
PADDED = r"^\s*-?0\d+\s*$"  # zip codes and other numbers that are never added
INTEGER, NUMBER = r"^\s*-?\d+\s*$", WRITTEN[""]
WHOLE = r"^\s*(-?(?:0|[1-9][0-9]*))\.0*\s*$"  # 35.0, but not 00501
# in a column of numbers, a missing one
ABSENT = r"^\s*(?i:null|none|na|nan|n/a|#n/a|\\n|-|\?)?\s*$"
MONTH = r"(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
TIME = (
    r"^\s*\[?(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})|\d{1,2}:\d{2}(:\d{2})?|\d{8}T\d{4,6}"
    rf"|(\w{{3}}, )?\d{{1,2}}[-/ ]{MONTH}[-/ ,]+\d{{2,4}}"
    rf"|(\w{{3}} )?({MONTH}|\d\d) \d{{1,2}},? (\d{{4}}|[\d:]+ .*\d{{4}}))([ :T].*)?$"
)
PAIR = r"^[^:]+:-?(\d+\.?\d*|\.\d+)$"  # key:weight


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ColumnFacts:
    name: str
    kind: Kind  # whole numbers are `integer`, also those that are written as 35.0
    type: str  # in the file, for messages
    separator: str  # splits a cell into its items; "" if a cell is one value
    is_list: bool
    num_values: int  # values of lists count one by one, missing ones not at all
    missing: Exceptions
    absent: Exceptions  # cells such as `?` and `none` in a column of numbers
    absent_texts: list[str]  # the different texts of these cells, without surrounding spaces
    mark: DecimalMark  # the decimal mark, if some numbers have separators or units; else ""
    odd: Exceptions  # cells that are no number, in a column of timestamps no timestamp
    fractions: Exceptions  # numbers that are not whole
    not_binary: Exceptions  # cells that are no label
    binary: str  # what labels are called in this column
    distinct: int  # of values; an estimate beyond 262,144
    values: dict[str, int]  # each value and how often it occurs; empty if there are more than 64
    low: float  # the smallest number; 0 if there is none
    high: float  # the largest number
    whole: bool  # every number is integral
    words: bool  # True and False
    padded: bool  # integers that begin with 0
    plain: bool  # every number is written as an integer
    num_spaces: int  # in all text
    pairs: bool  # most values are a key and a weight
    numbers: F64  # a number for each row of the sample, NaN if its cell holds none; empty for lists

    @property
    def is_text(self) -> bool:
        """Whether values are text in a format with types, which its reader takes for no numbers."""
        return "string" in self.type

    @property
    def mark_of_text(self) -> DecimalMark:
        """The mark by which the numbers must be read; "" if the format or `map` makes numbers of them."""
        return "." if self.is_text and not (self.mark or self.words) else self.mark

    @property
    def is_flag(self) -> bool:
        is_whole = self.kind == "integer" or (self.kind == "number" and self.whole and not self.mark)
        numbers = is_whole and not self.is_list and not self.odd.count
        return numbers and self.low >= 0 and self.high <= 1

    @property
    def is_binary(self) -> bool:
        has_all = not self.missing.count and not self.absent.count
        return self.is_flag and has_all and (self.low, self.high) == (0, 1)

    @property
    def num_cells(self) -> int:
        return self.num_values + self.missing.count


class Distinct:
    """Estimates the number of distinct hashes from those whose low bits are 0, with more bits as their number grows."""

    def __init__(self) -> None:
        self._kept: U64 = np.zeros(0, np.uint64)
        self._bits = 0

    def add(self, hashes: U64) -> None:
        self._kept = np.union1d(self._kept, self._sampled(hashes))
        while len(self._kept) > MOST_HASHES:
            self._bits += 1
            self._kept = self._sampled(self._kept)

    def _sampled(self, hashes: U64) -> U64:
        sampled: U64 = hashes[hashes & np.uint64(2**self._bits - 1) == 0]
        return sampled

    @property
    def count(self) -> int:
        return len(self._kept) << self._bits


@dataclass(kw_only=True, slots=True)
class SampledCells:
    """Every `step`-th row; the step doubles whenever there are too many."""

    step: int = 1
    num_rows: int = 0
    parts: list[Any] = field(default_factory=list)

    def add(self, piece: Any) -> None:
        self.parts.append(
            piece.take(pa.array(range(-self.num_rows % self.step, piece.num_rows, self.step), pa.int64()))
        )
        self.num_rows += piece.num_rows
        while self.num_rows > self.step * MOST_SAMPLED:
            self.step *= 2
            self.parts = self.table.take(pa.array(range(0, self.table.num_rows, 2), pa.int64())).to_batches()

    @property
    def table(self) -> Any:
        return pa.Table.from_batches(self.parts).combine_chunks()


class Watch:
    """One column, added array by array. What kind of values it has is known at its end."""

    def __init__(self, name: str, type_name: str, kind: Kind, separator: str) -> None:
        """`kind`: of types whose values are not looked at; `separator`: splits text into lists, "" does not."""
        self.name, self._type, self._kind, self._separator = name, type_name, kind, separator
        self._is_list, self._padded, self._all_whole, self._plain = bool(separator), False, True, True
        self._num_values, self._num_pairs, self._num_spaces = 0, 0, 0
        self._range: tuple[float, float] | None = None
        self._cells = dict.fromkeys(("integer", "number", "true", "false", "absent", ".", ",", "time"), 0)
        self._missing, self._missing_items, self._not_binary = Exceptions(), Exceptions(), Exceptions()
        self._not_time, self._fractions, self._absent = Exceptions(), Exceptions(), Exceptions()
        self._not_number: dict[DecimalMark, Exceptions] = {"": Exceptions(), ".": Exceptions(), ",": Exceptions()}
        self._not_word, self._absent_texts = Exceptions(), set[str]()
        self._values: dict[str, int] = {}
        self._distinct = Distinct()

    def add(self, values: Any, location: Location) -> None:
        """`location(i)`: the place of row i of `values`."""
        missing = self._missing
        written = values.type.value_type if is_list(values.type) else values.type
        is_split = bool(self._separator) and is_text(written)
        self._plain = self._plain and (pa.types.is_integer(written) or pa.types.is_binary(written) or is_split)
        values = items_of(values, self._separator, self.name, location)
        if is_list(values.type):
            location = lookup_location(bag_lengths(values), location)
            self._is_list, values, missing = True, values.flatten(), self._missing_items
        values = as_cells(values) if self._kind == "text" else values
        if values.null_count:
            first = missing.where or location(int(np.argmax(values.is_null().to_numpy(zero_copy_only=False))))
            missing.count, missing.where = missing.count + values.null_count, first
        self._num_values += len(values) - values.null_count
        if self._kind == "text" and len(values) > values.null_count:
            counted = values.drop_null().value_counts()
            own, counts = counted.field("values"), counted.field("counts").to_numpy()
            self._add_cells(own, counts, lambda to, odd: to.add(values, own, counts, odd, location))

    def _add_cells(self, own: Any, counts: I64, tally: Callable[[Exceptions, Bools], None]) -> None:
        """Sorts distinct cells by what they look like."""
        is_written_whole, cells = matches(own, INTEGER), by_value(own)
        written = {mark: matches(cells, form) for mark, form in WRITTEN.items()}
        is_number, is_integer = written[""], matches(cells, INTEGER)
        written["."] |= is_number
        is_true, is_false = one_of(cells, TRUE), one_of(cells, FALSE)
        is_time, is_absent = matches(cells, TIME), matches(cells, ABSENT)
        floats = numbers_of(cells.filter(pa.array(is_number)), "")
        self._plain = self._plain and bool(is_written_whole[is_integer].all())
        self._add_numbers(floats)
        is_fraction = is_number & ~is_integer
        kinds = (is_integer, is_fraction, is_true, is_false, is_absent, written["."], written[","], is_time)
        for kind, of_kind in zip(self._cells, kinds, strict=True):
            self._cells[kind] += int(counts[of_kind].sum())
        self._absent_texts |= {
            text.decode("utf-8", "replace").strip() for text in cells.filter(pa.array(is_absent)).to_pylist()
        }
        self._padded = self._padded or bool(matches(cells, PADDED).any())
        self._num_pairs += int(counts[matches(cells, PAIR) & ~is_time].sum())
        self._num_spaces += int(pc.count_substring(cells, " ").to_numpy() @ counts)
        is_binary = np.zeros(len(own), bool)
        is_binary[is_number] = np.isin(floats, (0, 1))
        tally(self._not_binary, ~is_binary)
        tally(self._not_word, ~(is_true | is_false))
        for mark, exceptions in self._not_number.items():
            tally(exceptions, ~written[mark] & ~is_absent)
        tally(self._absent, is_absent)
        tally(self._not_time, ~is_time)
        tally(self._fractions, is_fraction)
        texts = cells.to_pylist()
        self._distinct.add(np.fromiter(map(xxhash.xxh3_64_intdigest, texts), np.uint64, len(texts)))
        if len(self._values) <= MOST_VALUES:
            for text, count in zip(texts[: MOST_VALUES + 1], counts.tolist(), strict=False):
                value = text.decode("utf-8", "replace")
                self._values[value] = self._values.get(value, 0) + count

    def _add_numbers(self, numbers: F64) -> None:
        if len(numbers):
            low, high = self._range or (np.inf, -np.inf)
            self._range = min(low, float(numbers.min())), max(high, float(numbers.max()))
            self._all_whole = self._all_whole and bool((numbers == np.floor(numbers)).all())

    def _kind_of_cells(self) -> tuple[Kind, DecimalMark, Exceptions]:
        """The kind, how numbers are written, and the cells that are no numbers, or no timestamps where most are."""
        cells, enough = self._cells, (1 - FEW) * self._num_values
        whole = self._num_values - cells["absent"]
        has_words = 0 < cells["true"] + cells["false"] == whole
        if has_words or cells["integer"] == whole > 0:
            return "integer", "", Exceptions()
        numbers = cells["integer"] + cells["number"]
        mark: DecimalMark = "," if cells[","] > cells["."] else "." if cells["."] > numbers else ""
        numbers = cells[mark] if mark else numbers
        if numbers and numbers + cells["absent"] >= enough:
            return "number", mark, self._not_number[mark]
        return ("time", "", self._not_time) if cells["time"] >= enough else ("text", "", self._not_number[""])

    def column(self, sample: Any) -> ColumnFacts:
        """`sample`: values of some of its rows."""
        trues, falses = self._cells["true"], self._cells["false"]
        kind, mark, odd = self._kind_of_cells() if self._kind == "text" else (self._kind, "", Exceptions())
        is_number = kind in ("integer", "number")
        words = kind == "integer" and trues + falses > 0
        mostly_words = 0 < trues + falses >= (1 - FEW) * self._num_values
        low, high = (float(not falses), float(trues > 0)) if words else self._range or (0.0, 0.0)
        has_numbers = self._kind == "text" and not self._is_list
        numbers = numbers_of(as_cells(sample), mark) if has_numbers else np.zeros(0)
        is_given = np.isfinite(numbers)
        if mark and is_given.any():
            low, high = float(numbers[is_given].min()), float(numbers[is_given].max())
        return ColumnFacts(
            name=self.name,
            kind=kind if self._num_values else "other",
            type=self._type,
            separator=self._separator,
            is_list=self._is_list,
            num_values=self._num_values,
            missing=self._missing_items if self._is_list else self._missing,
            absent=self._absent if is_number else Exceptions(),
            absent_texts=sorted(self._absent_texts) if is_number else [],
            mark=mark,
            odd=odd,
            fractions=self._fractions,
            not_binary=self._not_word if mostly_words else self._not_binary,
            binary="yes nor no" if mostly_words else "0 nor 1",
            distinct=self._distinct.count,
            values=self._values if len(self._values) <= MOST_VALUES else {},
            low=low,
            high=high,
            whole=self._all_whole if not mark else bool((numbers[is_given] == np.floor(numbers[is_given])).all()),
            words=words,
            padded=self._padded,
            plain=self._plain and not words,
            num_spaces=self._num_spaces,
            pairs=self._num_pairs > (1 - FEW) * self._num_values,
            numbers=numbers,
        )


def items_of(values: Any, separator: str, name: str, location: Location) -> Any:
    """Splits text into lists by a separator; "" leaves it. Raises DataError."""
    if not separator or is_list(values.type):
        return values
    return lists_of(without_empty(as_cells(values)), Cell(kind="text", separator=separator), name, location)


def as_cells(values: Any) -> Any:
    """Returns values as the bytes of CSV; NaN is null."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), None, values)
    return values if pa.types.is_binary(values.type) else values.cast(pa.string()).cast(pa.binary())


def by_value(cells: Any) -> Any:
    """35.0 becomes 35; other text stays as it is."""
    return pc.replace_substring_regex(cells, WHOLE, r"\1")


def numbers_of(cells: Any, mark: DecimalMark) -> F64:
    """Returns f64 [n]: numbers, True as 1 and False as 0, NaN for other cells."""
    own = written_numbers(cells, mark)
    own[one_of(cells, TRUE)], own[one_of(cells, FALSE)] = 1, 0
    return own


def matches(cells: Any, pattern: str) -> Bools:
    mask: Bools = pc.match_substring_regex(cells, pattern).fill_null(False).to_numpy(zero_copy_only=False)
    return mask


def one_of(cells: Any, words: tuple[str, ...]) -> Bools:
    mask: Bools = pc.is_in(cells, value_set=pa.array(words, cells.type)).to_numpy(zero_copy_only=False)
    return mask


def shown(value: Any) -> str:
    return (value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value))[:40]
