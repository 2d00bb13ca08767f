"""The lines of a text file are counted by the first start only; what is kept of them is never trusted."""

import gzip
import os
import random
from collections.abc import Callable
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.readers import line_index as kept_lines
from rowcast.prefetcher.readers import text_files as text
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.prefetcher.readers.text_files import TextCursor, TextIndex
from rowcast.prefetcher.readers.workers import WorkerSource
from rowcast.runtime.errors import ConfigError, DataError
from tests.readers.polling import rest_of
from tests.support.data_files import all_samples, click_log, make_job, with_workers, write_tsv
from tests.support.facts import facts

NUM_LINES = 300
CHUNK_BYTES = 512


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose lines were counted, in order; chunks are short."""
    names: list[str] = []

    def count(path: Path, really: Callable[[Path], kept_lines.Pieces] = text.count_lines) -> kept_lines.Pieces:
        names.append(path.name)
        return really(path)

    monkeypatch.setattr(text, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(text, "count_lines", count)
    return names


def write_lines(path: Path, num_lines: int = NUM_LINES, first: int = 0) -> Path:
    """Lines as long as their numbers say, the last one without an end."""
    lines = "\n".join(f"{line}:{'x' * (line % 23)}" for line in range(first, first + num_lines)).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def content_of(index: TextIndex) -> bytes:
    with closing(TextCursor(index)) as cursor:
        return cursor.lines(np.arange(index.num_lines), range(index.num_lines))


def kept_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def set_time(path: Path, mtime_ns: int) -> None:
    os.utime(path, ns=(mtime_ns, mtime_ns))


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_the_second_start_reads_no_byte_of_the_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", CHUNK_BYTES)
    path, folder = write_lines(tmp_path / name), tmp_path / "lines"
    first = TextIndex([path], folder)
    assert first.num_lines == NUM_LINES
    assert len(first.chunks) > 5

    def refuse(path: Path) -> None:
        raise AssertionError(f"{path} was opened")

    with monkeypatch.context() as context:
        context.setattr(text, "open_text", refuse)
        second = TextIndex([path], folder)
    assert second.chunks == first.chunks == TextIndex([path]).chunks
    assert content_of(second) == content_of(TextIndex([path]))


def test_a_file_name_that_is_no_text_is_kept_too(tmp_path: Path, counted: list[str]) -> None:
    path = write_lines(Path(os.fsdecode(os.fsencode(tmp_path) + b"/day_\xff.tsv")))
    for _ in range(2):
        assert TextIndex([path], tmp_path / "lines").num_lines == NUM_LINES
    assert len(counted) == 1


def test_only_files_that_have_changed_are_counted_again(tmp_path: Path, counted: list[str]) -> None:
    paths = [write_lines(tmp_path / name) for name in ("a", "b", "c.gz")]
    folder = tmp_path / "lines"
    TextIndex(paths, folder)
    assert counted == ["a", "b", "c.gz"]
    counted.clear()
    with paths[1].open("ab") as file:  # a log that grows
        file.write(b"more\nand more\n")
    paths.append(write_lines(tmp_path / "d"))
    index = TextIndex(paths, folder)
    assert counted == ["b", "d"]
    assert index.num_lines == 4 * NUM_LINES + 1
    assert content_of(index) == content_of(TextIndex(paths))


def test_a_file_that_grows_while_it_is_counted_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = write_lines(tmp_path / "a"), tmp_path / "lines"

    def count(path: Path, really: Callable[[Path], kept_lines.Pieces] = text.count_lines) -> kept_lines.Pieces:
        pieces = really(path)
        with path.open("ab") as file:
            file.write(b"one\nmore\n")
        return pieces

    monkeypatch.setattr(text, "count_lines", count)
    assert TextIndex([path], folder).num_lines == NUM_LINES
    assert kept_in(folder) == []


@pytest.mark.parametrize("name", ["a", "a.gz"])
def test_other_content_of_the_same_size_and_time_is_counted_by_the_next_start(
    name: str, tmp_path: Path, counted: list[str]
) -> None:
    """As with `cp -p` of another day of the same size."""
    path, folder = tmp_path / name, tmp_path / "lines"
    texts = [b"".join(b"y" * width + b"\n" for width in widths * 40) for widths in ([30, 30, 30], [31, 28, 31])]
    assert len(texts[0]) == len(texts[1])
    for text_of_day in texts:
        path.write_bytes(gzip.compress(text_of_day, compresslevel=0, mtime=0) if name.endswith("gz") else text_of_day)
        set_time(path, 10**18)
        index = TextIndex([path], folder)
    with pytest.raises(DataError, match=facts(name, "leave the file")):
        content_of(index)
    assert content_of(TextIndex([path], folder)) == texts[1]
    assert counted == [name] * 2


@pytest.mark.parametrize("name", ["a", "a.gz"])
def test_what_was_damaged_is_made_again(name: str, tmp_path: Path, counted: list[str]) -> None:
    path, folder = write_lines(tmp_path / name), tmp_path / "lines"
    chunks = TextIndex([path], folder).chunks
    [kept] = kept_in(folder)
    good = kept.read_bytes()
    damaged = [good[:cut] for cut in (0, 7, 16, 40, len(good) - 1)]
    damaged += [
        good[:at] + bytes([good[at] ^ 1 << random.Random(at).randrange(8)]) + good[at + 1 :] for at in range(len(good))
    ]
    for content in damaged:
        counted.clear()
        kept.write_bytes(content)
        assert TextIndex([path], folder).chunks == chunks
        assert counted == [name]
        assert kept.read_bytes() == good


HOSTILE: dict[str, Callable[[kept_lines.Pieces], object]] = {
    "no piece": lambda pieces: [],
    "a piece without a line": lambda pieces: [(0, 1), (pieces[0][0], pieces[0][1] - 1), *pieces[1:]],
    "a negative one": lambda pieces: [(-1, -5), (pieces[0][0], pieces[0][1] + 5), *pieces[1:]],
    "more lines than bytes": lambda pieces: [(pieces[0][1] + 1, pieces[0][1]), *pieces[1:]],
    "a piece beyond memory": lambda pieces: [*pieces, (1, 2**62)],
    "bytes beyond the end": lambda pieces: [*pieces, (1, 5)],
    "all in one piece": lambda pieces: [tuple(map(sum, zip(*pieces, strict=True)))],
    "numbers without end": lambda pieces: [(2**70, 2**70)],
    "text": lambda pieces: "many",
    "threes": lambda pieces: [(1, 2, 3)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_is_made_again_although_its_checksum_is_right(
    name: str, tmp_path: Path, counted: list[str]
) -> None:
    path, folder = write_lines(tmp_path / "a"), tmp_path / "lines"
    chunks = TextIndex([path], folder).chunks
    [kept] = kept_in(folder)
    content = msgspec.json.decode(kept.read_bytes()[16:])
    content["pieces"] = HOSTILE[name](content["pieces"])
    text_of_it = (
        msgspec.json.encode(content) if name != "numbers without end" else str(content).replace("'", '"').encode()
    )
    kept.write_bytes(kept_lines.checksum(text_of_it) + text_of_it)
    assert TextIndex([path], folder).chunks == chunks
    assert counted == ["a", "a"]


def test_pieces_that_could_be_but_are_not_are_an_error_and_not_other_samples(
    tmp_path: Path, counted: list[str]
) -> None:
    path, folder = write_lines(tmp_path / "a"), tmp_path / "lines"
    TextIndex([path], folder)
    [kept] = kept_in(folder)
    content = msgspec.json.decode(kept.read_bytes()[16:])
    (lines, nbytes), *rest = content["pieces"]
    for first in [(lines, nbytes - 3), (lines, nbytes + 3), (lines + 1, nbytes), (lines - 1, nbytes)]:
        content["pieces"] = [first, (rest[0][0], rest[0][1] + nbytes - first[1]), *rest[1:]]
        kept.write_bytes(kept_lines.checksum(msgspec.json.encode(content)) + msgspec.json.encode(content))
        with pytest.raises(DataError, match=facts(path, f"{first[0]} lines", "line 1")):
            content_of(TextIndex([path], folder))
        assert kept_in(folder) == []


def index_and_note(path: Path, folder: Path, notes: Path) -> None:
    """The main function of a process that starts with others."""
    count = text.count_lines

    def counting(path: Path) -> kept_lines.Pieces:
        with notes.open("a") as file:
            file.write(f"{path.name}\n")
        return count(path)

    text.count_lines = counting
    assert TextIndex([path], folder).num_lines == 200_000


def test_processes_that_start_at_once_count_once(tmp_path: Path) -> None:
    path, notes = write_lines(tmp_path / "a", 200_000), tmp_path / "notes"
    context = get_context("spawn")
    processes = [context.Process(target=index_and_note, args=(path, tmp_path / "lines", notes)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert notes.read_text() == "a\n"


def test_nobody_waits_without_end_for_one_that_was_stopped(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_lines, "LONGEST_WAIT_S", 0.1)
    path, folder = write_lines(tmp_path / "a"), tmp_path / "lines"
    with kept_lines.counting_lock(folder):
        assert TextIndex([path], folder).num_lines == NUM_LINES
    assert counted == ["a"]


@pytest.mark.parametrize("obstacle", ["a file", "no folder above"])
def test_where_nothing_can_be_kept_everything_works(obstacle: str, tmp_path: Path, counted: list[str]) -> None:
    path, folder = write_lines(tmp_path / "a"), tmp_path / "lines"
    if obstacle == "a file":
        folder.write_text("in the way")
    else:
        folder = tmp_path / "nowhere" / "lines"
    for _ in range(2):
        assert content_of(TextIndex([path], folder)) == content_of(TextIndex([path]))
    assert not (tmp_path / "nowhere").exists()


def test_a_file_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/a\b.*No such file or directory"):
        TextIndex([tmp_path / "a"], tmp_path / "lines")


def tsv_job(folder: Path) -> Job:
    """Two files, and a run directory."""
    (folder / "run").mkdir()
    (folder / "data").mkdir()
    for seed, name in enumerate(("a.tsv", "b.tsv.gz")):
        write_tsv(click_log(seed=seed), folder / "data" / name)
    job = make_job("criteo-tsv", path=str(folder / "data"), shuffle="window:20")
    return msgspec.structs.replace(job, job=msgspec.structs.replace(job.job, run_dir=str(folder / "run")))


def test_a_run_keeps_the_lines_in_its_directory_and_its_workers_use_them(
    tmp_path: Path, opened: Callable[..., WorkerSource]
) -> None:
    job = tsv_job(tmp_path)
    expected = all_samples(
        placed.batch
        for placed in schedule(job, open_reader(make_job("criteo-tsv", path=job.data.path, shuffle="window:20")))
    )
    assert not (tmp_path / "run" / "lines").exists()
    for _ in range(2):
        assert all_samples(placed.batch for placed in rest_of(opened(with_workers(job, 3)))) == expected
        assert len(kept_in(tmp_path / "run" / "lines")) == 2
    for kept in kept_in(tmp_path / "run" / "lines"):
        assert kept.read_bytes()[:16] == kept_lines.checksum(kept.read_bytes()[16:])
