"""Every file that data.path names is read or refused by name: docs/data.md's table, walked over all formats."""

import gzip
import os
import random
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.feather import write_feather

from rowcast.analysis.new.files import look_at
from rowcast.analysis.show import AnalysisProgress
from rowcast.job.formats import FORMATS
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.data_files import data_files, files_text, in_recorded_order, listed_files, sampled
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.protocol.batch import Kind
from rowcast.runtime.checkpoint_manifest import Manifest, TrainingData
from rowcast.runtime.errors import ConfigError, DataError
from tests.support.data_files import make_job, table

TABLE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
Write = Callable[[Path, Sequence[int]], Any]


def write_tsv(path: Path, ids: Sequence[int]) -> None:
    text = "".join("\t".join(["1", *["3"] * 13, *[f"{own:08x}"] * 26]) + "\n" for own in ids).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def write_csv(path: Path, ids: Sequence[int]) -> None:
    text = "".join(["label,int_0,cat_0\n", *(f"{i % 2},0.5,{own}\n" for i, own in enumerate(ids))]).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def write_parquet(path: Path, ids: Sequence[int]) -> None:
    columns = {"label": [i % 2 for i in range(len(ids))], "int_0": [0.5] * len(ids), "cat_0": list(ids)}
    pq.write_table(pa.table(columns if ids else {name: pa.nulls(0) for name in columns}), path)


def write_jsonl(path: Path, ids: Sequence[int]) -> None:
    path.write_text("".join(f'{{"label": {i % 2}, "int_0": 0.5, "cat_0": {own}}}\n' for i, own in enumerate(ids)))


def write_arrow(path: Path, ids: Sequence[int]) -> None:
    columns = {"label": [i % 2 for i in range(len(ids))], "int_0": [0.5] * len(ids), "cat_0": list(ids)}
    write_feather(pa.table(columns), path, compression="uncompressed")


def write_npy(path: Path, ids: Sequence[int]) -> None:
    """`path`: of the labels."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "dense": np.ones((len(ids), 1), np.float32),
        "sparse": np.array([ids] * 26, np.int64).reshape(26, -1).T,
        "labels": np.ones(len(ids), np.int32),
    }
    for part, array in arrays.items():
        np.save(path.with_name(path.name.replace("labels", part)), array)


LAYOUTS: dict[str, tuple[str, str, Write]] = {  # -> format, name of a file with its number, how it is written
    "tsv": ("criteo-tsv", "day_{}", write_tsv),
    "tsv.gz": ("criteo-tsv", "part-{}.tsv.gz", write_tsv),
    "npy": ("criteo-npy", "day_{}_labels.npy", write_npy),
    "csv": ("csv", "part-{}.csv", write_csv),
    "csv.gz": ("csv", "part.{}.csv.gz", write_csv),
    "jsonl": ("jsonl", "part-{}.ndjson", write_jsonl),
    "arrow": ("arrow", "part-{}.feather", write_arrow),
    "parquet": ("parquet", "part-{}-c000.snappy.parquet", write_parquet),
}
EVERY = pytest.mark.parametrize("layout", LAYOUTS)


def test_every_format_with_files_has_a_layout() -> None:
    assert {own for own, _, _ in LAYOUTS.values()} == {name for name, own in FORMATS.items() if own.has_files}


class Folder:
    def __init__(self, layout: str, path: Path) -> None:
        self.format, self.name, self._write = LAYOUTS[layout]
        self.path = path / "data"
        self.path.mkdir()

    def file(self, number: object, folder: str = ".") -> Path:
        return self.path / folder / self.name.format(number)

    def write(self, number: object, ids: Sequence[int], folder: str = ".") -> Path:
        path = self.file(number, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(path, ids)
        return path

    def job(self, path: str | None = None, **data: Any) -> Job:
        return make_job(
            self.format,
            [table("t", 1000, "cat_0")],
            path=path or str(self.path),
            **{"eval_fraction": 0.0, "batch_size": 3} | data,
        )

    def ids(self, path: str | None = None, split: Kind = "train", **data: Any) -> list[int]:
        return [int(own) for batch in open_reader(self.job(path, **data)).batches(split, 0) for own in batch.ids]

    def refusals(self, kind: type[Exception], *paths: str) -> list[str]:
        """The sentences of a run and of its evaluation (as `score` has it), and those of `new`, for each path."""
        found = []
        for path in paths or (str(self.path),):
            for data in ({}, {"eval_path": path}):
                with pytest.raises(kind) as refused:
                    open_reader(self.job(path, **data))
                found.append(str(refused.value))
            if self.format in ("csv", "parquet"):
                with pytest.raises(kind) as refused:
                    look_at(path, [], {}, AnalysisProgress())
                found.append(str(refused.value).replace("--data", "data.path"))
        return found


@pytest.fixture
def folder(layout: str, tmp_path: Path) -> Folder:
    return Folder(layout, tmp_path)


def numbers(folder: Folder) -> None:
    order: list[int | str] = [0, "01", 1, 2, 3, 9, 10, 11, 23, 100]
    for number in random.Random(1).sample(order, len(order)):
        folder.write(number, [int(number), int(number) + 500])
    expected = [own for number in order for own in (int(number), int(number) + 500)]
    pattern = str(folder.path / folder.name.format("*"))
    assert folder.ids() == folder.ids(pattern) == folder.ids(split="eval", eval_path=str(folder.path)) == expected
    held_out = folder.ids(split="eval", eval_fraction=0.2)
    assert (folder.ids(eval_fraction=0.2), held_out) == (expected[:-4], expected[-4:])
    by_name: list[int | str] | None = [0, "01", 1, 10, 100, 11, 2, 23, 3, 9] if folder.format != "criteo-npy" else None
    assert by_name is None or folder.ids(by_name=True)[::2] == [int(own) for own in by_name]
    assert folder.ids(by_name=True) != expected


def several_folders(folder: Folder) -> None:
    for number in (10, 9, 2):
        folder.write(0, [number], f"month-{number}")
    pattern = folder.name.format("*")
    assert folder.ids(f"{folder.path}/month-*/{pattern}") == folder.ids(f"{folder.path}/**/{pattern}") == [2, 9, 10]


def link(folder: Folder) -> None:
    folder.write(1, [1])
    target = folder.write(0, [2], "../elsewhere")
    for own in target.parent.iterdir():
        folder.path.joinpath(own.name.replace("0", "2", 1)).symlink_to(own)
    assert folder.ids() == [1, 2]


def link_without_target(folder: Folder) -> None:
    folder.write(1, [1])
    folder.file(2).symlink_to("/nowhere/gone")
    pattern = str(folder.path / folder.name.format("*"))
    for sentence in folder.refusals(ConfigError, str(folder.path), pattern, str(folder.file(2))):
        assert f"{folder.file(2)} is a link to /nowhere/gone, which is gone" in sentence


def no_file(folder: Folder) -> None:
    folder.write(1, [1])
    os.mkfifo(folder.file(2))
    for sentence in folder.refusals(ConfigError, str(folder.path), str(folder.file(2))):
        assert f"{folder.file(2)} is a FIFO, socket or device" in sentence
    folder.file(2).unlink()
    with socket.socket(socket.AF_UNIX) as own:
        os.chdir(folder.path)  # its names may have 107 bytes
        own.bind(folder.file(2).name)
        assert all(f"{folder.file(2)} is a FIFO, socket" in sentence for sentence in folder.refusals(ConfigError))


def sub_folder(folder: Folder) -> None:
    folder.write(1, [1])
    within = folder.write(2, [2], "2024/jan")
    pattern = str(folder.path / "*")
    for sentence in folder.refusals(ConfigError, str(folder.path), pattern):
        lying = re.search(rf"data\.(?:path|eval_path) = '.*': {within.parent}/\S+ lies in a sub-folder", sentence)
        assert lying, sentence
        advised = re.search(r"a glob such as (\S+)$", sentence)
        assert advised
        assert f"{folder.path}/**/*" in advised[1]
        assert sorted(folder.ids(advised[1])) == [1, 2]


def other_folder(folder: Folder) -> None:
    folder.write(1, [1])
    folder.write(2, [2], "_temporary/0")
    folder.write(3, [3], ".ipynb_checkpoints")
    (folder.path / "runs").mkdir()
    (folder.path / "runs" / "report.json").write_text("{}")
    assert folder.ids() == [1]
    folder.write(4, [4], "later")
    held_out = str(folder.path / "later")
    assert (folder.ids(eval_path=held_out), folder.ids(split="eval", eval_path=held_out)) == ([1], [4])
    around: dict[str, Any] = {"path": held_out, "eval_path": str(folder.path)}
    assert (folder.ids(**around), folder.ids(split="eval", **around)) == ([4], [1])
    os.chdir(folder.path.parent)
    for one, other in (("data", held_out), (str(folder.path), "data/later")):
        assert (folder.ids(one, eval_path=other), folder.ids(split="eval", path=one, eval_path=other)) == ([1], [4])


def other_names(folder: Folder) -> None:
    folder.write(1, [1])
    hidden = [] if folder.format == "criteo-npy" or folder.name == "day_{}" else [f"_{folder.name}", f".{folder.name}"]
    for name in hidden:  # the names fit
        folder._write(folder.path / name.format(0), [7])
    for name in ("_SUCCESS", "_metadata", f".{folder.name.format(1)}.crc", "notes.md", f"{folder.name.format(3)}.bz2"):
        (folder.path / name).write_text("not data")
    assert sorted(folder.ids()) == [1, *[7] * len(hidden)]
    assert "(left out: 2 others, such as " in files_text(folder.job())


def part_without_rows(folder: Folder) -> None:
    for number, ids in enumerate(([], [5, 6], [], [7], [])):
        folder.write(number, ids)
    if folder.format.endswith(("csv", "tsv")):
        folder.file(5).write_bytes(b"")
    assert folder.ids() == folder.ids(split="eval", eval_path=str(folder.path)) == [5, 6, 7]
    if folder.format in ("csv", "parquet"):
        found = look_at(str(folder.path), [], {}, AnalysisProgress())
        assert (found.num_rows, len(found.files)) == (3, len(list(folder.path.iterdir())))


def no_part_with_rows(folder: Folder) -> None:
    for number in range(3):
        folder.write(number, [])
    expected = f"{folder.file(0)} and 2 more hold no row; give at least one file with rows"
    assert set(folder.refusals(DataError)) == {expected}


SITUATIONS: dict[str, Callable[[Folder], None]] = {  # as docs/data.md begins the lines of its table
    "files with numbers": numbers,
    "files of several folders": several_folders,
    "a link": link,
    "a link without a target": link_without_target,
    "a FIFO, socket or device": no_file,
    "a sub-folder with files that fit": sub_folder,
    "any other sub-folder": other_folder,
    "a file with another name": other_names,
    "a file without rows": part_without_rows,
    "only files without rows": no_part_with_rows,
}


@EVERY
@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_a_path_names_what_the_page_says(
    situation: Callable[[Folder], None], folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.path)
    situation(folder)


def test_the_page_has_these_situations() -> None:
    [section] = re.findall(r"^## Which files are read\n(.*?)^## ", TABLE, flags=re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| ([^|]+?) \|", section, flags=re.MULTILINE)
    assert set(cells) - {"what the path names"} == set(SITUATIONS)


def test_a_file_that_a_recursive_glob_reaches_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.x").touch()
    assert data_files(f"{tmp_path}/**/*.x", "data.path", "", by_name=False, apart="") == [tmp_path / "a.x"]
    (tmp_path / "self").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"are one file; remove the link between them"):
        data_files(f"{tmp_path}/**/*.x", "data.path", "", by_name=False, apart="")


def test_digits_in_a_row_are_one_number_and_all_else_is_as_in_names(tmp_path: Path) -> None:
    drawn = random.Random(2)
    names = {"".join(drawn.choices("0123459ab.-_ é²", k=drawn.randint(1, 6))) + ".x" for _ in range(400)} - {"..x"}
    for name in names:
        (tmp_path / name).touch()
    found = data_files(str(tmp_path), "data.path", r".*\.x", by_name=False, apart="")
    padded = sorted(names, key=lambda name: (re.sub("[0-9]+", lambda own: own[0].zfill(9), name), name))
    assert [own.name for own in found] == padded


def test_the_first_and_the_last_file_are_named(tmp_path: Path) -> None:
    folder = Folder("csv", tmp_path)
    first, last = [folder.write(number, [1]) for number in (9, 10)]
    assert files_text(folder.job()) == f"2 files, {first} to {last}"
    assert files_text(folder.job(str(first), eval_path=str(last))) == f"1 file, {first}; evaluation: 1 file, {last}"
    assert files_text(folder.job(eval_path=str(folder.path))) == f"2 files, {first} to {last}"
    assert files_text(make_job("synthetic")) == "synthetic"
    assert listed_files("", [], "") == ""


def recorded(job: Job) -> Manifest:
    """What a checkpoint of a run of this job says about its data."""
    return cast(Manifest, SimpleNamespace(trained_on=TrainingData(files=sampled(open_reader(job).paths))))


@EVERY
@pytest.mark.parametrize("by_name", [True, False])
def test_a_run_keeps_the_order_in_which_it_began(
    folder: Folder, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.path)
    for number in (2, 9, 10):
        folder.write(number, [number], "early")
        folder.write(number, [number], "later")
    for path, held_out in (("early", None), ("early", "later"), (f"early/{folder.file(9).name}", "later")):
        own = {"path": path, "eval_path": held_out}
        job = folder.job(**own, by_name=by_name)
        checkpoint = recorded(job)
        for says in (True, False):
            assert in_recorded_order(folder.job(**own, by_name=says), checkpoint).data.by_name == by_name
        if path == "early":  # as if moved: the names tell
            moved = folder.job(str(folder.path / path), eval_path=held_out, by_name=not by_name)
            assert in_recorded_order(moved, checkpoint).data.by_name == by_name


def test_a_run_without_files_to_compare_keeps_its_job(tmp_path: Path) -> None:
    folder = Folder("csv", tmp_path)
    folder.write(1, [1])
    for says in (True, False):
        job = folder.job(by_name=says)
        assert in_recorded_order(job, recorded(job)) == job
    assert in_recorded_order(folder.job("nowhere"), recorded(job)) == folder.job("nowhere")
