"""A folder into which files arrive gives the batches of the finished folder, whenever they arrive."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import count, islice
from os import listdir
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from rowcast.job.schema import Job
from rowcast.prefetcher.readers import follow
from rowcast.prefetcher.readers.data_files import files_of
from rowcast.prefetcher.readers.follow import Arrivals, FilesRead, ReadFile, checksum_of, open_followed
from rowcast.prefetcher.readers.reader import Reader, open_reader, schedule, whole_batch
from rowcast.protocol.batch import Batch
from rowcast.protocol.messages import DataDelay
from rowcast.runtime.checkpoint_manifest import NOTHING_READ, DataFile, TrainingData
from rowcast.runtime.errors import ConfigError, DataError
from tests.support.data_files import PARQUET_COLUMNS, make_job, same_batch, write_parquet
from tests.support.facts import facts
from tests.support.format_cases import CASES

FOLLOWED = {"tsv_gz": (), "bags": (), "arrow": (), "csv": (), "jsonl": (), "shuffled": ("window:20",)}
NO_SAMPLES = {"eval_fraction": 0.0}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LIST_EVERY_S", 0.0)


def parquet_job(folder: Path, **data: Any) -> Job:
    folder.mkdir(exist_ok=True)
    settings: dict[str, Any] = {"path": str(folder), "follow": True, **NO_SAMPLES, **data}
    return make_job("parquet", columns=PARQUET_COLUMNS, on_invalid_id="zero", **settings)


def followed(job: Job, steps: Iterator[Any], known: TrainingData = NOTHING_READ) -> Reader:
    """A reader before whose waits the next of `steps` happens."""
    return open_followed(job, "all", Arrivals(known, lambda: next(steps)))


def batches_and_files(job: Job, number: int) -> tuple[list[Batch], FilesRead]:
    """Of the first batches of files that are there."""
    arrivals, read, batches = Arrivals(), FilesRead(NOTHING_READ), list[Batch]()
    for pending in islice(open_followed(job, "all", arrivals).pending("train", 0), number):
        batches.append(whole_batch(pending))
        read.add(arrivals.files)
    return batches, read


def arriving(files: list[Path], folder: Path) -> Iterator[None]:
    """Moves one file after another there, after nothing and a name that is no file yet; then END."""
    for file in files:
        yield
        partial = folder / f".{file.name}"
        partial.write_bytes(file.read_bytes())
        yield
        partial.rename(folder / file.name)
        yield
    (folder / "END").touch()
    yield


def batches_of(job: Job, reader: Reader) -> list[Batch]:
    return [own.batch for own in schedule(job, reader)]


@pytest.mark.parametrize("case", FOLLOWED)
def test_batches_of_files_that_arrive_are_those_of_the_finished_folder(case: str, tmp_path: Path) -> None:
    there, here = tmp_path / "finished", tmp_path / "arriving"
    there.mkdir()
    here.mkdir()
    data = dict(NO_SAMPLES, **dict(zip(("shuffle",), FOLLOWED[case], strict=False)))
    finished = CASES["bags" if case == "shuffled" else case](there, **data)[0]
    finished = replace(finished, data=replace(finished.data, path=str(there)))
    files = files_of(finished, "path")
    assert len(files) > 1
    job = replace(finished, data=replace(finished.data, path=str(here), follow=True))
    expected = batches_of(finished, open_reader(finished))
    read = batches_of(job, followed(job, arriving(files, here)))
    assert len(read) == len(expected) > 2
    assert all(same_batch(one, other) for one, other in zip(read, expected, strict=True))
    assert len(read[-1].labels) < job.data.batch_size == len(read[0].labels)
    without_waits = open_reader(job)  # of `check` and `simulate`
    assert without_waits.num_samples("train") == sum(len(batch.labels) for batch in expected)
    assert all(same_batch(*pair) for pair in zip(batches_of(job, without_waits), expected, strict=True))


def test_a_restart_goes_on_without_the_files_before_it(tmp_path: Path) -> None:
    job = parquet_job(tmp_path / "data", batch_size=20)
    folder = tmp_path / "data"
    for number in range(5):
        write_parquet(folder / f"f{number}.parquet", 30, seed=number)
    (folder / "END").touch()
    batches, read = batches_and_files(job, 5)
    kept = read.trained_on(4 * 20)  # rows 80 to 99 are in files 2 and 3
    assert (kept.rows_before, kept.last_before) == (60, str(folder / "f1.parquet"))
    assert [Path(file.path).name for file in kept.files] == ["f2.parquet", "f3.parquet"]
    (folder / "f0.parquet").unlink()
    later = followed(job, iter(()), kept)
    assert same_batch(whole_batch(next(later.pending("train", 0, 4))), batches[4])
    assert len(list(later.pending("train", 0, 4))) == 4


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("side", ["before", "after"])
def test_killed_on_either_side_of_any_listing_a_run_reads_each_row_once(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = parquet_job(tmp_path / "finished", batch_size=20, follow=False)
    for number in range(4):
        write_parquet(tmp_path / "finished" / f"f{number}.parquet", 30, seed=number)
    expected = batches_of(finished, open_reader(finished))
    for killed in range(40):
        folder = tmp_path / f"killed-{killed}"
        job = parquet_job(folder, batch_size=20)
        steps, batches, read = arriving(files_of(finished, "path"), folder), list[Batch](), FilesRead(NOTHING_READ)
        listings = count()

        def listed(path: Path, listings: Iterator[int] = listings, killed: int = killed) -> list[str]:
            is_killed = next(listings) == killed
            if is_killed and side == "before":
                raise KilledError
            names = listdir(path)
            if is_killed:
                raise KilledError
            return names

        with monkeypatch.context() as patched:
            patched.setattr("rowcast.prefetcher.readers.follow.os.listdir", listed)
            with suppress(KilledError):
                take_all(job, steps, batches, read, NOTHING_READ)
        if next(listings) <= killed:
            break
        known = read.trained_on(len(batches) * 20)
        take_all(job, steps, batches, FilesRead(known), known)
        assert len(batches) == len(expected)
        assert all(same_batch(*pair) for pair in zip(batches, expected, strict=True))
    assert killed > 10


def take_all(job: Job, steps: Iterator[Any], batches: list[Batch], read: FilesRead, known: TrainingData) -> None:
    arrivals = Arrivals(known, lambda: next(steps))
    for pending in open_followed(job, "all", arrivals).pending("train", 0, len(batches)):
        batches.append(whole_batch(pending))
        read.add(arrivals.files)


def test_an_empty_folder_that_has_ended_has_no_file_with_rows(tmp_path: Path) -> None:
    job = parquet_job(tmp_path / "data")
    (tmp_path / "data" / "END").touch()
    with pytest.raises(DataError, match=facts("data.path", "END", "no file with rows")):
        followed(job, iter(()))


# one who reads a folder, and a writer who does not keep to the rules


def sorts_before(folder: Path) -> None:
    write_parquet(folder / "e.parquet", 9)


def changes(folder: Path) -> None:
    write_parquet(folder / "f.parquet", 17, seed=9)


def is_renamed_over(folder: Path) -> None:
    write_parquet(folder / ".f.parquet", 17, seed=4)
    (folder / ".f.parquet").rename(folder / "f.parquet")


def is_gone(folder: Path) -> None:
    (folder / "f.parquet").unlink()


def is_torn(folder: Path) -> None:
    (folder / "g.parquet").write_bytes((folder / "f.parquet").read_bytes()[:-7])


def has_other_columns(folder: Path) -> None:
    table = pq.read_table(folder / "f.parquet").drop_columns(["cat_25"])
    pq.write_table(table, folder / "g.parquet")


def has_another_dense_column(folder: Path) -> None:
    table = pq.read_table(folder / "f.parquet")
    pq.write_table(table.append_column("int_3", table["int_2"]), folder / "g.parquet")


BROKEN = {
    sorts_before: ("e.parquet", "f.parquet", "sorts before"),
    changes: ("f.parquet", "changed"),
    is_renamed_over: ("f.parquet", "changed"),
    is_gone: ("f.parquet", "gone"),
    is_torn: ("g.parquet",),
    has_other_columns: ("g.parquet", "cat_25"),
    has_another_dense_column: ("g.parquet", "int_3"),
}


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda own: own.__name__)
def test_what_a_writer_may_not_do_ends_the_run_with_the_file(breaks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    job = parquet_job(folder, batch_size=10)
    write_parquet(folder / "f.parquet", 17, seed=3)

    def later() -> Iterator[None]:
        breaks(folder)
        if breaks in (changes, is_renamed_over, is_gone):  # the rest of it is read with the next file
            write_parquet(folder / "g.parquet", 9)
        yield
        (folder / "END").touch()
        yield

    with pytest.raises(DataError, match=facts(*BROKEN[breaks])):
        batches_of(job, followed(job, later()))


def test_a_restart_refuses_files_that_differ_from_those_that_were_read(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    job = parquet_job(folder, batch_size=10)
    for name in ("e", "g"):
        write_parquet(folder / f"{name}.parquet", 17)
    known = batches_and_files(job, 2)[1].trained_on(0)
    assert [Path(file.path).name for file in known.files] == ["e.parquet", "g.parquet"]

    def is_refused(*said: str) -> None:
        with pytest.raises(DataError, match=facts(*said)):
            list(followed(job, iter(()), known).pending("train", 0))

    write_parquet(folder / "f.parquet", 17)
    is_refused("f.parquet", "g.parquet", "sorts before")
    (folder / "g.parquet").unlink()
    is_refused("g.parquet", "gone")
    (folder / "f.parquet").unlink()
    (folder / "END").touch()
    is_refused("g.parquet", "gone")
    write_parquet(folder / "g.parquet", 16)
    is_refused("g.parquet", "changed")


def test_decoders_that_read_other_files_in_one_place_are_told_apart() -> None:
    def file(name: str, rows: range) -> ReadFile:
        return ReadFile(DataFile(path=name, nbytes=1, checksum="0" * 16), rows, 0.0)

    read = FilesRead(NOTHING_READ)
    read.add([file("a", range(5)), file("c", range(5, 9))])
    read.add([file("c", range(5, 9))])
    with pytest.raises(DataError, match=facts("b", "c", "sorts before")):
        read.add([file("b", range(5, 8))])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"epochs": 2}, ("epochs = 2",)),
        ({"eval_fraction": 0.1}, ("eval_fraction = 0.1", "eval_path")),
        ({"format": "arrow", "shuffle": "full"}, ("shuffle", "full", "window:ROWS")),
        ({"format": "synthetic"}, ("follow", "parquet", "synthetic")),
        ({"format": "criteo-npy", "columns": {}}, ("follow", "parquet", "criteo-npy")),
        ({"format": "tests.readers.factories:function", "columns": {}}, ("follow", "tests.readers.factories")),
    ],
)
def test_what_does_not_go_with_following_is_refused_with_its_key(
    data: dict[str, Any], said: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=facts(*said)):
        make_job(**{"format": "parquet", "path": str(tmp_path), "follow": True, **NO_SAMPLES, **data})


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    job = parquet_job(tmp_path / "data", path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=facts("data.path", "none", "folder")):
        followed(job, iter(()))


def test_the_least_waits_unless_the_job_says_otherwise(tmp_path: Path) -> None:
    own = parquet_job(tmp_path / "data").lookahead
    assert (own.horizon, own.bundle) == (2 * own.depth + 2, 1)


def test_files_wait_until_their_last_row_is_trained(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    job = parquet_job(folder, batch_size=20)
    for number in range(4):
        write_parquet(folder / f"f{number}.parquet", 30, seed=number)
    _, read = batches_and_files(job, 3)  # of the first two files
    [first, second] = read._files.values()
    assert len({checksum_of(files) for files in ([], [first], [second], [second._replace(rows=range(9))])}) == 4
    assert read.delay(job) == DataDelay(waiting_files=4, last_s=None, longest_s=0.0)
    read = FilesRead(NOTHING_READ)
    read.add([first._replace(finished_s=first.finished_s - 1000), second])
    read.trained(40)
    delay = read.delay(job)
    assert delay.last_s is not None
    assert (delay.waiting_files, delay.last_s) == (3, delay.longest_s)
    assert 1000 <= delay.longest_s < 4600
    assert [file.path for file in read.trained_on(60).files] == []
    now = read.delay(job)
    assert now.last_s is not None
    assert now.last_s < 1000
    assert (now.waiting_files, now.longest_s) == (2, delay.longest_s)
