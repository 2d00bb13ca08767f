"""Finds out by its content what a file is, and reads it in pieces of columns. What cannot be read is named as what it
is, with the line of Python that makes Parquet of it.
"""

import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rowcast.analysis.new.columns import (
    ABSENT,
    FEW,
    NUMBER,
    PAIR,
    TIME,
    ColumnFacts,
    Kind,
    SampledCells,
    Watch,
    as_cells,
    matches,
)
from rowcast.analysis.show import AnalysisProgress, Tick
from rowcast.job.formats import FORMATS
from rowcast.prefetcher.readers.arrow_rows import WRITTEN, is_list, require_single
from rowcast.prefetcher.readers.data_files import data_files, is_gzip, no_rows
from rowcast.prefetcher.readers.formats.arrow import ArrowFiles
from rowcast.prefetcher.readers.formats.criteo_tsv import DENSE, SPARSE
from rowcast.prefetcher.readers.formats.csv import (
    BRACKETED,
    BRACKETS,
    Cell,
    CsvLayout,
    batches_of,
    beginning,
    fields_of,
    split_cells,
)
from rowcast.prefetcher.readers.formats.jsonl import decode as decode_json
from rowcast.prefetcher.readers.formats.jsonl import is_one_kind, object_lines, values_of
from rowcast.prefetcher.readers.formats.jsonl import kind_of as kind_of_json
from rowcast.prefetcher.readers.formats.parquet import ParquetFiles
from rowcast.prefetcher.readers.id_check import Location, row_location
from rowcast.prefetcher.readers.text_files import CHUNK_BYTES, open_text
from rowcast.runtime.errors import ConfigError, DataError

FileKind = Literal["csv", "jsonl", "parquet", "arrow", "criteo-tsv"]
Pieces = Iterator[tuple[Any, Location]]  # record batches, and the places of their rows
Begin = Callable[[int | None], Tick]
PARQUET_ROWS = 65536  # read together
BEGINNING = 2**16  # bytes that tell what a file is
# the files that are read in a folder
DATA_NAMES = r"(?i:.*\.(csv|tsv|parquet|pq|jsonl|ndjson|json|arrow|feather|txt|dat|data|inter)(\.gz)?)"
DELIMITERS = ("\t", ", ", ",", ";", "|", "::")  # ", " of cells without quotes
CRITEO_NAMES = ["label", *DENSE, *SPARSE]
CRITEO_LINE = r"[01](\t-?\d*){13}(\t([0-9a-f]{8})?){26}"
MOST_SEEN = 100  # rows that tell a second line of names
MOST_NAMES = 7  # that are written out, for a file without a header
FEWEST_REPEATS = 4  # distinct cells for each of their parts, or text with spaces or commas is no list

# what a file of another kind begins with; what it is; the Python of a frame after `import pandas as pd`, "" for a page
OTHER_KINDS = (
    (rb"\x89HDF\r\n", "HDF5 (.h5)",
     "import h5py; pd.DataFrame({{name: [*rows] for name, rows in h5py.File({path}).items()}})"),
    (rb"\x93NUMPY", "a NumPy array (.npy)", "import numpy as np; pd.DataFrame(np.load({path})).rename(columns=str)"),
    (rb"BZh9", "compressed by bzip2", 'pd.read_csv({path}, compression="bz2")'),
    (rb"\xfd7zXZ", "compressed by xz", 'pd.read_csv({path}, compression="xz")'),
    (rb"\x28\xb5\x2f\xfd", "compressed by zstd", 'pd.read_csv({path}, compression="zstd")'),
    (rb"\xff\xfe|\xfe\xff", "text in UTF-16, not UTF-8", 'pd.read_csv({path}, encoding="utf-16")'),
    (rb"\xff\xff\xff\xff", "a stream of Arrow",
     "import pyarrow as pa; pa.ipc.open_stream({path}).read_all().to_pandas()"),
    (rb"ORC", "ORC", "pd.read_orc({path})"),
    (rb"\x80[\x02-\x05]", "a Python pickle", "pd.read_pickle({path})"),
    (rb".{3,4}\x00{4,5}.{4}\x0a", "TFRecord",
     "import tfrecord as t; pd.DataFrame(t.tfrecord_loader({path}, None))"),
    (rb"<stata_dta>", "a file of Stata", "pd.read_stata({path})"),
    (rb"\xd0\xcf\x11\xe0", "an Excel file (.xls)", "pd.read_excel({path})"),
    (rb"SQLite format 3", "a database of SQLite",
     "import sqlite3; pd.read_sql('select * from TABLE', sqlite3.connect({path}))"),
    (rb"(\s*%[^\n]*\n)*\s*@(?i:relation)", "ARFF, as Weka writes it",
     "from scipy.io.arff import loadarff; pd.DataFrame(loadarff({path})[0])"),
    (rb'\S+ \S+ \S+ \[\d\d?/\w{3}/\d{4}:\S+ [-+]\d+\] "', "a log of a web server",
     'pd.read_csv({path}, sep=" ", header=None).rename(columns=str)'),
    (rb"\s*<", "a web page, or XML", "pd.read_html({path})[0]"),
    (rb'\s*\{\s*"[^"]+"\s*:\s*\{\s*"0"\s*:', "JSON by columns, as pandas writes it", "pd.read_json({path})"),
    (rb"[-+]?\d+(\.\d+)?( (qid|\d+)(:\d+)?:[-\d.e]+)+\s*\n", "libsvm, libfm or libffm (label feature:value)", ""),
)  # fmt: skip
ZIPPED = {  # a name in the archive -> the same
    r".*\.npy": ("NumPy arrays (.npz)",
                 "import numpy as np; pd.DataFrame({{name: [*rows] for name, rows in np.load({path}).items()}})"),
    r"xl/.*": ("an Excel file (.xlsx)", "pd.read_excel({path})"),
    r".*": ("a zip archive", 'pd.read_csv({path}, compression="zip")'),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShape:
    """What a file is, and where the names of its columns come from."""

    kind: FileKind
    delimiter: str = ","
    names: Sequence[str] = ()  # given for a file without a header; empty if it has one


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    path: str  # as given
    shape: TableShape
    files: list[Path]  # in reading order, with those that have no row
    num_rows: int
    columns: list[ColumnFacts]
    sample: Any  # a table of some rows, of all if they are few; text as it is in the file
    step: int  # rows for each row of the sample

    def named(self, name: str) -> ColumnFacts | None:
        """Finds a column by its name, or by its name without spaces around it and without RecBole's type."""
        spellings: tuple[Callable[[str], str], ...] = (str, str.strip, lambda name: name.strip().partition(":")[0])
        columns = (column for spelling in spellings for column in self.columns if spelling(column.name) == name)
        return next(columns, None)


def look_at(path: str, names: Sequence[str], lists: dict[str, str], progress: AnalysisProgress) -> DataSet:
    """Reads every row of the files. `lists`: separators of some columns' items. Raises ConfigError for a path without
    data, DataError for files of another kind, and for those that a run would refuse."""
    every = data_files(path, "--data", DATA_NAMES, by_name=False, apart="")
    kinds = {file: kind for file in every if (kind := kind_of_file(file))}
    if not kinds:
        raise no_rows(every)
    if len(set(kinds.values())) > 1:
        first, other = (
            next(file for file in kinds if kinds[file] == kind) for kind in list(dict.fromkeys(kinds.values()))[:2]
        )
        raise ConfigError(
            f"--data {path}: {first.name} is {kinds[first]} and {other.name} is {kinds[other]}; name files of one "
            f"kind, for example '{path}/*{first.suffix}'"
        )
    [kind], what = set(kinds.values()), "looking at every row, in pieces"
    shape = shape_of_text(next(iter(kinds)), names) if kind == "csv" else TableShape(kind=kind)
    if Path(path).is_dir() and not all(re.fullmatch(FORMATS[shape.kind].file_names, file.name) for file in every):
        path = f"{path}/*{''.join(every[0].suffixes)}"
    by_kind = {"parquet": parquet_pieces, "arrow": arrow_pieces, "jsonl": json_pieces}
    read = by_kind.get(kind, partial(text_pieces, shape))
    return watched(path, shape, every, read(list(kinds), partial(progress.begin, what)), lists)


def watched(path: str, shape: TableShape, files: list[Path], pieces: Pieces, lists: dict[str, str]) -> DataSet:
    """Looks at pieces (a record batch, the places of its rows)."""
    watches, sample = list[Watch](), SampledCells()
    for piece, location in pieces:
        if not watches:
            kinds = {column.name: (str(column.type), kind_of(column.type)) for column in piece.schema}
            watches = [
                Watch(name, *kind, lists.get(name, separator_of(name, piece[name]))) for name, kind in kinds.items()
            ]
        for watch in watches:
            watch.add(piece[watch.name], location)
        sample.add(piece)
    table = sample.table
    return DataSet(
        path=path, shape=shape, files=files, num_rows=sample.num_rows, sample=table, step=sample.step,
        columns=[watch.column(table[watch.name].combine_chunks()) for watch in watches],
    )  # fmt: skip


def kind_of_file(file: Path) -> FileKind | None:
    """None for a file of no row. Raises DataError for a file of a kind that is not read."""
    begin = beginning_of(file)
    for first, what, code in OTHER_KINDS:
        if re.match(first, begin, re.DOTALL):
            raise another_kind(file, what, code)
    if begin.startswith(b"PK\x03\x04"):
        inside = zipfile.ZipFile(file).namelist()
        raise another_kind(
            file, *next(kind for name, kind in ZIPPED.items() if any(re.fullmatch(name, one) for one in inside))
        )
    if begin.startswith((b"PAR1", b"ARROW1")):
        return "parquet" if begin.startswith(b"PAR1") else "arrow"
    text = begin.removeprefix(b"\xef\xbb\xbf").strip()
    return None if not text else "jsonl" if re.match(rb'(\[\s*)?\{\s*"', text) else "csv"


def beginning_of(file: Path) -> bytes:
    """The first bytes, decompressed. Raises DataError."""
    with file.open("rb") as stream:
        begin = stream.read(BEGINNING)
    try:
        return zlib.decompressobj(31).decompress(begin, BEGINNING) if begin.startswith(b"\x1f\x8b") else begin
    except zlib.error as error:
        raise DataError(f"{file}: the gzip file is damaged ({error}); restore it") from None


def another_kind(file: Path, what: str, code: str) -> DataError:
    if not code:
        return DataError(f"{file}: the file is {what}; docs/data.md#libsvm has the Python that makes Parquet of it")
    frame, out = code.format(path=repr(str(file))), repr(str(file.with_suffix(".parquet")))
    return DataError(
        f"{file}: the file is {what}; make Parquet of it in Python: import pandas as pd; {frame}.to_parquet({out})"
    )


def shape_of_text(file: Path, names: Sequence[str]) -> TableShape:
    """Raises DataError for a header that is none."""
    text = beginning_of(file).removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    lines = text.splitlines()[: None if len(text) < BEGINNING else -1]
    if not names and re.fullmatch(CRITEO_LINE, lines[0]):
        return TableShape(kind="criteo-tsv", delimiter="\t", names=CRITEO_NAMES)
    delimiter = delimiter_of([line for line in lines if line])
    rows = [fields_of(line, delimiter, strict=False) for line in lines if line]
    if lines[0].startswith("#") and len(rows[0]) != len(rows[-1]):
        raise DataError(f"{file}, line 1: {lines[0][:40]!r} is a comment; remove it")
    if not names:
        require_names(file, rows)
    elif len(names) != len(rows[0]):
        raise ConfigError(
            f"--names gives {len(names)} names, and {file} has {len(rows[0])} columns, the first row {lines[0][:80]!r}"
        )
    return TableShape(kind="csv", delimiter=delimiter, names=names)


def delimiter_of(lines: list[str]) -> str:
    """The delimiter that all lines have equally often, or else the first line has most often."""
    has_quotes = any('"' in line for line in lines)
    counts = {
        delimiter: [line.count(delimiter) for line in lines]
        for delimiter in DELIMITERS
        if delimiter != ", " or not has_quotes
    }
    even = [delimiter for delimiter in counts if len(set(counts[delimiter])) == 1 and counts[delimiter][0]]
    best = max(even or counts, key=lambda delimiter: counts[delimiter][0])
    return best if counts[best][0] else " "


def require_names(file: Path, rows: list[list[str]]) -> None:
    """Raises DataError if the first of some rows looks as the second does, and not like names."""
    header = rows[0]
    if len(header) == 1:
        raise DataError(
            f"{file}, line 1: {header[0][:40]!r} is one column; separate columns by a comma, semicolon, tab, |, :: or "
            "spaces"
        )
    if {len(row) for row in rows[1:]} == {len(header) + 1}:
        raise DataError(
            f"{file}, line 1: {len(header)} names for {len(header) + 1} columns; add one for the first column, to "
            "which R gives none"
        )
    cells = [[cell for cell in column if cell] for column in zip(*rows[1:MOST_SEEN], strict=False)]
    seconds = [first for first, *others in filter(None, cells) if others and all(map(looks_like_a_value, others))]
    if (
        len(rows[0]) == len(rows[-1])
        and len(seconds) > 1
        and not any(looks_like_a_value(cell) or re.match(ABSENT, cell) for cell in seconds)
    ):
        raise DataError(f"{file}: after line 1, a second line of names, {' '.join(rows[1])[:40]!r}; remove one of them")
    values = [looks_like_a_value(name) for name in header]
    pairs = zip(values, rows[min(1, len(rows) - 1)], strict=False)
    alike = all(not cell or is_value == looks_like_a_value(cell) for is_value, cell in pairs) and any(values)
    again = [sum(row[i : i + 1] == [name] for row in rows[1:]) > 1 for i, name in enumerate(header)]
    if not (alike or 2 * sum(again) > len(header)) or header == [str(number) for number in range(len(header))]:
        return
    lengths = [len(row) for row in rows]
    if len(set(lengths)) > 1:
        raise DataError(
            f"{file}: the first lines have {min(lengths)} to {max(lengths)} cells, so it is no table; write the cells "
            "that vary in number as one column of lists, in Parquet"
        )
    raise DataError(
        f"{file}, line 1: there is no header; name the {len(header)} columns in their order, for example --names "
        f"{','.join(example_names(rows))}; the first row is {' '.join(header)[:40]!r}"
    )


def example_names(rows: list[list[str]]) -> list[str]:
    """Names that tell no role; the label is an outer column of 0 and 1 if the other outer one is none."""
    names = [f"column_{number}" for number in range(1, len(rows[0]) + 1)]
    cells = {i: [row[i] for row in rows if len(row) > i] for i in (0, len(names) - 1)}
    labels = [
        i for i, own in cells.items() if all(re.match(NUMBER, one) for one in own) and {*map(float, own)} == {0, 1}
    ]
    if len(labels) == 1:
        names[labels[0]] = "label"
    if len(names) > MOST_NAMES:
        return [f'"{names[0]}', f"$(seq -s, -f column_%g 2 {len(names) - 1})", f'{names[-1]}"']
    rated = len(names) in (3, 4) and not labels and all(map(looks_like_a_value, [*zip(*rows, strict=False)][2]))
    return ["user", "item", "rating", "timestamp"][: len(names)] if rated else names


def looks_like_a_value(cell: str) -> bool:
    return any(re.match(pattern, cell) for pattern in (NUMBER, TIME))


def text_pieces(shape: TableShape, files: list[Path], begin: Begin) -> Pieces:
    sizes = [None if is_gzip(file) else -(-file.stat().st_size // CHUNK_BYTES) for file in files]
    tick = begin(None if None in sizes else sum(size or 0 for size in sizes))
    filled, header, _ = beginning(files, shape.delimiter, shape.names)
    layout = CsvLayout(
        header=header,
        header_lines=0 if shape.names else 1,
        delimiter=shape.delimiter,
        cells={name: Cell(kind="text") for name in header},
    )
    for file in filled:
        with open_text(file) as stream:
            for rows, _, location in batches_of(file, stream, layout):
                require_values(rows, location)
                yield rows, location
                tick()


def require_values(rows: Any, location: Location) -> None:
    """Raises DataError for an empty line, in which the fast parser sees missing values."""
    is_empty = np.all([column.is_null().to_numpy(zero_copy_only=False) for column in rows.columns], axis=0)
    if is_empty.any():
        raise DataError(f"{location(int(np.argmax(is_empty)))}: the line is empty; remove it")


def json_pieces(files: list[Path], begin: Begin) -> Pieces:
    tick, types = begin(None), dict[str, Any]()
    for file in files:
        with open_text(file) as stream:
            for lines, where, _ in object_lines(stream, file):
                values = {} if types else values_of(lines.text, where)
                types |= {name: kind_of_json(cells) for name, cells in values.items() if is_one_kind(cells)}
                yield decode_json(types, lines.text, lines.num_lines, where), where
                tick()


def arrow_pieces(files: list[Path], begin: Begin) -> Pieces:
    arrow, tick = ArrowFiles(files, []), begin(None)
    for file, opened in zip(arrow.paths, arrow.files, strict=True):
        first = 0
        reader = pa.ipc.open_file(opened.content)
        for batch in map(reader.get_batch, range(reader.num_record_batches)):
            for start in range(0, batch.num_rows, PARQUET_ROWS):
                yield batch.slice(start, PARQUET_ROWS), row_location(file, range(first + start, batch.num_rows + first))
                tick()
            first += batch.num_rows


def parquet_pieces(files: list[Path], begin: Begin) -> Pieces:
    arrow = ParquetFiles(files, [])
    tick, names = begin(sum(-(-int(count) // PARQUET_ROWS) for count in np.diff(arrow.bounds))), arrow.schemas[0].names
    for file, schema in zip(arrow.paths, arrow.schemas, strict=True):
        require_single(file, schema.names, schema.names)
        lacking = [name for name in names if name not in schema.names]
        if lacking:
            raise DataError(
                f"{file}: column {lacking[0]} is missing, but {arrow.paths[0]} has it; give all files the same columns"
            )
        first = 0
        with pq.ParquetFile(file) as opened:
            for piece in opened.iter_batches(batch_size=PARQUET_ROWS, columns=names):
                yield piece, row_location(file, range(first, first + piece.num_rows))
                first += piece.num_rows
                tick()


def kind_of(kind: Any) -> Kind:
    """Returns the kind of an Arrow type; for "text" the values decide."""
    single = kind.value_type if is_list(kind) or pa.types.is_dictionary(kind) else kind
    if pa.types.is_temporal(single):
        return "time"
    return "other" if pa.types.is_decimal(single) or pa.types.is_nested(single) or pa.types.is_null(single) else "text"


def separator_of(name: str, values: Any) -> str:
    """The separator of the items in a column's cells, or "": decided by how often its parts repeat."""
    _, _, typed = name.strip().partition(":")
    if typed in ("token", "float", "token_seq", "float_seq") or is_list(values.type):
        return " " * typed.endswith("_seq")
    if kind_of(values.type) != "text" or pa.types.is_primitive(values.type):
        return ""
    cells = as_cells(values).drop_null().unique()
    cells = cells.filter(pc.greater(pc.binary_length(cells), 0))
    plain = np.any([matches(cells, form) for form in (TIME, ABSENT, *WRITTEN.values())], axis=0)
    if not len(cells) or plain.mean() > 1 - FEW:
        return ""
    if matches(cells, f"^{BRACKETED}$").all():
        return BRACKETS
    return next((separator for separator in ("^", "|", ";", ",", " ") if are_lists(cells, separator)), "")


def are_lists(cells: Any, separator: str) -> bool:
    """`cells`: distinct ones."""
    parts = split_cells(cells, Cell(kind="text", separator=separator)).flatten().drop_null()
    if len(parts) == len(cells):
        return False
    distinct = parts.unique()
    if matches(distinct, r"^-?\d+$").all() or matches(distinct, PAIR).mean() > 1 - FEW:
        return True
    if separator in "^|":
        return not matches(distinct, r"^\s|\s$").any()
    if separator == " ":
        return len(distinct) * FEWEST_REPEATS <= len(cells) or len(distinct) < len(cells) <= 2 * FEWEST_REPEATS
    return len(distinct) < (1 - FEW) * len(parts) and not matches(distinct, r"^\s|\s$").any()
