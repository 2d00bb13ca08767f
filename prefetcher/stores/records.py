"""Converts between records and numpy arrays of their elements, and makes the records of rows that were never trained.

numpy lacks bf16, so its arrays are uint16. First values are those of `protocol/first_values.py`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rowcast.job.embedding_tables import RowType
from rowcast.job.tables import ALIGNMENT, KEY_SHIFT, ROW_MASK, GroupSpec, RecordPart, aligned
from rowcast.prefetcher.stores.row_loops import LINE_WORDS
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.protocol.first_values import Initializer, fill_row, initial_rows, rows_on_demand, table_initializer
from rowcast.runtime.arrays import F32, I64, U16, U64, Bytes
from rowcast.runtime.compiled import arrays_of, compiled_loop, prefetch
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.first_values import FirstValues
from rowcast.runtime.stages import ThreadPool

Elements = npt.NDArray[np.generic]  # float32, float16, or uint16 for bf16
ELEMENTS: dict[RowType, npt.DTypeLike] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
BF16_NAN = 0x7FC0
WORD = 8  # bytes
WORDS_AHEAD = 512  # the loop prefetches this far; the processor's own prefetching is half as fast
u64_at = arrays_of(np.uint64)
# of the elements of a word: their signs, and the last bits of their exponents
BITS: dict[RowType, tuple[int, int]] = {
    "fp32": (0x8000_0000_8000_0000, 0x0080_0000_0080_0000),
    "fp16": (0x8000_8000_8000_8000, 0x0400_0400_0400_0400),
    "bf16": (0x8000_8000_8000_8000, 0x0080_0080_0080_0080),
}


def elements_of(records: Records, part: RecordPart) -> Elements:
    """Returns a view [n, width] of a part of records u8 [n, record_bytes]."""
    elements: Elements = records.view(ELEMENTS[part.dtype])[:, part.elements]
    return elements


def rounded(values: F32, dtype: RowType) -> Elements:
    """Rounds to the nearest value of `dtype`, ties to even, with the bits of torch's `.to` (except which NaN).

    Values beyond the largest become infinite."""
    match dtype:
        case "fp32":
            return values
        case "fp16":
            with np.errstate(over="ignore"):
                return values.astype(np.float16)
        case "bf16":
            return upper_halves(np.ascontiguousarray(values))


def upper_halves(values: F32) -> U16:
    """Rounds fp32 to bf16, its upper half: adds half of the last bit, slightly less if that bit is 0, and truncates."""
    bits = values.view(np.uint32)
    rounded_bits = bits >> 16
    rounded_bits &= 1
    rounded_bits += bits
    rounded_bits += 0x7FFF
    rounded_bits >>= 16
    halves = rounded_bits.astype(np.uint16)
    halves[np.isnan(values)] = BF16_NAN
    return halves


def widened(elements: Elements, dtype: RowType) -> F32:
    if dtype == "bf16":
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float32, copy=False)


class FiniteRows:
    """Finds rows of a group that are not finite by their bits, in one pass over whole records.

    NaN and infinities have every bit of the exponent set. Then adding its last bit to an element without a sign carries
    into the bit of the sign. In no other element does it, and in no padding, which is zero:

        fp32    0x7F800000 + 0x00800000 = 0x80000000        infinity, the least of them
                0x7F7FFFFF + 0x00800000 = 0x7FFFFFFF        the largest finite value
    """

    def __init__(self, group: GroupSpec) -> None:
        self._group = group
        self._signs: U64 = np.zeros(group.record_bytes // WORD, np.uint64)  # of each word of a record
        self._lasts: U64 = np.zeros_like(self._signs)
        for part in group.parts:
            words = slice(part.offset // WORD, (part.offset + aligned(part.nbytes, ALIGNMENT)) // WORD)
            self._signs[words], self._lasts[words] = BITS[part.dtype]
        self._words = len(self._signs), self._signs.ctypes.data, self._lasts.ctypes.data

    def fault(self, keys: Keys, records: Records) -> str:
        """Returns what the first row that is not finite holds, as `row 7 of table users: weight[2] is nan`; "" if all
        are finite. `records`: u8 [n, record_bytes] of these keys."""
        return first_fault([self], [(0, keys, records)], ThreadPool())

    def place(self, records: Records) -> tuple[int, ...]:
        """Returns a row for `first_that_carries`."""
        return records.ctypes.data, len(records), *self._words

    def named(self, keys: Keys, records: Records) -> str:
        """Returns the fault of records that have one."""
        faults: list[tuple[int, str]] = []
        for part in self._group.parts:
            values = widened(elements_of(records, part), part.dtype)
            rows, columns = np.nonzero(~np.isfinite(values))
            if len(rows):
                row, column = int(rows[0]), int(columns[0])
                faults.append((row, f"{part.name}[{column}] is {values[row, column]}"))
        row, what = min(faults, key=lambda fault: fault[0], default=(0, "bytes beside its values are not 0"))
        return f"{self._group.row_name(int(keys[row]))}: {what}"


def first_fault(finite: Sequence[FiniteRows], rows: Sequence[tuple[int, Keys, Records]], pool: ThreadPool) -> str:
    """Returns the fault of the first rows with one, or "". `rows`: each with the number of its group. The threads of
    `pool` divide the search."""
    places = np.array([finite[group].place(records) for group, _, records in rows], np.int64).reshape(-1, 5)
    num_rows = sum(len(records) for *_, records in rows)
    faulty = min(pool.share(lambda *own: first_that_carries(places, *own), 0, num_rows), default=len(rows))
    return "" if faulty == len(rows) else finite[rows[faulty][0]].named(*rows[faulty][1:])


@compiled_loop
def first_that_carries(places: I64, first: int, end: int) -> int:
    """Returns the first of several groups' records with an element that carries into its sign, in the rows from `first`
    to `end` - 1 of all of them; their number if none has one. A row of `places` holds the address of records
    u64 [n, words], n, the words of a record, and the addresses of these words' signs and lasts."""
    begin = 0
    for k in range(len(places)):
        num_rows, size = places[k, 1], places[k, 2]
        signs, lasts, carries = u64_at(places[k, 3], size), u64_at(places[k, 4], size), np.uint64(0)
        flat = u64_at(places[k, 0], num_rows * size)
        words = flat.reshape(num_rows, size)
        for row in range(max(0, first - begin), min(num_rows, end - begin)):
            for word in range(0, size, LINE_WORDS):
                prefetch(flat, row * size + word + WORDS_AHEAD)
            for word in range(size):
                carries |= ((words[row, word] & ~signs[word]) + lasts[word]) & signs[word]
        if carries != 0:
            return k
        begin += num_rows
    return len(places)


# returns records of a group's untrained rows, u8 [n, record_bytes], for keys i64 [n] ascending
FirstOf = Callable[[GroupSpec, I64], Bytes]


def first_records(group: GroupSpec, seed: int, keys: I64) -> Bytes:
    """Returns records of untrained rows, u8 [n, record_bytes]: initial weights and optimizer state, zero padding.
    `keys` [n] ascend."""
    records = np.empty((len(keys), group.record_bytes), np.uint8)
    fill_first_records(group, seed, keys, np.arange(len(keys)), records)
    return records


def fill_first_records(group: GroupSpec, seed: int, keys: I64, places: I64, records: Bytes) -> None:
    """Sets records[places[i]] to the record of the untrained row keys[i]; `records`: u8 [any, record_bytes]."""
    floats, empty = records.view(np.float32), np.zeros((1, group.record_bytes), np.uint8)  # a record without weights
    for part in group.parts:
        elements_of(empty, part)[:] = part.initial or 0
    of_values = [part for part in group.parts if part.initial is None]
    exact = next((part for part in of_values if part.dtype == "fp32"), None)
    first = -1 if exact is None else exact.elements.start
    bounds = np.append(np.searchsorted(keys, [table.index << KEY_SHIFT for table in group.tables]), len(keys))
    for i in np.flatnonzero(np.diff(bounds)):
        table, chosen = group.tables[i], slice(bounds[i], bounds[i + 1])
        rows, table_places, initializer = keys[chosen] & ROW_MASK, places[chosen], table_initializer(seed, table)
        fill_records(initializer, rows, table_places, empty.view(np.float32)[0], first, table.embedding_dim, floats)
        for part in of_values:
            if part is not exact:
                values = initial_rows(seed, table, rows) if exact is None else floats[table_places, exact.elements]
                elements_of(records, part)[table_places] = rounded(values, part.dtype)


@compiled_loop
def fill_records(
    initializer: Initializer, rows: I64, places: I64, empty: F32, first: int, dim: int, records: F32
) -> None:
    """Sets records[places[i]] to `empty` with the first values of row rows[i] at element `first`, unless it is -1."""
    for i in range(len(rows)):
        record = records[places[i]]
        for element in range(len(empty)):
            record[element] = empty[element]
        if first >= 0:
            fill_row(initializer, rows[i], record[first : first + dim])


def of_seed(seed: int) -> FirstOf:
    """Those of a job's tables."""
    return lambda group, keys: first_records(group, seed, keys)


class FirstColumns:
    """First values of a script's tables, whose columns have them from files, on demand, or all equal."""

    def __init__(self, columns: Mapping[int, Sequence[FirstValues]], sizes: Mapping[int, int]) -> None:
        """Columns of the records and rows of each table, by its index. Raises ConfigError for a file that is too short,
        DataError if it is not the one that a checkpoint names."""
        self._columns = {
            table: [(first.width, values_of(first, sizes[table])) for first in each] for table, each in columns.items()
        }

    def fill(self, keys: I64, places: I64, out: Bytes) -> None:
        """Sets out[places[i]], u8 [any, record_bytes], to the first values of row keys[i]."""
        records, tables = out.view(np.float32), keys >> KEY_SHIFT
        records[places] = 0
        for table, columns in self._columns.items():
            chosen, begin = np.flatnonzero(tables == table), 0
            rows = keys[chosen] & ROW_MASK
            for width, values in columns:
                records[places[chosen], begin : begin + width] = values(rows)
                begin += width

    def records(self, group: GroupSpec, keys: I64) -> Bytes:
        """Implements `FirstOf`."""
        records = np.empty((len(keys), group.record_bytes), np.uint8)
        self.fill(keys, np.arange(len(keys)), records)
        return records


def values_of(first: FirstValues, num_rows: int) -> Callable[[I64], F32 | float]:
    """Returns the source of rows' values, or one value for all. Raises as `FirstColumns`."""
    if first.path:
        return mapped(first, num_rows).__getitem__
    if first.is_on_demand:
        first.check()
        return rows_on_demand(first)
    return lambda rows: first.value


def mapped(columns: FirstValues, num_rows: int) -> F32:
    """Raises as `FirstColumns`."""
    columns.check()
    memory, row_bytes = np.memmap(columns.path, np.uint8, "r"), columns.row_bytes or 4 * columns.width
    needed = columns.offset + (num_rows - 1) * row_bytes + 4 * columns.width
    if len(memory) < needed:
        raise ConfigError(
            f"{columns.path} has {len(memory):,} bytes, and the first values of a table of {num_rows:,} rows take "
            f"{needed:,}; leave the file as it is while the script trains"
        )
    return np.ndarray((num_rows, columns.width), np.float32, memory, columns.offset, (row_bytes, 4))
