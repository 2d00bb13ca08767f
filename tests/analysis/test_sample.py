"""Reading a part of an epoch: where the windows lie, and that they hold what a whole reading would give."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowcast.analysis.scan import sample
from rowcast.analysis.scan.sample import (
    Amount,
    Window,
    read_windows,
    reader_for_another_pass,
    rows_worth_skipping,
    sample_windows,
)
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import Pending, Reader, open_reader
from rowcast.protocol.batch import Batch, Kind
from rowcast.runtime.errors import ConfigError
from tests.support.data_files import (
    PARQUET_COLUMNS,
    click_log,
    make_job,
    same_batch,
    write_day,
    write_parquet,
    write_tsv,
)
from tests.support.facts import facts


def synthetic(samples: int, batch_size: int = 8, **data: Any) -> Job:
    return make_job("synthetic", synthetic={"samples": samples}, batch_size=batch_size, eval_fraction=0.0, **data)


def windows_of(num_batches: int, amount: Amount, length: int = 1, draws: int = 1) -> list[Window]:
    job = synthetic(8 * num_batches)
    return list(sample_windows(job, open_reader(job), amount, length=length, draws=draws))


def spans(windows: list[Window]) -> list[tuple[int, int]]:
    return [(window.start, window.stop) for window in windows]


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("num_batches", [100, 97])
def test_there_is_one_window_in_each_of_equal_strata(num_batches: int, length: int) -> None:
    windows = windows_of(num_batches, Amount(share=0.25), length)
    units = -(-num_batches // length)
    assert len(windows) == round(units / 4)
    for i, window in enumerate(windows):
        assert i * units // len(windows) <= window.start / length < (i + 1) * units // len(windows)
        assert window.stop == min(window.start + length, num_batches)


def test_the_place_in_a_stratum_is_random_but_the_same_for_one_seed() -> None:
    places = {window.start % 10 for window in windows_of(1000, Amount(share=0.1))}
    assert len(places) == 10
    assert windows_of(1000, Amount(share=0.1)) == windows_of(1000, Amount(share=0.1))


def test_every_batch_is_drawn_equally_often_over_many_seeds() -> None:
    counts: Counter[int] = Counter()
    for seed in range(600):
        counts.update(window.start for window in sample.drawn(iter([(0, 6), (6, 12)]), 12, 1, 1, seed))
    assert sorted(counts) == list(range(12))
    assert min(counts.values()) > 65
    assert max(counts.values()) < 140


def test_draws_are_disjoint_and_each_is_in_every_stratum() -> None:
    windows = windows_of(120, Amount(share=0.5), draws=3)
    assert len({window.start for window in windows}) == len(windows) == 60
    for draw in range(3):
        own = [window.start for window in windows if window.draw == draw]
        assert [start // 6 for start in own] == list(range(20))


def test_a_share_of_everything_is_everything() -> None:
    assert spans(windows_of(10, Amount(share=1.0))) == [(i, i + 1) for i in range(10)]
    assert spans(windows_of(10, Amount(share=1.0), length=4)) == [(0, 4), (4, 8), (8, 10)]
    assert len(windows_of(11, Amount(share=1.0), draws=2)) == 10


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        (Amount(share=0.05), 5),
        (Amount(samples=80), 10),
        (Amount(samples=1), 1),
        (Amount(samples=10**9), 100),
        (Amount(share=0.05, least_batches=30), 30),
        (Amount(share=0.5, least_batches=30), 50),
        (Amount(share=0.05, least_batches=1000), 100),
    ],
)
def test_an_amount_is_a_share_or_samples_and_at_least_so_many_batches(amount: Amount, expected: int) -> None:
    assert len(windows_of(100, amount)) == expected


def test_too_few_batches_for_one_window_a_draw_give_none() -> None:
    assert windows_of(1, Amount(share=1.0), draws=2) == []
    assert len(windows_of(3, Amount(share=0.01), draws=2)) == 2


@pytest.mark.parametrize(
    ("share", "samples"), [(0.0, None), (1.5, None), (-1.0, None), (float("nan"), None), (None, 0)]
)
def test_an_amount_that_cannot_be_is_refused(share: float | None, samples: int | None) -> None:
    with pytest.raises(ConfigError, match="--sample"):
        Amount(share=share, samples=samples)


# readers


def tsv(folder: Path, **data: Any) -> Job:
    write_tsv(click_log(), folder / "train.tsv")
    return make_job("criteo-tsv", path=str(folder / "train.tsv"), **data)


def tsv_gz(folder: Path, **data: Any) -> Job:
    write_tsv(click_log(60, 1), folder / "day_0.gz")
    write_tsv(click_log(43, 2), folder / "day_1")
    return make_job("criteo-tsv", path=str(folder), **data)


def npy(folder: Path, **data: Any) -> Job:
    write_day(folder, "day_0", 103)
    return make_job("criteo-npy", path=str(folder), **data)


def bags(folder: Path, **data: Any) -> Job:
    write_parquet(folder / "a.parquet", 103)
    return make_job("parquet", path=str(folder / "a.parquet"), columns=PARQUET_COLUMNS, **data)


def custom(folder: Path, **data: Any) -> Job:
    return make_job("tests.support.data_files:listed", **data)


def iterator(folder: Path, **data: Any) -> Job:
    return make_job("tests.analysis.test_sample:once", **data)


def once(job: Job) -> Iterator[Batch]:
    """A data set that can be gone through once."""
    return iter(list(open_reader(make_job("tests.support.data_files:listed")).batches("train", 0)))


FORMATS: list[Callable[..., Job]] = [tsv, tsv_gz, npy, bags, custom, iterator]


class Watched:
    """A reader that notes where it is asked to begin."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.starts: list[int] = []
        self.dense_names, self.invalid_ids, self.paths = reader.dense_names, 0, reader.paths

    def num_samples(self, split: Kind) -> int | None:
        return self._reader.num_samples(split)

    def batches(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Batch]:
        self.starts.append(start)
        yield from self._reader.batches(split, epoch, start)

    def pending(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Pending]:
        return self._reader.pending(split, epoch, start)


@pytest.mark.parametrize("seeks", [True, False])
@pytest.mark.parametrize("shuffle", ["none", "window:16"])
@pytest.mark.parametrize("make", FORMATS)
def test_windows_hold_the_batches_that_a_whole_reading_has_there(
    make: Callable[..., Job], shuffle: str, seeks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(tmp_path, shuffle=shuffle)
    whole = list(open_reader(job).batches("train", 0))
    assert len(whole) == 11
    reader = Watched(open_reader(job))
    if seeks:
        monkeypatch.setattr(sample, "DECODED_ROWS", 0)
    windows = [
        Window(start=1, stop=3, draw=0),
        Window(start=3, stop=4, draw=1),
        Window(start=7, stop=8, draw=0),
        Window(start=10, stop=11, draw=0),
    ]
    found = list(read_windows(job, reader, iter(windows)))
    assert [batch.index for batch in found] == [1, 2, 3, 7, 10]
    assert [batch.window for batch in found] == [windows[i] for i in (0, 0, 1, 2, 3)]
    assert all(same_batch(batch.batch, whole[batch.index]) for batch in found)
    if make in (custom, iterator, tsv_gz):
        assert reader.starts == [0]
    elif seeks and shuffle == "none":
        assert reader.starts[-2:] == [7, 10]


def test_the_evaluation_split_can_be_sampled_too(tmp_path: Path) -> None:
    job = tsv(tmp_path)
    reader = open_reader(job)
    whole = list(reader.batches("eval", 0))
    windows = sample_windows(job, reader, Amount(share=0.67), split="eval")
    found = list(read_windows(job, reader, windows, split="eval"))
    assert len(found) == 2
    assert all(same_batch(batch.batch, whole[batch.index]) for batch in found)


@pytest.mark.parametrize("make", [custom, iterator])
def test_an_epoch_of_unknown_length_is_sampled_to_its_end(make: Callable[..., Job], tmp_path: Path) -> None:
    job = make(tmp_path)
    reader = open_reader(job)
    windows = sample_windows(job, reader, Amount(share=0.5), draws=2)
    found = list(read_windows(job, reader, windows))
    assert 4 <= len(found) <= 6
    assert all(batch.window.start // 4 == batch.index // 4 for batch in found)
    again = reader_for_another_pass(job, reader)
    other = [
        batch.index
        for batch in read_windows(
            job, again, (w for w in sample_windows(job, again, Amount(share=0.5), draws=2) if w.draw)
        )
    ]
    assert other == [batch.index for batch in found if batch.window.draw]


def test_the_windows_of_an_epoch_of_unknown_length_go_on_for_ever(tmp_path: Path) -> None:
    job = iterator(tmp_path)
    windows = list(islice(sample_windows(job, open_reader(job), Amount(share=0.1), length=3), 50))
    assert [window.start // 30 for window in windows] == list(range(50))
    assert {window.stop - window.start for window in windows} == {3}


def test_a_number_of_samples_of_data_of_unknown_length_is_refused(tmp_path: Path) -> None:
    job = iterator(tmp_path)
    with pytest.raises(
        ConfigError,
        match=facts("--samples", "tests.analysis.test_sample:once", "how many samples"),
    ):
        sample_windows(job, open_reader(job), Amount(samples=5))


def test_a_place_is_sought_only_where_that_is_cheaper_than_reading_on(tmp_path: Path) -> None:
    def cost(job: Job) -> float:
        return rows_worth_skipping(job, open_reader(job), "train")

    folders = [tmp_path / name for name in "abcdefg"]
    for folder in folders:
        folder.mkdir()
    assert cost(npy(folders[0])) == 0
    assert cost(npy(folders[1], shuffle="full")) == 83 / 32
    assert cost(tsv(folders[2])) == sample.DECODED_ROWS
    assert cost(bags(folders[3], shuffle="window:65536")) == 65536
    assert cost(tsv_gz(folders[4])) == cost(custom(folders[5])) == np.inf
