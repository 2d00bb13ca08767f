"""CSV: what cells may hold, and the sentence for each way in which a file does not fit."""

import csv
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv as arrow_csv

from rowcast.prefetcher.readers import text_files
from rowcast.prefetcher.readers.formats.csv import Cell, CsvLayout, batches_of
from rowcast.prefetcher.readers.reader import Reader, open_reader
from rowcast.prefetcher.readers.text_files import open_text
from rowcast.runtime.errors import ConfigError, DataError, RowcastError
from tests.support.data_files import Row, all_samples, hashed_row, make_job, table
from tests.support.facts import facts

TABLES = [table("scalars", 10, "a"), table("bags", 10, "b")]
LINES = ["label,int_0,a,b,w", "0,0.5,1,3|4,0.5|2", "1,1.5,2,,", "1,2.5,0,7,1", "0,3.5,9,5,1.5"]
LISTS = {"lists": {"b": "|"}}


def write(folder: Path, lines: list[str], name: str = "data.csv") -> Path:
    (folder / name).write_bytes("".join(f"{line}\n" for line in lines).encode())
    return folder / name


def changed(folder: Path, number: int, line: str) -> Path:
    """The file with another line, by its number in the file."""
    return write(folder, [line if i == number else own for i, own in enumerate(LINES, start=1)])


def opened(path: Path, columns: dict[str, Any] | None = None, tables: Any = TABLES, **data: Any) -> Reader:
    return open_reader(
        make_job("csv", tables, path=str(path), eval_fraction=0.0, columns=LISTS | (columns or {}), **data)
    )


def rows(path: Path, columns: dict[str, Any] | None = None, tables: Any = TABLES, **data: Any) -> list[Row]:
    return all_samples(opened(path, columns, tables, **data).batches("train", 0))


def refusal(kind: type[RowcastError], path: Path, columns: dict[str, Any] | None = None, **data: Any) -> str:
    try:
        rows(path, columns, **data)
    except kind as error:  # kept by nobody, so that the file it was found in is closed at once
        return str(error)
    raise AssertionError(f"{path} was read")


def test_columns_are_read_by_name_with_lists_and_their_weights(tmp_path: Path) -> None:
    found = rows(write(tmp_path, LINES), {"weights": {"b": "w"}})
    assert [row.ids for row in found] == [((1,), (3, 4)), ((2,), ()), ((0,), (7,)), ((9,), (5,))]
    assert [row.weights for row in found] == [((1,), (0.5, 2)), ((1,), ()), ((1,), (1,)), ((1,), (1.5,))]
    assert [(row.label, row.dense) for row in found] == [(0, (0.5,)), (1, (1.5,)), (1, (2.5,)), (0, (3.5,))]


@pytest.mark.parametrize("number", [2, 4, 5])
@pytest.mark.parametrize(("line", "column"), [("0,0.5,,3,1", "a"), ("0,0.5,1,3||4,1", "b"), ('0,0.5,"",3,1', "a")])
def test_an_empty_id_is_missing_and_an_empty_cell_of_a_list_an_empty_bag(
    line: str, column: str, number: int, tmp_path: Path
) -> None:
    path = changed(tmp_path, number, line)
    assert refusal(DataError, path).startswith(
        f"{path}, line {number}, column {column}: the id is missing; give missing ones an id"
    )
    for policy in ("zero", "modulo"):
        reader = opened(path, on_invalid_id=policy)
        ids = all_samples(reader.batches("train", 0))[number - 2].ids
        assert ids == (((0,), (3,)) if column == "a" else ((1,), (3, 0, 4)))
        assert reader.invalid_ids == 1


def test_text_is_hashed_byte_for_byte_quoted_or_not_and_a_missing_one_is_row_0(tmp_path: Path) -> None:
    cells = ["plain", '"with, comma"', '"a ""b"""', "042", '"042"', "", '""', "ünï", "NA", 'a"b']
    words = ["plain", "with, comma", 'a "b"', "042", "042", None, None, "ünï", "NA", 'a"b']
    path = write(tmp_path, ["label,int_0,a,b", *(f"1,0,{cell},x|{cell.strip(chr(34))[:1]}" for cell in cells)])
    found = rows(path, {"hash": True}, [table("scalars", 1000, "a"), table("bags", 50, "b")])
    assert [own.ids[0] for own in found] == [
        (0 if word is None else hashed_row(word.encode(), 1000),) for word in words
    ]
    assert [own.ids[1][1] for own in found][:4] == [hashed_row(letter, 50) for letter in (b"p", b"w", b"a", b"0")]
    assert found[5].ids[1] == (hashed_row(b"x", 50), 0)


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_another_delimiter(delimiter: str, tmp_path: Path) -> None:
    path = write(tmp_path, [line.replace("|", "/").replace(",", delimiter) for line in LINES])
    assert rows(path, {"delimiter": delimiter, "lists": {"b": "/"}}) == rows(write(tmp_path, LINES, "other.csv"))


@pytest.mark.parametrize("delimiter", ["::", " ", "||"])
def test_a_delimiter_of_several_characters_and_runs_of_spaces_have_no_quotes(delimiter: str, tmp_path: Path) -> None:
    lines = ['1::0.5::"a::3', "0::1.5::b::4"]
    columns = {"names": ["label", "int_0", "a", "b"], "delimiter": delimiter, "hash": ["a"], "lists": {}}
    between = delimiter if delimiter != " " else " \t  "
    path = write(tmp_path, [line.replace("::", between) + " " * (delimiter == " ") for line in lines])
    found = rows(path, columns)
    assert [row.ids for row in found] == [((hashed_row(b'"a', 10),), (3,)), ((hashed_row(b"b", 10),), (4,))]
    assert [(row.label, row.dense) for row in found] == [(1, (0.5,)), (0, (1.5,))]
    path = write(tmp_path, [lines[0].replace("::", delimiter), f"1{delimiter}x"])
    assert refusal(DataError, path, columns) == f"{path}, line 2: 2 fields instead of the 4 of data.columns.names"


def test_a_file_without_a_header_begins_with_a_row(tmp_path: Path) -> None:
    names = {"names": LINES[0].split(",")}
    path = write(tmp_path, LINES[1:], "other.csv")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert rows(path, names) == rows(write(tmp_path, LINES))
    path = write(tmp_path, [*LINES[1:], "1,n/a,2,5,1"])
    assert refusal(DataError, path, names) == f"{path}, line 5, column int_0: 'n/a' is not a number"


@pytest.mark.parametrize(
    ("cell", "items"),
    [
        ("[1, 2]", ["1", "2"]),
        ("[ 1,2 , ]", ["1", "2"]),
        ("[]", []),
        ("", []),
        ("['a', 'b c']", ["a", "b c"]),
        ("[\"it's\", 'x, y', 'say \\\"no\\\"']", ["it's", "x, y", 'say "no"']),
        ("[a, 'b']", ["a", "b"]),
        ("[a,,b]", ["a", None, "b"]),
    ],
)
@pytest.mark.parametrize("beside", ["[7]", "['7']"])
def test_a_list_in_brackets_is_split_as_python_writes_it(
    cell: str, items: list[str | None], beside: str, tmp_path: Path
) -> None:
    quoted = '"' + cell.replace('"', '""') + '"'
    path = write(tmp_path, ["label,int_0,a,b", f"1,0.5,1,{quoted}", f"1,0.5,1,{beside}"])
    found = rows(path, {"lists": {"b": "[]"}, "hash": ["b"]}, [table("scalars", 10, "a"), table("bags", 1000, "b")])
    expected = tuple(0 if item is None else hashed_row(item.encode(), 1000) for item in items)
    assert [row.ids[1] for row in found] == [expected, (hashed_row(b"7", 1000),)]


def test_what_is_no_list_in_brackets_is_named(tmp_path: Path) -> None:
    for cell, complaint in (("1|2", "'1|2' is no list such as [1, 2]"), ('"[1, x]"', f"'x' {NO_INTEGER}")):
        path = write(tmp_path, ["label,int_0,a,b", "1,0.5,1,[3]", f"1,0.5,1,{cell}"])
        assert refusal(DataError, path, {"lists": {"b": "[]"}}) == f"{path}, line 3, column b: {complaint}"


@pytest.mark.parametrize("words", [("True", "False"), ("true", "false"), ("yes", "no"), ("t", "f")])
def test_true_and_false_are_labels_and_dense_values(words: tuple[str, str], tmp_path: Path) -> None:
    path = write(
        tmp_path,
        ["label,int_0,a,b", *(f"{label},{value},1,2" for label, value in zip(words, reversed(words), strict=True))],
    )
    assert [(own.label, own.dense) for own in rows(path)] == [(1, (0,)), (0, (1,))]


CELLS = st.text(alphabet='ab,"\n\r ', max_size=6).map(lambda cell: re.sub("\r(?!\n)", "", cell))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@settings(max_examples=40)
@given(cells=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=12), chunk=st.integers(16, 60))
def test_cells_with_line_breaks_are_read_as_pandas_and_arrow_do_wherever_a_piece_ends(
    end: str, cells: list[tuple[str, str]], chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = written_by_csv(tmp_path_factory.mktemp("breaks"), cells, end)
    layout = CsvLayout(header=[*"abn"], header_lines=1, delimiter=",", cells=dict.fromkeys("abn", Cell(kind="text")))
    with pytest.MonkeyPatch.context() as patch, open_text(path) as stream:
        patch.setattr(text_files, "CHUNK_BYTES", chunk)
        found = [
            (row["a"], row["b"], location(i))
            for batch, _, location in batches_of(path, stream, layout)
            for i, row in enumerate(batch.to_pylist())
        ]
    expected = [tuple(cell.encode() or None for cell in own) for own in cells]
    assert found == [(*own, f"{path}, line {first}") for own, first in zip(expected, firsts_of(path), strict=True)]
    assert pd.read_csv(path, dtype=str, keep_default_na=False)[["a", "b"]].to_numpy().tolist() == [*map(list, cells)]
    options = arrow_csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False)
    kinds = arrow_csv.ConvertOptions(column_types=dict.fromkeys("ab", pa.binary()))
    assert arrow_csv.read_csv(path, parse_options=options, convert_options=kinds)["a"].to_pylist() == [
        a.encode() for a, _ in cells
    ]


def written_by_csv(folder: Path, cells: list[tuple[str, str]], end: str) -> Path:
    with (folder / "data.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator=end)
        writer.writerows([["a", "b", "n"], *([*own, number] for number, own in enumerate(cells))])
    return folder / "data.csv"


def firsts_of(path: Path) -> list[int]:
    """The first line of each row."""
    with path.open(newline="") as file:
        reader = csv.reader(file)
        return [1 + reader.line_num for _ in reader][:-1]


def test_an_error_that_is_found_in_the_columns_names_the_first_line_of_its_row(tmp_path: Path) -> None:
    cells = [("u\n" * (number % 3), "v\n\n") for number in range(40)]
    path = written_by_csv(tmp_path, cells, "\n")
    columns = {"dense": [], "hash": ["a", "b"], "lists": {}, "label_values": "none"}
    tables = [table("texts", 90, "a", "b"), table("numbers", 31, "n")]
    assert refusal(DataError, path, columns, tables=tables).startswith(
        f"{path}, line {firsts_of(path)[31]}, column n: id 31 is outside table numbers"
    )


def test_a_first_row_with_line_breaks_decides_what_its_other_cells_are(tmp_path: Path) -> None:
    path = write(tmp_path, ["label,b,a,int_0", 'True,"3\n4",1,0.5', "False,5,2,1.5"])
    columns = {"hash": ["b"], "lists": {}}
    assert [(own.label, own.dense) for own in rows(path, columns)] == [(1, (0.5,)), (0, (1.5,))]
    (tmp_path / "data.csv").write_bytes(path.read_bytes().split(b"\n", 1)[1])
    columns["names"] = ["label", "b", "a", "int_0"]
    assert [(own.label, own.dense) for own in rows(path, columns)] == [(1, (0.5,)), (0, (1.5,))]


def test_a_record_that_does_not_fit_is_named_by_its_first_line(tmp_path: Path) -> None:
    path = write(tmp_path, ["label,int_0,a,b", '1,2,"3\n', '",4', '1,2,"3', '4",5,6'])
    assert refusal(DataError, path, {"hash": ["a"]}) == f"{path}, line 5: 5 fields instead of the header's 4"


def test_a_column_that_begins_with_true_holds_nothing_else_than_true_and_false(tmp_path: Path) -> None:
    path = write(tmp_path, ["label,int_0,a,b", "True,0,1,2", "0,0,1,2", "maybe,0,1,2"])
    assert refusal(DataError, path) == (
        f"{path}, line 4, column label: 'maybe' is not True or False (or yes and no), as the column's first cell"
    )


@pytest.mark.parametrize("end", [b"", b"\r\n", b"\n\n\r\n\n"])
def test_a_byte_order_mark_windows_line_ends_and_any_end_of_the_last_line_are_fine(end: bytes, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(LINES).encode() + end)
    assert rows(tmp_path / "other.csv") == rows(write(tmp_path, LINES))


NO_INTEGER = "is not an integer of 64 bits; set data.columns.hash = true to use strings as ids"
INVALID_ID = 'enlarge the table or set data.on_invalid_id = "modulo" or "zero"'
CHANGED = "scale it, or make it an array (data.columns.inputs, or another key of a data set's batch)"

QUOTED = ": a quoted field begins here and does not end; close its quotes, and double those within a field"


@pytest.mark.parametrize("shuffle", ["none", "window:3", "window:100"])
@pytest.mark.parametrize(
    ("number", "line", "complaint"),
    [
        (3, '1,1.5,2,"5', QUOTED),
        (3, '1,1.5,"2,5,1', QUOTED),
        (5, '1,1.5,2,5,"1', QUOTED),
        (5, '1,1.5",2,5,"1', QUOTED),
        (4, "1,1.5,2", ": 3 fields instead of the header's 5"),
        (4, "1,1.5,2,5,1,", ": 6 fields instead of the header's 5"),
        (4, "", ": the line is empty; remove it"),
        (4, "1,1.5,2\r,5,1", ": there is a carriage return within the line; remove it"),
        (4, "yes,1.5,2,5,1", ", column label: 'yes' is not a number"),
        (
            4,
            "2,1.5,2,5,1",
            ", column label: label 2.0 is not 0 or 1; correct it, or make labels of it by data.columns.prepare.label",
        ),
        (4, ",1.5,2,5,1", ", column label: the cell is empty; it must be 0 or 1"),
        (4, "1,n/a,2,5,1", ", column int_0: 'n/a' is not a number"),
        (
            4,
            "1,,2,5,1",
            ", column int_0: value nan is not finite in fp32; replace missing values before training, for example by "
            "data.columns.prepare.int_0.fill",
        ),
        (4, "1,1e39,2,5,1", f", column int_0: value 1e+39 is inf in fp32; {CHANGED}, which keeps its dtype"),
        (4, "1,1.5,bob,5,1", f", column a: 'bob' {NO_INTEGER}"),
        (4, "1,1.5,2.0,5,1", f", column a: '2.0' {NO_INTEGER}"),
        (4, f"1,1.5,{2**63},5,1", f", column a: '{2**63}' {NO_INTEGER}"),
        (4, "1,1.5,2,5|x|6,1", f", column b: 'x' {NO_INTEGER}"),
        (4, "1,1.5,10,5,1", f", column a: id 10 is outside table scalars (num_embeddings = 10); {INVALID_ID}"),
        (4, "1,1.5,2,5|-1,1|1", f", column b: id -1 is outside table bags (num_embeddings = 10); {INVALID_ID}"),
        (4, "1,1.5,2,5|6,1", ", column w: 1 values for 2 ids of feature b"),
        (4, "1,1.5,2,5,x", ", column w: 'x' is not a number"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_its_column_and_value(
    number: int, line: str, complaint: str, shuffle: str, tmp_path: Path
) -> None:
    write(tmp_path, LINES, "a.csv")
    path = changed(tmp_path, number, line)
    assert (
        refusal(DataError, tmp_path, {"weights": {"b": "w"}}, shuffle=shuffle, batch_size=20)
        == f"{path}, line {number}{complaint}"
    )


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (
            "label,int_0,a,bb,w",
            "the header has no column b, the nearest is bb, but {first} does; give all files one header",
        ),
        ("label,int_0,a,b,w,v", "the header has a column v, but {first} does not; give all files one header"),
        ("label,a,int_0,b,w", "the columns are in another order than in {first}; give all files one header"),
        ("label,int_0,a,b,a", "the header names column a twice; rename one of them"),
        (
            'label,int_0,a,b,"w',
            "the header cannot be read (unexpected end of data); write the file as text in UTF-8",
        ),
        ("", "the file has no header; its first line must name the columns"),
    ],
)
def test_every_file_has_the_header_of_the_first(header: str, complaint: str, tmp_path: Path) -> None:
    first = write(tmp_path, LINES, "0.csv")
    path = write(tmp_path, [header, *LINES[1:]], "1.csv")
    assert refusal(DataError, tmp_path) == f"{path}: {complaint.format(first=first)}"


def test_a_file_without_a_row_or_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, LINES[:1])
    assert refusal(DataError, path) == f"{path} holds no row; give at least one file with rows"
    path.write_bytes("label,int_0,a,größe\n1,1,1,1\n".encode("latin-1"))
    assert refusal(DataError, path).startswith(f"{path}: the header cannot be read ('utf-8' codec")
    path.write_bytes(b"")
    assert refusal(DataError, path) == f"{path} holds no row; give at least one file with rows"


@pytest.mark.parametrize("first", [True, False])
def test_a_list_of_any_length_is_read_in_the_first_row_too(first: bool, tmp_path: Path) -> None:
    limit, ids = csv.field_size_limit(), [i % 10 for i in range(700_000)]
    long, short = f"1,0.5,1,{'|'.join(map(str, ids))},", LINES[1]
    header = f"{LINES[0]},{'a name as long as a cell ' * 6000}"
    path = write(tmp_path, [header, *([f"{long},0", f"{short},0"] if first else [f"{short},0", f"{long},0"])])
    assert sorted(len(row.ids[1]) for row in rows(path)) == [2, 700_000]
    path = write(tmp_path, [LINES[0], long, "1,no,1,3,"])
    assert refusal(DataError, path) == f"{path}, line 3, column int_0: 'no' is not a number"
    assert csv.field_size_limit() == limit, "it belongs to the process"


def test_a_column_that_the_header_has_not_is_named_with_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, LINES)
    sentence = f"data.columns.label: {path} has no column lable, the nearest is label; it has label, int_0, a, b, w"
    assert refusal(ConfigError, path, {"label": "lable"}) == sentence


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"delimiter": ""}, "delimiter = '' must be ASCII characters, at least one"),
        ({"delimiter": ',"'}, "delimiter = ',\"' must be ASCII characters, at least one, without quotes"),
        ({"lists": {"a": ""}}, "lists.a is empty; give the separator between the ids of a cell"),
        ({"lists": {"c": "|"}}, "data.columns.lists: feature c has no table"),
    ],
)
def test_columns_that_no_csv_can_have_are_refused(columns: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal(ConfigError, write(tmp_path, LINES), columns)


def test_delimiter_and_names_belong_to_csv_and_lists_to_named_columns() -> None:
    for columns in ({"delimiter": ";"}, {"names": ["a"]}):
        with pytest.raises(ConfigError, match=facts("columns.delimiter", "columns.names", '"csv"', "'parquet'")):
            make_job("parquet", TABLES, path="x", columns=columns)
    with pytest.raises(ConfigError, match=facts("columns.lists", '"parquet" or "csv"', "'synthetic'")):
        make_job("synthetic", TABLES, columns={"lists": {"a": "|"}})
