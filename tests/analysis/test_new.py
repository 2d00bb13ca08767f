"""`rowcast new`: what columns are taken for, the job that comes out of it, and what is refused."""

import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rowcast.analysis.new import columns
from rowcast.analysis.new import new as new_command
from rowcast.analysis.new.columns import Distinct
from rowcast.analysis.new.roles import rounded_up
from rowcast.command_line.prefetcher import app
from rowcast.job.file import load_job, with_values
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.readers import text_files
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.runtime.errors import ConfigError
from tests.support.batches import slots_for
from tests.support.driver import InProcessRun, Settings

NUM_ROWS = 3000


def clicks(num_rows: int = NUM_ROWS) -> pd.DataFrame:
    """A label that users and items decide, and a column of every kind."""
    rng = np.random.default_rng(3)
    user, item = rng.integers(0, 60, num_rows), rng.integers(0, 40, num_rows)
    return pd.DataFrame(
        {
            "row": np.arange(num_rows),
            "time": pd.date_range("2024-01-01", periods=num_rows, freq="min"),
            "user": [f"user {number}, {number:x}" for number in user],
            "item": item,
            "account_id": rng.integers(0, 100, num_rows) * 1_000_003,
            "device": np.array(["ios", "web", None])[rng.integers(0, 3, num_rows)],
            "hour": rng.integers(0, 24, num_rows),
            "price": rng.random(num_rows).round(3),
            "cents": rng.integers(0, 10**6, num_rows),
            "rating": np.where(rng.random(num_rows) < 0.1, np.nan, rng.random(num_rows)),
            "constant": 7,
            "new": rng.integers(0, 2, num_rows),
            "clicked": ((user % 3 == 0) ^ (item % 2 == 0)).astype(int),
        }
    )


def write_csv(folder: Path, frame: pd.DataFrame, **options: Any) -> Path:
    frame.to_csv(folder / "clicks.csv", index=False, **options)
    return folder / "clicks.csv"


def write_parquet(folder: Path, frame: pd.DataFrame) -> Path:
    frame.to_parquet(folder / "clicks.parquet")
    return folder / "clicks.parquet"


def new(path: Path | str, *options: str) -> tuple[str, str]:
    """(the job file, what was said)"""
    result = CliRunner().invoke(app, ["new", "--data", str(path), *options])
    assert result.exit_code == 0, result.stderr
    return result.stdout, result.stderr


def new_job(folder: Path, path: Path, *options: str) -> Job:
    (folder / "job.toml").write_text(new(path, *options)[0])
    return load_job(folder / "job.toml")


def refused(path: Path | str, *options: str, code: int = 2) -> str:
    result = CliRunner().invoke(app, ["new", "--data", str(path), *options])
    assert (result.exit_code, result.stdout) == (code, "")
    return result.stderr.removeprefix("rowcast prefetcher: ").strip()


def tables_of(job: Job) -> dict[str, int]:
    return {table.name: table.num_embeddings for table in job.tables}


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_columns_are_taken_for_what_their_names_types_and_values_say(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path, clicks())
    text, said = new(path)
    job = new_job(tmp_path, path)
    assert (job.data.format, job.data.path) == (path.suffix[1:], str(path))
    assert job.data.columns.label == "clicked"
    assert job.data.columns.dense == ["price", "cents", "rating", "new"]
    tables = tables_of(job)
    assert {name: count for name, count in tables.items() if not name.endswith("_buckets")} == {
        "user": 610, "item": 44, "account_id": 1100, "device": 100, "hour": 27
    }  # fmt: skip
    assert {name for name in tables if name.endswith("_buckets")} == {
        "price_buckets",
        "cents_buckets",
        "rating_buckets",
    }
    assert (job.data.epochs, job.eval.patience, job.eval.keep) == (10, 2, "best")
    assert job.data.columns.hash == ["user", "account_id", "device"]
    for left_out in (
        "row (every row has a value of its own",
        "time (a timestamp is not a feature",
        "constant (every value is the same",
    ):
        assert f"# left out: {left_out}" in text
    prepare, rating = job.data.columns.prepare, clicks()["rating"]
    assert prepare["rating"].fill == pytest.approx(rating.median(), rel=1e-3)
    filled = rating.fillna(rating.median())
    assert prepare["rating"].standardize == pytest.approx((filled.mean(), filled.std()), rel=1e-3)
    assert (prepare["new"].fill, prepare["new"].standardize) == (0.0, None), "0 and 1 stay"
    assert (job.data.on_invalid_id, job.data.columns.hash_by_value) == ("zero", True)
    assert (job.data.eval_fraction, job.data.shuffle, job.run_dir) == (0.1, "window:65536", Path("runs/clicks"))
    assert said.splitlines()[-2:] == [
        "  rowcast check --config job.toml",
        "  rowcast train --config job.toml",
    ]
    assert 'capacity = "1MiB"  # `rowcast advise` recommends ' in text


@pytest.mark.parametrize("form", ["csv.gz", "jsonl"])
def test_advice_about_much_text_copies_its_first_rows_only(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        path, frame = tmp_path / f"{number}.{form}", clicks(1000)
        frame.to_csv(path, index=False) if form == "csv.gz" else frame.to_json(
            path, orient="records", lines=True, date_format="iso"
        )
    read: list[int] = []

    def advise_job(job: Job, options: Any, *others: Any) -> Any:
        read.extend(len(own.dense) for own in map(attrgetter("batch"), schedule(job, open_reader(job))))
        return plain(job, options, *others)

    plain: Any = vars(new_command)["advise_job"]
    monkeypatch.setattr(new_command, "advise_job", advise_job)
    monkeypatch.setattr(new_command, "WHOLE_RUN_ROWS", 1500)
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 4096)
    found = CliRunner().invoke(app, ["new", "--data", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert "by `rowcast advise`" in found.output or "recommends" in found.output
    assert 1500 <= sum(read) < 1600


def trained(job: Job) -> list[np.float32]:
    job = with_values(job, {"data": {"epochs": 1}, "eval": {"patience": 0, "keep": "newest"}})
    batches = list(schedule(job, open_reader(job)))
    return (
        InProcessRun(job, batches, Settings(slots=slots_for(group_specs(job), batches, "more"), seeded_streams=False))
        .run()
        .results.losses
    )


def test_the_job_of_a_csv_file_with_text_trains_and_learns(tmp_path: Path) -> None:
    frame = pd.concat([clicks()] * 3).drop(columns="cents")
    losses = trained(new_job(tmp_path, write_csv(tmp_path, frame)))
    assert len(losses) > 100
    assert np.mean(losses[-20:]) < np.mean(losses[:20]) - 0.1


def test_the_job_of_a_parquet_file_with_lists_trains_and_learns(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    seen = [rng.integers(0, 50, count).tolist() for count in rng.integers(0, 6, 9000)]
    words = [[f"word {number}" for number in own] if i % 9 else None for i, own in enumerate(seen)]
    label = [int(sum(number % 2 for number in own) > len(own) / 2) for own in seen]
    pq.write_table(pa.table({"seen": seen, "words": words, "target": label}), tmp_path / "sessions.parquet")
    text, _ = new(tmp_path / "sessions.parquet")
    job = new_job(tmp_path, tmp_path / "sessions.parquet")
    assert job.data.columns.dense == []
    assert tables_of(job) == {"seen": 55, "words": 510}
    assert job.data.columns.hash == ["words"]
    assert "a learned vector, because there are no dense features" in text
    losses = trained(job)
    assert np.mean(losses[-20:]) < np.mean(losses[:20]) - 0.1


def test_rows_too_few_for_an_evaluation_have_no_patience(tmp_path: Path) -> None:
    assert new_job(tmp_path, write_csv(tmp_path, clicks()[:9])).eval.patience == 0
    assert new_job(tmp_path, write_csv(tmp_path, clicks()[:10])).eval.patience == 2


def test_lists_in_csv_another_delimiter_and_true_and_false_are_noticed(tmp_path: Path) -> None:
    frame = clicks()[["user", "clicked"]]
    frame = frame.assign(
        clicked=frame["clicked"].astype(bool),
        genres=["1|2", "3", "", "17"] * (NUM_ROWS // 4),
        tags=["a|b", "c"] * (NUM_ROWS // 2),
    )
    job = new_job(tmp_path, write_csv(tmp_path, frame, sep=";"))
    assert job.data.columns.delimiter == ";"
    assert job.data.columns.lists == {"genres": "|", "tags": "|"}
    assert tables_of(job) == {"user": 610, "genres": 20, "tags": 100}
    assert job.data.columns.hash == ["user", "tags"]
    assert len(list(open_reader(job).batches("train", 0))) >= 80


def test_a_file_without_a_last_line_break_and_in_another_encoding_is_read(tmp_path: Path) -> None:
    lines = ["clicked,city,hour", *(f"{i % 2},{'Köln' if i % 3 else 'Rom'},{i % 5}" for i in range(301))]
    (tmp_path / "clicks.csv").write_bytes("\n".join(lines).encode("latin-1"))
    job = new_job(tmp_path, tmp_path / "clicks.csv")
    assert "301 rows in 1 file" in new(tmp_path / "clicks.csv")[1]
    assert tables_of(job) == {"city": 100, "hour": 6}
    reader = open_reader(job)
    assert (reader.num_samples("train"), reader.num_samples("eval")) == (271, 30)
    assert sum(batch.size for batch in reader.batches("train", 0)) == 271


def test_where_advise_fails_the_job_says_that_its_capacity_is_a_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("no room\nto follow rows")

    monkeypatch.setattr(new_command, "advise_job", fail)
    path = write_csv(tmp_path, clicks())
    assert new(path)[0].endswith(
        'capacity = "64MiB"  # a guess, because `rowcast advise` failed: no room to follow rows\n'
    )
    assert new_job(tmp_path, path).cache.capacity == "64MiB"


def test_progress_is_told_in_lines_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_csv(tmp_path, clicks())
    monkeypatch.setattr("rowcast.analysis.show.EVERY_S", 0.0)
    assert "looking at every row, in pieces: 1 of 1\n" in new(path)[1]


def test_options_choose_otherwise(tmp_path: Path) -> None:
    path = write_csv(tmp_path, clicks())
    job = new_job(tmp_path, path, "--label", "new", "--dense", "hour, clicked", "--ids", "row,cents")
    assert job.data.columns.label == "new"
    assert job.data.columns.dense == ["hour", "price", "rating", "clicked"]
    assert tables_of(job)["row"] == 3300
    assert tables_of(job)["cents"] > 1000


def test_a_folder_and_a_glob_of_files_are_read_whole(tmp_path: Path) -> None:
    frame = clicks()
    for number in range(3):
        frame[frame["hour"] % 3 == number].to_csv(tmp_path / f"day_{number}.csv", index=False)
    for path in (tmp_path, f"{tmp_path}/day_*.csv"):
        text, said = new(path)
        assert "3,000 rows in 3 files" in said
        assert "\nnum_embeddings = 27  # ids go up to 23\n" in text


@pytest.mark.parametrize(
    ("changed", "options", "sentence"),
    [
        ({"clicked": 1, "new": 0}, (),
         "no column holds 0 and 1 in every row, as a label does (clicked holds values from 1 to 1)"),
        ({"clicked": None, "free": [0, 1] * (NUM_ROWS // 2)}, (),
         "no name alone tells the label; name it with --label: free, new; --label price, a measure,"),
        ({}, ("--label", "click"), "--label click: {path} has no such column, the nearest is clicked; it has row, "
         "time, user, item, account_id, device, hour, price, cents, rating, constant, new, clicked"),
        ({}, ("--label", "device"),
         "--label device: a label is 0 or 1 in every row, and this column holds"),
        ({}, ("--dense", "user"), "--dense user: a dense feature is a number, and this column holds text; 3,000 of "
         "3,000 values (100 %) are no number, the first 'user "),
        ({}, ("--ids", "usr"), "--ids usr: {path} has no such column, the nearest is user; it has"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_there_is(
    changed: dict[str, Any], options: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    path = write_csv(tmp_path, clicks().assign(**changed))
    assert sentence.format(path=path) in refused(path, *options)


def test_data_of_another_kind_or_without_ids_is_refused(tmp_path: Path) -> None:
    assert "no such file, folder or glob" in refused(tmp_path / "nowhere.csv")
    (tmp_path / "clicks.txt").write_text("label\n1\n")
    sentence = refused(tmp_path / "clicks.txt", code=4)
    assert sentence.endswith(
        "line 1: 'label' is one column; separate columns by a comma, semicolon, tab, |, :: or spaces"
    )
    (tmp_path / "clicks.txt").unlink()
    path = write_csv(tmp_path, clicks()[["new", "clicked"]])
    assert refused(path) == (
        f"{path}: no column looks like ids (text, lists, codes), and none is a number to look up by ranges; name some "
        "with --ids"
    )
    write_parquet(tmp_path, clicks())
    assert refused(tmp_path).endswith(
        f"clicks.csv is csv and clicks.parquet is parquet; name files of one kind, for example '{tmp_path}/*.csv'"
    )
    (tmp_path / "broken.csv").write_text('label,user\n1,"ann\nbob\n')
    sentence = refused(tmp_path / "broken.csv", code=4)
    assert sentence == (
        f"{tmp_path / 'broken.csv'}, line 2: a quoted field begins here and does not end; "
        "close its quotes, and double those within a field"
    )


def test_names_that_toml_must_quote_are_quoted(tmp_path: Path) -> None:
    odd = 'a "quoted"\\ näme\n'
    frame = pd.DataFrame({"y": [0, 1] * 200, **dict.fromkeys((odd, "2nd", "2.nd"), ["x", "z", "z", "x"] * 100)})
    job = new_job(tmp_path, write_parquet(tmp_path, frame))
    assert [table.features for table in job.tables] == [[odd], ["2nd"], ["2.nd"]]
    assert len({table.name for table in job.tables}) == 3


def test_dates_decimals_and_other_types_are_left_out_with_a_reason(tmp_path: Path) -> None:
    frame = pd.DataFrame({"y": [0, 1] * 50, "user": ["a", "b", "b", "a"] * 25})
    table = pa.Table.from_pandas(frame).append_column("day", pa.array([datetime.date(2024, 1, 1)] * 100))
    table = table.append_column("sums", pa.array([1] * 100).cast(pa.decimal128(21, 2))).append_column(
        "vector", pa.array([[0.5]] * 100)
    )
    table = table.append_column("empty", pa.array([None] * 100, pa.int64()))
    table = table.append_column("place", pa.array([{"x": 1, "y": "b"}] * 100))
    pq.write_table(table, tmp_path / "clicks.parquet")
    text, _ = new(tmp_path / "clicks.parquet")
    for left_out in (
        "day (a timestamp",
        "sums (decimal128(21, 2) cannot be read",
        "vector (lists of numbers are not features",
        "empty (it has no values",
        "place (struct<x: int64, y: string> cannot be read",
    ):
        assert f"# left out: {left_out}" in text


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_large_whole_numbers_are_scaled_so_that_fp32_holds_them(write: Any, tmp_path: Path) -> None:
    views = np.where(np.arange(100) % 3, 2**24 + 1, 0)
    job = new_job(tmp_path, write(tmp_path, clicks(100)[["item", "clicked", "price"]].assign(views=views)))
    dense = np.concatenate([batch.dense for batch in open_reader(job).batches("train", 0)])
    assert job.data.columns.dense == ["price", "views"]
    assert np.abs(dense).max() < 4


def test_distinct_values_are_counted_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MOST_HASHES", 4096)
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 100_000, dtype=np.uint64)
    distinct = Distinct()
    for part in np.array_split(np.concatenate([hashes, hashes]), 20):
        distinct.add(part)
    assert distinct.count == pytest.approx(100_000, rel=0.1)
    few = Distinct()
    few.add(hashes[:500])
    assert few.count == 500


@pytest.mark.parametrize(
    ("count", "rounded"), [(1, 1), (24, 24), (100, 100), (101, 110), (20_001, 21_000), (999_999, 1_000_000)]
)
def test_sizes_are_rounded_up_to_two_digits(count: int, rounded: int) -> None:
    assert rounded_up(count) == rounded
