"""Reading a part of an epoch: which batches are drawn, and that they are what a whole reading would give."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowcast.analysis import scan as steps
from rowcast.analysis.scan import (
    Amount,
    draw_batches,
    read_drawn,
    reader_for_another_pass,
    rows_worth_skipping,
)
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import Pending, Reader, open_reader
from rowcast.protocol.batch import Batch, Kind
from tests.support.data_files import make_job, same_batch
from tests.support.format_cases import Case, bags, custom, npy, tsv, tsv_gz


def synthetic(samples: int, batch_size: int = 8, **data: Any) -> Job:
    return make_job("synthetic", synthetic={"samples": samples}, batch_size=batch_size, eval_fraction=0.0, **data)


def drawn_of(num_batches: int, amount: Amount) -> list[int]:
    job = synthetic(8 * num_batches)
    return list(draw_batches(job, open_reader(job), amount, "train"))


@pytest.mark.parametrize("num_batches", [100, 97])
def test_there_is_one_batch_in_each_of_equal_strata(num_batches: int) -> None:
    found = drawn_of(num_batches, Amount(share=0.25))
    assert len(found) == round(num_batches / 4)
    for i, own in enumerate(found):
        assert i * num_batches // len(found) <= own < (i + 1) * num_batches // len(found)


def test_the_place_in_a_stratum_is_random_but_the_same_for_one_seed() -> None:
    assert len({own % 10 for own in drawn_of(1000, Amount(share=0.1))}) == 10
    assert drawn_of(1000, Amount(share=0.1)) == drawn_of(1000, Amount(share=0.1))
    counts: Counter[int] = Counter()
    for seed in range(600):
        counts.update(steps.drawn(iter([(0, 6), (6, 12)]), seed))
    assert sorted(counts) == list(range(12)), "every batch is drawn equally often over many seeds"
    assert 65 < min(counts.values()) < max(counts.values()) < 140


@pytest.mark.parametrize(
    ("num_batches", "amount", "expected"),
    [
        (100, Amount(share=0.05), 5),
        (100, Amount(share=0.05, least_batches=30), 30),
        (100, Amount(share=0.5, least_batches=30), 50),
        (100, Amount(share=0.05, least_batches=1000), 100),
        (1, Amount(share=1.0), 1),
        (0, Amount(share=1.0), 0),
        (3, Amount(share=0.01), 1),
    ],
)
def test_an_amount_is_a_share_and_at_least_so_many_batches(num_batches: int, amount: Amount, expected: int) -> None:
    job = synthetic(8)
    reader = Watched(open_reader(job))
    reader.num_samples = lambda split: 8 * num_batches  # type: ignore[method-assign]
    assert len(list(draw_batches(job, reader, amount, "train"))) == expected


# readers


def iterator(folder: Path, **data: Any) -> tuple[Job, None]:
    return make_job("tests.analysis.test_sample:once", **data), None


def once(job: Job) -> Iterator[Batch]:
    """A data set that can be gone through once."""
    return iter(list(open_reader(make_job("tests.support.data_files:listed")).batches("train", 0)))


FORMATS: list[Case] = [tsv, tsv_gz, npy, bags, custom, iterator]


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
def test_drawn_batches_are_those_that_a_whole_reading_has_there(
    make: Case, shuffle: str, seeks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = make(tmp_path, shuffle=shuffle)
    whole = list(open_reader(job).batches("train", 0))
    assert len(whole) == 11
    reader = Watched(open_reader(job))
    if seeks:
        monkeypatch.setattr(steps, "DECODED_ROWS", 0)
    wanted = (1, 2, 3, 7, 10)
    found = list(read_drawn(job, reader, iter(wanted), "train"))
    assert all(same_batch(batch, whole[index]) for batch, index in zip(found, wanted, strict=True))
    if make in (custom, iterator):
        assert reader.starts == [0]
    elif seeks and shuffle == "none":
        assert reader.starts[-2:] == [7, 10]


def test_the_evaluation_split_can_be_sampled_too(tmp_path: Path) -> None:
    job, _ = tsv(tmp_path)
    reader = open_reader(job)
    whole = list(reader.batches("eval", 0))
    wanted = list(draw_batches(job, reader, Amount(share=0.67), "eval"))
    found = list(read_drawn(job, reader, iter(wanted), "eval"))
    assert len(found) == 2
    assert all(same_batch(batch, whole[index]) for batch, index in zip(found, wanted, strict=True))


@pytest.mark.parametrize("make", [custom, iterator])
def test_an_epoch_of_unknown_length_is_sampled_to_its_end(make: Case, tmp_path: Path) -> None:
    job, _ = make(tmp_path)
    reader = open_reader(job)
    endless = list(islice(draw_batches(job, reader, Amount(share=0.25), "train"), 50))
    assert [index // 4 for index in endless] == list(range(50))
    whole = list(open_reader(make_job("tests.support.data_files:listed")).batches("train", 0))
    found = list(read_drawn(job, reader_for_another_pass(job, reader), iter(endless), "train"))
    assert 2 <= len(found) <= 3
    assert all(same_batch(batch, whole[index]) for batch, index in zip(found, endless, strict=False))


def test_a_place_is_sought_only_where_that_is_cheaper_than_reading_on(tmp_path: Path) -> None:
    def cost(make: Case, **data: Any) -> float:
        folder = tmp_path / f"{make.__name__} {data}"
        folder.mkdir()
        job, _ = make(folder, **data)
        return rows_worth_skipping(job, open_reader(job), "train")

    assert cost(npy) == cost(tsv) == cost(tsv_gz) == 0
    assert cost(npy, shuffle="full") == 83 / 32
    assert cost(bags) == steps.DECODED_ROWS
    assert cost(bags, shuffle="window:65536") == 65536
    assert cost(custom) == np.inf
