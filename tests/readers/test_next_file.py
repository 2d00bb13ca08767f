"""`eval.next = "file"`: each file is evaluated before any of its rows is trained, and training does not change."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.follow import Arrivals, open_followed
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.errors import ConfigError
from tests.support import jobs
from tests.support.data_files import (
    CSV_COLUMNS,
    PARQUET_COLUMNS,
    all_samples,
    click_log,
    make_job,
    same_batch,
    write_csv,
    write_day,
    write_parquet,
    write_tsv,
)
from tests.support.facts import facts

SIZES = (20, 3, 2, 41, 16, 5)  # of the files, in rows; the second and the third begin in the same batch
BATCH = 8


def files_of(folder: Path, form: str) -> None:
    for number, size in enumerate(SIZES):
        if form == "criteo-npy":
            write_day(folder, f"day_{number}", size, seed=number)
        elif form == "criteo-tsv":
            write_tsv(click_log(size, seed=number), folder / f"{number}.tsv")
        else:
            write = write_csv if form == "csv" else write_parquet
            write(folder / f"{number}.{form}", size, seed=number)


def job_of(folder: Path, form: str, **more: Any) -> Job:
    columns = {"parquet": PARQUET_COLUMNS, "csv": CSV_COLUMNS}.get(form, {})
    data = {"path": str(folder), "columns": columns, "batch_size": BATCH, "eval_fraction": 0.0, **more}
    return make_job(form, **data)


def next_of(job: Job) -> Job:
    return replace(job, eval=replace(job.eval, next="file"))


def run(job: Job, start: Position | None = None, max_steps: int | None = None) -> list[ScheduledBatch]:
    reader = open_followed(job, "all", Arrivals()) if job.data.follow else open_reader(job)
    return list(schedule(job, reader, max_steps, start))


def first_batch(row: int, window: int) -> int:
    """The first training batch that may have a row: with a window, those from the start of its block on."""
    return row // window * window // BATCH


@pytest.mark.parametrize(("shuffle", "window"), [("none", 1), ("window:32", 32), ("window:5", 5)])
@pytest.mark.parametrize("form", ["criteo-npy", "criteo-tsv", "csv", "parquet", "arriving"])
def test_each_file_is_evaluated_alone_and_whole_before_it_is_trained(
    form: str, shuffle: str, window: int, tmp_path: Path
) -> None:
    folder, follow, form = tmp_path / "data", form == "arriving", "parquet" if form == "arriving" else form
    folder.mkdir()
    files_of(folder, form)
    (folder / "END").touch()
    job = job_of(folder, form, shuffle=shuffle, follow=follow)
    plain, found = run(job), run(next_of(job))
    trained = [own for own in found if own.kind == "train"]
    assert len(trained) == len(plain) == -(-sum(SIZES) // BATCH)
    assert all(same_batch(own.batch, before.batch) for own, before in zip(trained, plain, strict=True))
    evaluated = [own for own in found if own.kind == "eval"]
    bounds = [sum(SIZES[:number]) for number in range(len(SIZES))]
    expected = [
        (first_batch(begin, window), min(BATCH, size - start))
        for begin, size in zip(bounds, SIZES, strict=True)
        for start in range(0, size, BATCH)
    ]
    assert [(own.train_step, own.batch.size) for own in evaluated] == expected
    in_order = run(replace(job, data=replace(job.data, shuffle="none")))
    assert all_samples(own.batch for own in evaluated) == all_samples(own.batch for own in in_order)


@pytest.mark.parametrize("max_steps", [None, 5])
def test_going_on_from_any_position_evaluates_what_is_left(max_steps: int | None, tmp_path: Path) -> None:
    files_of(tmp_path, "criteo-npy")
    job = next_of(job_of(tmp_path, "criteo-npy"))
    whole = run(job, max_steps=max_steps)
    for index, own in enumerate(whole):
        rest = run(job, own.following, max_steps)
        assert [(one.step, one.kind, one.position) for one in rest] == [
            (one.step, one.kind, one.position) for one in whole[index + 1 :]
        ]
        assert all(same_batch(a.batch, b.batch) for a, b in zip(rest, whole[index + 1 :], strict=True))
    if max_steps:
        assert run(job)[: len(whole)][-1].following == whole[-1].following, "more steps go on there"


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"eval": {"patience": 2}}, "eval.patience = 2"),
        ({"eval": {"keep": "best"}}, "eval.keep = 'best'"),
        ({"eval": {"every": 5}}, "eval.every = 5"),
        ({"data": {"epochs": 2}}, "data.epochs = 2"),
        ({"data": {"shuffle": "full"}}, "data.shuffle = 'full'"),
        ({"data": {"eval_fraction": 0.1}}, "data.eval_fraction = 0.1"),
        ({"data": {"eval_path": "later"}}, "data.eval_path = 'later'"),
        ({"data": {"format": "synthetic", "path": None}}, "data.format = 'synthetic'"),
    ],
)
def test_what_evaluates_otherwise_is_refused(sections: dict[str, dict[str, Any]], key: str) -> None:
    content = {"data": {"format": "criteo-npy", "path": "days"}, "eval": {"next": "file"}}
    with pytest.raises(ConfigError, match=facts('eval.next = "file"', key)):
        jobs.job(**jobs.laid_over(content, sections))
