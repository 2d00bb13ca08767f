"""48 files as strangers bring them: `rowcast new` writes a job that reads every row, or one sentence says what is
where, how often, and which option or change helps.
"""

import gzip
import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from rowcast.analysis.check.data import ALL, Seen, check_opens, check_samples
from rowcast.analysis.new import new as new_command
from rowcast.analysis.show import findings_of
from rowcast.command_line.prefetcher import app
from rowcast.job.file import load_job
from rowcast.job.tables import group_specs
from rowcast.runtime.errors import ConfigError

NUM_ROWS = 1000
ODD = 499  # the row that differs, in line 501


@dataclass(frozen=True, kw_only=True)
class RightJob:
    label: str = "clicked"
    dense: tuple[str, ...] = ("price",)
    hashed: tuple[str, ...] = ("user",)
    numbered: tuple[str, ...] = ("item",)
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)  # column -> what is said of it
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OneSentence:
    code: int
    says: tuple[str, ...]  # {path}: the file


@dataclass(frozen=True)
class OddFile:
    name: str
    content: Callable[[], bytes | dict[str, bytes]]  # of the file, or of each file of a folder
    right: RightJob | OneSentence
    file: str = "clicks.csv"


def clicks(**changed: Any) -> pd.DataFrame:
    """Text, numbers from 0 up, a price, and a label."""
    rng = np.random.default_rng(4)
    frame = pd.DataFrame(
        {
            "user": [f"u{number}" for number in rng.integers(0, 60, NUM_ROWS)],
            "item": rng.integers(0, 40, NUM_ROWS),
            "price": rng.lognormal(2, 1, NUM_ROWS).round(2) + 0.01,
            "clicked": np.arange(NUM_ROWS) % 2,
        }
    )
    return frame.assign(**{name: column(frame) if callable(column) else column for name, column in changed.items()})


def with_cell(name: str, cell: str, rows: slice | int = ODD) -> pd.DataFrame:
    frame = clicks().astype({name: object})
    frame.loc[frame.index[rows], name] = cell
    return frame


def csv(frame: pd.DataFrame, **options: Any) -> bytes:
    return bytes(frame.to_csv(index=False, **options).encode())


def lines(**changed: Any) -> list[bytes]:
    return csv(clicks(**changed)).splitlines(keepends=True)


def with_line(line: int, content: bytes) -> bytes:
    """`content` as another line `line`, from 1."""
    whole = lines()
    return b"".join([*whole[: line - 1], content, *whole[line - 1 :]])


def texts(pattern: Callable[[float], str]) -> pd.DataFrame:
    return clicks(price=lambda frame: [pattern(price) for price in frame["price"]])


def with_uid(values: Callable[[Any], Any], name: str = "uid") -> pd.DataFrame:
    rng = np.random.default_rng(6)
    return clicks()[["user", "price", "clicked"]].assign(**{name: values(rng)})


def zipped() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("clicks.csv", csv(clicks()))
    return target.getvalue()


def as_parquet(frame: pd.DataFrame) -> bytes:
    target = io.BytesIO()
    frame.to_parquet(target)
    return target.getvalue()


def dates(pattern: str) -> list[str]:
    return [date.strftime(pattern) for date in pd.date_range("2024-03-01", periods=NUM_ROWS, freq="h")]


def left_out(column: str, *says: str) -> RightJob:
    return RightJob(dense=() if column == "price" else ("price",), left_out={column: says})


def hashed(*names: str) -> RightJob:
    return RightJob(hashed=("user", *names), numbered=())


FILES = [
    # numbers that are none
    OddFile("one cell of the price is text", lambda: csv(with_cell("price", "abc")),
            left_out("price", "1 of 1,000 values", "0.1 %", "line 501", "'abc'", "--ids price")),
    OddFile("NULL in a third of the prices", lambda: csv(with_cell("price", "NULL", slice(0, 300))), RightJob()),
    OddFile("decimal commas", lambda: csv(texts(lambda price: f"{price:.2f}".replace(".", ",")), sep=";"), RightJob()),
    OddFile("thousands with commas", lambda: csv(texts(lambda price: f"{1000 + price:,.2f}")), RightJob()),
    OddFile("a currency", lambda: csv(texts(lambda price: f"${price:.2f}")), RightJob()),
    OddFile("an infinite price", lambda: csv(with_cell("price", "inf")),
            left_out("price", "1 of 1,000 values", "line 501", "'inf'")),
    OddFile("one price is missing", lambda: csv(with_cell("price", "")),
            RightJob()),
    # ids
    OddFile("negative uids", lambda: csv(with_uid(lambda rng: rng.integers(-(2**40), 2**40, 90)[np.arange(1000) % 90])),
            hashed("uid")),
    OddFile("uids of 64 bits without a sign",
            lambda: csv(with_uid(lambda rng: rng.integers(2**63, 2**64, 90, dtype=np.uint64)[np.arange(1000) % 90])),
            hashed("uid")),
    OddFile("uids written as 12.0", lambda: csv(with_uid(lambda rng: rng.integers(0, 90, 1000).astype(float))),
            hashed("uid")),
    OddFile("hashes under another name",
            lambda: csv(with_uid(lambda rng: rng.integers(2**63, 2**64, 90, dtype=np.uint64)[np.arange(1000) % 90],
                                 "visitor")), hashed("visitor")),
    # labels
    OddFile("one label is missing", lambda: csv(with_cell("clicked", "")),
            OneSentence(code=2, says=("clicked", "{path}, line 501", "missing", "1 of 1,000", "0.1 %", "--label"))),
    OddFile("one label is 2", lambda: csv(with_cell("clicked", "2")),
            OneSentence(code=2, says=("clicked", "{path}, line 501", "'2'", "1 of 1,000", "0.1 %", "--label"))),
    OddFile("labels yes and no", lambda: csv(clicks(clicked=["yes", "no"] * 500)), RightJob()),
    OddFile("labels t and f", lambda: csv(clicks(clicked=["t", "f"] * 500)), RightJob()),
    OddFile("labels -1 and 1", lambda: csv(clicks(clicked=[1, -1] * 500)),
            OneSentence(code=2, says=("clicked", "{path}, line 3", "'-1'", "500 of 1,000", "50 %"))),
    OddFile("the header again in the middle", lambda: with_line(501, lines()[0]),
            OneSentence(code=2, says=("{path}, line 501", "'clicked'", "header"))),
    # headers
    OddFile("no header", lambda: b"".join(lines()[1:]),
            OneSentence(code=4, says=("{path}, line 1", "no header", "--names column_1,column_2,column_3,label"))),
    OddFile("a header and no row", lambda: lines()[0],
            OneSentence(code=4, says=("{path} holds no row",))),
    OddFile("an empty file", lambda: b"", OneSentence(code=4, says=("{path} holds no row",))),
    OddFile("two files with other headers", lambda: {"a.csv": csv(clicks()), "b.csv": csv(clicks(city="Rom"))},
            OneSentence(code=4, says=("b.csv", "column city", "give all files one header")), file="."),
    OddFile("a name twice", lambda: csv(clicks()).replace(b"price", b"item"),
            OneSentence(code=4, says=("{path}", "names column item twice"))),
    OddFile("spaces in names", lambda: csv(clicks().rename(columns={"price": "unit price", "user": "the user"})),
            RightJob(dense=("unit price",), hashed=("the user",))),
    OddFile("spaces after commas", lambda: csv(clicks()).replace(b",", b", "),
            RightJob()),
    OddFile("a comma at the end of each line", lambda: csv(clicks()).replace(b"\n", b",\n"),
            RightJob(left_out={"": ("no values",)})),
    OddFile("a line for Excel", lambda: b"sep=;\n" + csv(clicks(), sep=";"),
            OneSentence(code=4, says=("{path}, line 1", "'sep=;'", "remove"))),
    # lines
    OddFile("a line is cut", lambda: csv(clicks())[:-8],
            OneSentence(code=4, says=("{path}, line 1001", "fields instead of the header's 4"))),
    OddFile("a line break in a cell", lambda: csv(with_cell("user", "a\n\nb")), RightJob()),
    OddFile("a quote that is not closed", lambda: csv(clicks()).replace(b"u7,", b'"u7,'),
            OneSentence(code=4, says=("{path}, line ", "a quoted field begins here and does not end"))),
    OddFile("an array of JSON", lambda: clicks().to_json(orient="records", indent=1).encode(), RightJob(),
            file="clicks.json"),
    OddFile("an object of JSON with a list of rows",
            lambda: b'{"count": 1000, "next": null, "rows": ' + clicks().to_json(orient="records").encode() + b"}",
            RightJob(), file="clicks.json"),
    OddFile("an object of JSON with its own object and a list of rows",
            lambda: b'{\n "meta": {\n  "limit": 100\n },\n "objects": '
            + clicks().to_json(orient="records", indent=1).encode() + b"}",
            RightJob(), file="clicks.json"),
    OddFile("two lists of rows in an object of JSON", lambda: b'{"a": [{"x": 1}], "b": [{"x": 2}]}',
            OneSentence(code=4, says=("the lists a, b hold objects", "one of them")), file="clicks.json"),
    OddFile("an array of JSON that is cut", lambda: clicks().to_json(orient="records").encode()[:-7],
            OneSentence(code=4, says=("the JSON array cannot be read", "write it again")), file="clicks.json"),
    OddFile("an empty line at the end", lambda: csv(clicks()) + b"\n", RightJob()),
    OddFile("separators and quotes in cells", lambda: csv(clicks(user=lambda frame: 'a, "' + frame["user"] + '"')),
            RightJob()),
    OddFile("line breaks of Windows", lambda: csv(clicks()).replace(b"\n", b"\r\n"), RightJob()),
    # bytes
    OddFile("a byte order mark", lambda: b"\xef\xbb\xbf" + csv(clicks()), RightJob()),
    OddFile("latin-1", lambda: csv(clicks(user=["Köln", "Rom", "Rom", "Köln"] * 250)).decode().encode("latin-1"),
            RightJob()),
    OddFile("UTF-16", lambda: csv(clicks()).decode().encode("utf-16"),
            OneSentence(code=4, says=("{path}", "UTF-16", "UTF-8"))),
    OddFile("plain text named .gz", lambda: csv(clicks()), RightJob(), file="clicks.csv.gz"),
    OddFile("gzip named .csv", lambda: gzip.compress(csv(clicks())), RightJob()),
    OddFile("a gzip file is cut", lambda: gzip.compress(csv(clicks()))[:-2000],
            OneSentence(code=4, says=("{path}", "truncated")), file="clicks.csv.gz"),
    OddFile("a zip archive", zipped,
            OneSentence(code=4, says=("{path}", "zip", "pd.read_csv('{path}', compression=\"zip\").to_parquet('"))),
    OddFile("Parquet named .csv", lambda: as_parquet(clicks()), RightJob()),
    # names and dates
    OddFile("tabs, named .tsv", lambda: csv(clicks(), sep="\t"), RightJob(), file="clicks.tsv"),
    OddFile("a name in capitals", lambda: csv(clicks()), RightJob(), file="CLICKS.CSV"),
    OddFile("one timestamp is none", lambda: csv(clicks(time=lambda _: [*dates("%Y-%m-%d %H:%M")[:-1], "soon"])),
            RightJob(left_out={"time": ("timestamp", "1 of 1,000 values", "line 1001", "'soon'")})),
]  # fmt: skip


def made(odd: OddFile, folder: Path) -> Path:
    content = odd.content()
    for name, own in ({odd.file: content} if isinstance(content, bytes) else content).items():
        (folder / name).write_bytes(own)
    return folder / odd.file


MORE = [  # that nobody had named
    OddFile("one label is 2 and another column holds 0 and 1",
            lambda: csv(with_cell("clicked", "2").assign(paid=[0, 1] * 500)),
            OneSentence(code=2, says=("{path}, line 501", "'2'", "--label clicked=1 makes one"))),
    OddFile("one uid is text", lambda: csv(with_uid(lambda rng: [*rng.integers(0, 90, 999), "none"])),
            RightJob(hashed=("user", "uid"), numbered=(),
                     notes={"uid": ("1 of 1,000 values (0.1 %) is missing", "'none' in {path}, line 1001")})),
    OddFile("uids as 12 and as 12.0",
            lambda: csv(with_uid(lambda rng: [f"{i % 90}{'.0' * (i > 499)}" for i in range(1000)])), hashed("uid")),
    OddFile("a third of the prices are text", lambda: csv(with_cell("price", "abc", slice(0, 300))),
            RightJob(dense=(), hashed=("user", "price"),
                     notes={"price": ("300 of 1,000 values (30 %) are no number", "'abc' in {path}, line 2")})),
    OddFile("one id has a fraction", lambda: csv(with_cell("item", "3.5")),
            RightJob(numbered=(), left_out={"item": ("1 of 1,000", "line 501", "'3.5'", "--dense item")})),
    OddFile("one label is neither yes nor no",
            lambda: csv(clicks(clicked=[*["yes", "no"] * 250, "maybe", *["no", "yes"] * 249, "no"])),
            OneSentence(code=2, says=("'maybe' in {path}, line 502", "1 of 1,000", "0.1 %", "neither yes nor no"))),
    OddFile("one price is text and two are missing",
            lambda: csv(with_cell("price", "n/a", 500).assign(price=lambda own: [None, None, *own.price[2:]])),
            RightJob()),
    OddFile("a bid and the number of kids are numbers",
            lambda: csv(clicks(bid=np.arange(1000) % 90, kids=np.arange(1000) % 5)),
            RightJob(dense=("price", "bid", "kids"))),
    OddFile("dates of another order", lambda: csv(clicks(day=lambda _: dates("%d.%m.%Y"))),
            RightJob(left_out={"day": ("timestamp",)})),
    OddFile("seconds since 1970", lambda: csv(clicks(timestamp=1_700_000_000 + np.arange(1000) // 2)),
            RightJob(left_out={"timestamp": ("a timestamp is not a feature",)})),
    OddFile("zip codes", lambda: csv(clicks(zip=[f"{501 + i % 90 * 900:05}" for i in range(1000)])),
            RightJob(hashed=("user", "zip"))),
    OddFile("columns without names", lambda: csv(clicks().set_axis(["0", "1", "2", "3"], axis=1)),
            OneSentence(code=2, says=("no name alone tells the label; name it with --label: 3;",))),
    OddFile("no header, and a value twice", lambda: b"u1,7,7,1\n" + b"".join(lines()[1:]),
            OneSentence(code=4, says=("{path}", "no header", "--names column_1,column_2,column_3,label"))),
    OddFile("two characters between cells", lambda: csv(clicks()).replace(b",", b"::"), RightJob(), file="clicks.dat"),
    OddFile("spaces between cells, in columns", lambda: csv(clicks()).replace(b",", b"   "), RightJob(), file="clicks"),
    OddFile("text of another name", lambda: csv(clicks(), sep=";"), RightJob(), file="clicks.inter"),
    OddFile("an empty line within", lambda: with_line(501, b"\n"),
            OneSentence(code=4, says=("{path}, line 501", "the line is empty"))),
    OddFile("numbers only, and no ids", lambda: csv(clicks()[["price", "clicked"]]),
            RightJob(hashed=(), numbered=())),
    OddFile("a second line of names", lambda: b"X1,X2,X3,Y\n" + csv(clicks()),
            OneSentence(code=4, says=("{path}: after line 1", "'user item price clicked'", "remove one"))),
    OddFile("names of R, without one for the rows", lambda: clicks().to_csv().encode().replace(b",", b"", 1),
            OneSentence(code=4, says=("{path}, line 1", "4 names for 5 columns", "add one for the first"))),
    OddFile("two separators at the end of each line", lambda: csv(clicks()).replace(b"\n", b",,\n"),
            OneSentence(code=4, says=("{path}, line 1", "2 of 6 columns have no name"))),
    OddFile("no header, and labels as 1.0e+00",
            lambda: b"".join(b"%.3e,%d,u%d\n" % (i % 2, 20 + i, i % 7) for i in range(1000)),
            OneSentence(code=4, says=("--names label,column_2,column_3",))),
    OddFile("labels as 1.0e+00", lambda: csv(clicks(clicked=["1.0e+00", "0.0e+00"] * 500)), RightJob()),
    OddFile("lines of other numbers of cells", lambda: b"1,0,7:1,8:1,9:1,4:1\n2,1,7:1,9:1\n" * 9,
            OneSentence(code=4, says=("{path}", "4 to 6 cells", "no table", "lists"))),
    OddFile("NaN in numbers", lambda: csv(with_cell("price", "nan")), RightJob()),
    OddFile("lists in brackets",
            lambda: csv(clicks(seen=["[3, 5]", "[5]"] * 500, tags=["['a', 'b c']", "['b c']"] * 500)),
            RightJob(hashed=("user", "tags"), numbered=("item", "seen"))),
    OddFile("JSON lines with numbers in text",
            lambda: clicks(clicked=["0", "1"] * 500, price=lambda own: own["price"].astype(str)).to_json(
                orient="records", lines=True).encode(),
            RightJob(), file="clicks.jsonl"),
    OddFile("Parquet with labels in words", lambda: as_parquet(clicks(clicked=["no", "yes"] * 500)), RightJob(),
            file="clicks.parquet"),
    OddFile("Parquet with text lists", lambda: as_parquet(clicks(tags=["a|b", "b|c"] * 500, seen=["3^5", "5^7"] * 500)),
            RightJob(hashed=("user", "tags"), numbered=("item", "seen")), file="clicks.parquet"),
    OddFile("zeros before digits in bytes that are no text",
            lambda: csv(clicks(user=["0\x00", "\x00", "\x00"] * 333 + ["0\x00"])), RightJob()),
    OddFile("line breaks of old Macs", lambda: csv(clicks()).replace(b"\n", b"\r"), RightJob()),
    OddFile("a web page", lambda: b"<!DOCTYPE html>\n<html><title>404, not found</title></html>\n",
            OneSentence(code=4, says=("{path}", "a web page"))),
    OddFile("gzip of nothing", lambda: gzip.compress(b""), OneSentence(code=4, says=("{path} holds no row",)),
            file="clicks.csv.gz"),
    OddFile("Parquet with uids of 64 bits without a sign",
            lambda: as_parquet(with_uid(lambda rng: rng.integers(2**63, 2**64, 90, np.uint64)[np.arange(1000) % 90])),
            hashed("uid"), file="clicks.parquet"),
    OddFile("Parquet with uids as floats",
            lambda: as_parquet(with_uid(lambda rng: [None, *rng.integers(0, 90, 999).astype(float)])),
            hashed("uid"), file="clicks.parquet"),
    OddFile("Parquet with a missing label", lambda: as_parquet(clicks(clicked=[*[0, 1] * 499, None, 1])),
            OneSentence(code=2, says=("1 of 1,000 values (0.1 %) is missing", "{path}, row 998")),
            file="clicks.parquet"),
    OddFile("a folder of .tsv files",
            lambda: {"a.tsv": csv(clicks()[:400], sep="\t"), "b.tsv": csv(clicks()[400:], sep="\t")},
            RightJob(), file="."),
]  # fmt: skip


def test_there_are_48() -> None:
    assert len({odd.name for odd in FILES}) == len(FILES) == 48


@pytest.mark.parametrize("odd", [*FILES, *MORE], ids=lambda odd: odd.name)
def test_an_odd_file_gives_the_right_job_or_one_sentence(
    odd: OddFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_command, "advise_job", unavailable)
    path = made(odd, tmp_path)
    result = CliRunner().invoke(app, ["new", "--data", str(path)])
    if isinstance(odd.right, OneSentence):
        assert (result.exit_code, result.stdout) == (odd.right.code, ""), result.stdout + result.stderr
        [sentence] = result.stderr.splitlines()
        for part in odd.right.says:
            assert part.format(path=path) in sentence
        return
    assert result.exit_code == 0, result.stderr
    (tmp_path / "job.toml").write_text(result.stdout)
    require_job(odd.right, path, tmp_path / "job.toml", result.stderr)


def unavailable(*_: Any) -> None:
    raise ConfigError("not asked here")


def require_job(right: RightJob, data: Path, path: Path, said: str) -> None:
    """The job has these columns, reads every row, and what was said of others is in it and on stderr."""
    job = load_job(path)
    text = path.read_text().splitlines()
    columns = job.data.columns
    assert (columns.label, columns.dense) == (right.label, list(right.dense))
    is_hashed = {name: columns.is_hashed(name) for name in job.features if name not in right.dense}
    assert is_hashed == dict.fromkeys(right.hashed, True) | dict.fromkeys(right.numbered, False)
    for name, parts in right.left_out.items():
        [in_job] = [line for line in text if line.startswith(f"# left out: {name} (")]
        [on_stderr] = [line for line in said.splitlines() if re.match(rf"{re.escape(name)} +left out ", line)]
        assert all(part in in_job and part in on_stderr for part in parts), on_stderr
    for name, parts in right.notes.items():
        [in_job] = [line for line in text if line.startswith(f"# ids: {name} (")]
        [on_stderr] = [line for line in said.splitlines() if re.match(rf"{re.escape(name)} +ids ", line)]
        assert all(part.format(path=data) in line for part in parts for line in (in_job, on_stderr)), on_stderr
    seen = Seen(groups=group_specs(job), count=1)
    findings = [
        *findings_of("data", lambda: check_opens(job, seen)),
        *findings_of("data", lambda: check_samples(job, seen, ALL)),
    ]
    assert {finding.level for finding in findings} == {"ok"}, findings
    assert seen.num_samples == NUM_ROWS
