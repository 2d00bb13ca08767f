"""Text is read once; the columns that are kept of it are used only for the same bytes and rules, and only whole."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from rowcast.job.schema import Job
from rowcast.prefetcher.readers import copies
from rowcast.prefetcher.readers import text_files as text
from rowcast.prefetcher.readers.formats import csv as csv_reader
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.workers import WorkerSource
from rowcast.runtime.errors import ConfigError, DataError
from tests.readers.polling import rest_of
from tests.support.data_files import CSV_COLUMNS, Row, all_samples, make_job, table, with_workers, write_csv
from tests.support.facts import facts
from tests.support.small_disk import small_disk


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were made columns, in order; record batches are short."""
    names: list[str] = []
    convert = copies.Copy._convert

    def convert_and_note(self: copies.Copy, progress: copies.Progress) -> None:
        names.append(self.source.name)
        convert(self, progress)

    monkeypatch.setattr(copies.Copy, "_convert", convert_and_note)
    monkeypatch.setattr(text, "CHUNK_BYTES", 2000)
    return names


def job_in(folder: Path, **data: Any) -> Job:
    """Three files of 103 rows, and the folder `columns`."""
    data = {"path": str(folder / "data"), "copies": str(folder / "columns"), "columns": CSV_COLUMNS} | data
    if not (folder / "data").exists():
        (folder / "data").mkdir()
        for seed, name in enumerate(("a.csv", "b.csv.gz", "c.csv")):
            write_csv(folder / "data" / name, 103, seed)
    return make_job("csv", eval_fraction=0.0, shuffle="window:50", **data)


def rows(job: Job) -> list[Row]:
    return all_samples(open_reader(job).batches("train", 0))


def kept(folder: Path, end: str, name: str = "*") -> list[Path]:
    return sorted((folder / "columns").glob(f"{name}.{end}"))


def test_a_row_of_an_array_of_json_is_named_by_its_number(tmp_path: Path) -> None:
    objects = [{"label": number % 2, "int_0": 0.5, "a": number} for number in range(9)]
    for name, content in (("a.json", json.dumps(objects, indent=1)), ("b.json", json.dumps({"n": 9, "rows": objects}))):
        (tmp_path / name).write_text(content)
        job = make_job("jsonl", [table("items", 7, "a")], path=str(tmp_path / name), eval_fraction=0.0)
        with pytest.raises(DataError, match=rf"{name}, object 8, column a: id 7 is outside table items"):
            rows(job)


def test_the_second_start_reads_the_first_lines_only(tmp_path: Path, read: list[str]) -> None:
    job = job_in(tmp_path)
    first = rows(job)
    assert rows(job) == first == rows(job_in(tmp_path, copies=str(tmp_path / "others")))
    assert read == ["a.csv", "b.csv.gz", "c.csv"] * 2
    assert len(kept(tmp_path, "arrow")) == 3


def test_other_rules_have_a_copy_of_their_own_and_both_stay(tmp_path: Path, read: list[str]) -> None:
    first = rows(job_in(tmp_path))
    rows(job_in(tmp_path, columns=CSV_COLUMNS | {"hash_by_value": True}))
    assert rows(job_in(tmp_path)) == first
    assert len(read) == len(kept(tmp_path, "arrow")) == 6
    assert rows(job_in(tmp_path, on_invalid_id="zero")) == first
    assert len(read) == 6, "what becomes of ids is decided batch by batch"


def append_row(path: Path) -> None:
    with path.open("ab") as file:  # its last line has no end
        file.write(b"\n" + path.read_bytes().splitlines()[-1])


def test_a_file_that_grew_is_read_again_and_no_other(tmp_path: Path, read: list[str]) -> None:
    rows(job_in(tmp_path))
    append_row(tmp_path / "data" / "a.csv")
    assert len(rows(job_in(tmp_path))) == 3 * 103 + 1
    assert read[3:] == ["a.csv"]


@pytest.mark.parametrize("way", ["touched", "moved"])
def test_a_file_of_another_time_or_inode_with_the_same_bytes_keeps_its_copy(
    way: str, tmp_path: Path, read: list[str]
) -> None:
    first = rows(job_in(tmp_path))
    path = tmp_path / "data" / "a.csv"
    if way == "touched":
        os.utime(path, ns=(10**18, 10**18))
    else:
        shutil.copy2(path, tmp_path / "other")
        (tmp_path / "other").rename(path)
    assert rows(job_in(tmp_path)) == first
    records = [own.read_bytes() for own in kept(tmp_path, "json")]
    assert rows(job_in(tmp_path)) == first
    assert records == [own.read_bytes() for own in kept(tmp_path, "json")], "the new state was noted once"
    assert len(read) == 3


def test_other_bytes_are_noticed_whose_size_time_and_inode_are_kept(tmp_path: Path, read: list[str]) -> None:
    """No program can keep the time of the last change of the inode."""
    first, path = rows(job_in(tmp_path)), tmp_path / "data" / "a.csv"
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:-1] + (b"1" if content[-1:] == b"0" else b"0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert rows(job_in(tmp_path)) != first
    assert read[3:] == ["a.csv"]


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


@pytest.mark.parametrize("end", ["arrow", "json"])
def test_a_copy_that_is_torn_or_damaged_is_made_again(end: str, tmp_path: Path, read: list[str]) -> None:
    first = rows(job_in(tmp_path))
    [copy] = kept(tmp_path, end, "a*")
    good = copy.read_bytes()
    damaged = [good[:cut] for cut in (0, 8, len(good) // 2, len(good) - 1)] + [good + b"0"]
    damaged += [flipped(good, at) for at in range(0, len(good), len(good) // 60)]
    for content in damaged:
        read.clear()
        copy.write_bytes(content)
        assert rows(job_in(tmp_path)) == first
        assert read == ["a.csv"]
        assert copy.read_bytes() == good
    copy.unlink()
    assert rows(job_in(tmp_path)) == first


def test_what_is_damaged_while_it_is_read_is_made_again_unless_its_source_has_changed(
    tmp_path: Path, read: list[str]
) -> None:
    first = rows(job_in(tmp_path))
    [copy] = kept(tmp_path, "arrow", "a*")
    good = copy.read_bytes()
    for source_changes in (False, True):
        reader = open_reader(job_in(tmp_path))
        with copy.open("r+b") as file:  # the mapped file itself
            file.write(flipped(good, len(good) // 2))
        if source_changes:
            append_row(tmp_path / "data" / "a.csv")
            with pytest.raises(DataError, match=facts("a.csv", "the file changed while it was read")):
                list(reader.batches("train", 0))
        else:
            assert all_samples(reader.batches("train", 0)) == first
    assert read[3:] == ["a.csv"] * 2


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, path, pieces = job_in(tmp_path), tmp_path / "data" / "a.csv", text.pieces

    def growing(*args: Any) -> Any:
        yield from pieces(*args)
        with path.open("ab") as file:
            file.write(b"more\n")

    monkeypatch.setattr(csv_reader, "pieces", growing)
    with pytest.raises(DataError, match=facts(path, "the file changed while it was read")):
        open_reader(job)
    assert kept(tmp_path, "arrow") == kept(tmp_path, "partial") == []


def read_and_note(job: Job, notes: Path) -> None:
    """The main function of a process that starts with others."""
    convert = copies.Copy._convert

    def convert_and_note(self: copies.Copy, progress: copies.Progress) -> None:
        with notes.open("a") as file:
            file.write(f"{self.source.name}\n")
        convert(self, progress)

    copies.Copy._convert = convert_and_note  # type: ignore[method-assign]
    assert len(rows(job)) == 3 * 103


def test_processes_that_start_at_once_read_each_file_once(tmp_path: Path) -> None:
    job, context = job_in(tmp_path), get_context("spawn")
    processes = [context.Process(target=read_and_note, args=(job, tmp_path / "notes")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 3
    assert sorted((tmp_path / "notes").read_text().split()) == ["a.csv", "b.csv.gz", "c.csv"]


def test_nobody_waits_without_end_for_one_that_was_stopped(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "LONGEST_WAIT_S", 0.1)
    first = rows(job_in(tmp_path))
    [lock] = kept(tmp_path, "lock", "a*")
    [record] = kept(tmp_path, "json", "a*")
    record.unlink()
    with copies.folder_lock(lock, "*"):
        assert rows(job_in(tmp_path)) == first
    assert read[3:] == ["a.csv"]


def test_nothing_is_removed_but_what_a_dead_process_left(tmp_path: Path, read: list[str]) -> None:
    first = rows(job_in(tmp_path))
    [copy] = kept(tmp_path, "arrow", "a*")
    left, others = copy.with_name(f"{copy.name}.0123abcd.partial"), [copy.with_name("mine"), copy.with_suffix(".bak")]
    for path in (left, *others):
        path.write_bytes(b"x")
    copy.unlink()
    assert rows(job_in(tmp_path)) == first
    assert [left.exists(), *(path.exists() for path in others)] == [False, True, True]


@pytest.mark.parametrize("noticed", ["after the first pieces", "when it is full"])
def test_columns_that_do_not_fit_are_refused_with_both_numbers(
    noticed: str, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(tmp_path, copies=str(tmp_path / "columns" / "here"))
    with small_disk(tmp_path / "columns", 40 * 2**10) as disk:
        if noticed == "when it is full":
            monkeypatch.setattr(copies, "free_bytes", lambda folder: 2**40)
        with pytest.raises(
            ConfigError, match=r"^data\.copies: .* need about .*KiB more in .*, which has .*B free; free"
        ):
            rows(job)
        assert not [path for path in disk.rglob("*") if path.suffix == ".partial"]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=facts("data.copies", "a.csv", "cannot be kept in", "name a folder")):
        rows(job_in(tmp_path, copies=str(tmp_path / "file" / "columns")))


def test_a_long_reading_says_how_far_it_is(tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "EVERY_S", 0.0)
    with capture_logs() as lines:
        rows(job_in(tmp_path))
    assert [line for line in lines if line["file"].endswith("c.csv")][-1]["share"].startswith("100 % of ")
    assert len(lines) > 9


def test_a_run_keeps_columns_beside_its_directory_and_its_workers_use_them(
    tmp_path: Path, opened: Callable[..., WorkerSource]
) -> None:
    job = job_in(tmp_path, copies=None)
    job = replace(job, job=replace(job.job, run_dir=str(tmp_path / "run")))
    assert len(all_samples(placed.batch for placed in rest_of(opened(with_workers(job, 2))))) == 3 * 103
    assert len(kept(tmp_path, "arrow")) == 3


def test_columns_beyond_the_limit_are_refused_and_nothing_of_them_is_left(tmp_path: Path) -> None:
    job = job_in(tmp_path, copies_limit="3KB")
    with pytest.raises(ConfigError, match=facts("data.copies_limit", "a.csv", "2.93 KiB")):
        rows(job)
    assert kept(tmp_path, "*") == kept(tmp_path, "lock")
    with pytest.raises(ConfigError, match=facts("copies_limit", "3 stones")):
        job_in(tmp_path, copies_limit="3 stones")
    assert len(rows(job_in(tmp_path, copies_limit="1MiB"))) == 3 * 103


def test_auto_leaves_room_for_what_gzip_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, line = tmp_path / "data" / "a.csv.gz", b"0," * 39 + b"0\n"
    monkeypatch.setattr(copies, "LEAST_LIMIT", 10**6)
    path.parent.mkdir()
    header = ("label," + ",".join([f"int_{i}" for i in range(13)] + [f"cat_{i}" for i in range(26)]) + "\n").encode()
    path.write_bytes(gzip.compress(header + line * 30_000))
    job = make_job("csv", path=str(path), copies=str(tmp_path / "columns"), eval_fraction=0.0)
    with pytest.raises(ConfigError, match=facts("data.copies_limit", "a.csv.gz", "higher")):
        open_reader(job)
