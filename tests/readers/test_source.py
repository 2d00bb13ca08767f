"""Ids far ahead, the rest when it is asked for: the batches and errors are those of reading whole batches in order."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet as pq

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import Part
from rowcast.prefetcher.readers.source import Source, SourceCounters, SourceInfo
from rowcast.protocol.batch import Lookups, Samples, Scheduled
from rowcast.runtime.errors import DataError
from tests.readers.polling import next_batch, next_dense, next_ids, polled_ahead, rest_of
from tests.support.data_files import (
    PARQUET_COLUMNS,
    click_log,
    long_job,
    make_job,
    same_batch,
    write_day,
    write_parquet,
    write_tsv,
)
from tests.support.facts import facts
from tests.support.inline_source import InlineSource


def npy(folder: Path, **data: Any) -> Job:
    write_day(folder, "day_0", 100)
    return make_job("criteo-npy", path=str(folder), **data)


def bags(folder: Path, **data: Any) -> Job:
    write_parquet(folder / "a.parquet", 100)
    return make_job("parquet", path=str(folder), columns=PARQUET_COLUMNS, **data)


def tsv(folder: Path, **data: Any) -> Job:
    write_tsv(click_log(), folder / "a.tsv")
    return make_job("criteo-tsv", path=str(folder), **data)


def custom(folder: Path, **data: Any) -> Job:
    return make_job("tests.support.data_files:listed", **data)


FORMATS = pytest.mark.parametrize("make", [npy, bags, tsv, custom])


@FORMATS
@pytest.mark.parametrize("horizon", [0, 1, 7, 1000])
def test_ids_and_rest_polled_apart_are_the_whole_batches(make: Any, horizon: int, tmp_path: Path) -> None:
    job = long_job(make(tmp_path))
    whole = rest_of(InlineSource(job))
    assert len(whole) > 30
    found = polled_ahead(InlineSource(job), horizon)
    assert [(batch.step, batch.kind, batch.train_step, batch.epoch) for batch in found] == [
        (batch.step, batch.kind, batch.train_step, batch.epoch) for batch in whole
    ]
    assert [(batch.position, batch.following) for batch in found] == [
        (batch.position, batch.following) for batch in whole
    ]
    assert all(same_batch(a.batch, b.batch) for a, b in zip(found, whole, strict=True))


def test_the_rest_of_a_batch_cannot_be_had_before_its_ids(tmp_path: Path) -> None:
    source = InlineSource(npy(tmp_path))
    assert next_ids(source) is not None
    next_dense(source)
    with pytest.raises(AssertionError, match=facts("dense part of batch 1", "1 batches")):
        source.poll_dense()


@FORMATS
def test_a_closed_source_gives_neither(make: Any, tmp_path: Path) -> None:
    source = InlineSource(make(tmp_path))
    assert next_ids(source) is not None
    source.close()
    assert (source.poll_ids(), source.poll_dense(), source.poll()) == (None, None, None)


def test_what_a_data_set_of_ones_own_adds_to_a_batch_is_part_of_the_rest() -> None:
    job = make_job("tests.readers.factories:timed")
    source = InlineSource(job)
    assert [next_ids(source) is not None for _ in range(3)] == [True] * 3
    assert [next_dense(source).inputs["time"].tolist() for _ in range(3)] == [[0, 1], [1, 2], [2, 3]]
    assert [batch.batch.inputs["time"].tolist() for batch in rest_of(InlineSource(job))] == [[0, 1], [1, 2], [2, 3]]


# errors: batches of 8 rows


def break_value(folder: Path, row: int) -> None:
    dense = np.load(folder / "day_0_dense.npy")
    dense[row, 2] = np.nan
    np.save(folder / "day_0_dense.npy", dense)


def break_label(folder: Path, row: int) -> None:
    labels = np.load(folder / "day_0_labels.npy")
    labels[row] = 3
    np.save(folder / "day_0_labels.npy", labels)


def break_id(folder: Path, row: int) -> None:
    ids = np.load(folder / "day_0_sparse.npy")
    ids[row, 25] = 7
    np.save(folder / "day_0_sparse.npy", ids)


BREAKS = {"value": break_value, "label": break_label, "id": break_id}
SENTENCES = {
    "value": "day_0_dense.npy, row {row}, column int_2: value nan is not finite",
    "label": "day_0_labels.npy, row {row}, column label: label 3.0 is not 0 or 1",
    "id": "day_0_sparse.npy, row {row}, column cat_25: id 7 is outside table last",
}


@pytest.mark.parametrize(
    ("broken", "first"),
    [
        ({"value": 30}, "value"),
        ({"label": 30}, "label"),
        ({"id": 30}, "id"),
        ({"value": 30, "id": 50}, "value"),
        ({"value": 50, "id": 30}, "id"),
        ({"label": 31, "id": 30}, "label"),  # in one batch: the rest is decoded first
        ({"value": 31, "label": 30, "id": 24}, "value"),
    ],
)
@pytest.mark.parametrize("horizon", [0, 2, 1000])
def test_the_first_error_of_the_data_is_raised_after_every_batch_before_it(
    broken: dict[str, int], first: str, horizon: int, tmp_path: Path
) -> None:
    job = npy(tmp_path)
    for what, row in broken.items():
        BREAKS[what](tmp_path, row)
    sentence = SENTENCES[first].format(row=broken[first])
    with pytest.raises(DataError, match=sentence):
        polled_ahead(InlineSource(job), horizon)
    whole = InlineSource(job)
    assert [next_batch(whole) is not None for _ in range(3)] == [True] * 3
    for _ in range(2):
        with pytest.raises(DataError, match=sentence):
            next_batch(whole)
    assert not whole.ended


def test_dense_values_and_labels_are_not_looked_at_before_they_are_asked_for(tmp_path: Path) -> None:
    job = npy(tmp_path)
    break_value(tmp_path, 12)
    source = InlineSource(job)
    assert [next_ids(source) is not None for _ in range(6)] == [True] * 6
    next_dense(source)
    with pytest.raises(DataError, match="row 12, column int_2: value nan"):
        next_dense(source)


def test_of_parquet_only_the_columns_of_the_part_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = []

    class Noting(pq.ParquetFile):  # type: ignore[misc]
        def iter_batches(self, *args: Any, columns: list[str], **options: Any) -> Any:
            read.append(columns)
            return super().iter_batches(*args, columns=columns, **options)

    monkeypatch.setattr(pq, "ParquetFile", Noting)
    source = InlineSource(bags(tmp_path))
    assert next_ids(source) is not None
    assert read == [["cat_3", "cat_0", "cat_25", "cat_0_weights"]]
    next_dense(source)
    assert read[1:] == [["click", "int_2", "int_10"]]


# streams that are not always ready


class Slow:
    """A `Stream` of what it is given; None stands for "nothing has arrived"."""

    def __init__(self, arrivals: list[Lookups | Samples | DataError | None]) -> None:
        self.counters = SourceCounters()
        self._arrivals = deque(arrivals)
        self._step = 0
        self.closed = False

    def start(self) -> None:
        pass

    def info(self) -> SourceInfo:
        raise NotImplementedError

    def take(self) -> Scheduled[Part] | None:
        if self._arrivals and isinstance(self._arrivals[0], DataError):
            raise self._arrivals[0]
        part = self._arrivals.popleft() if self._arrivals else None
        if part is None or isinstance(part, DataError):
            return None
        self._step += 1
        return Scheduled.at(step=self._step - 1, kind="train", train_step=0, epoch=0, batch=part)

    @property
    def ended(self) -> bool:
        return not self._arrivals

    def close(self) -> None:
        self.closed = True


def ids(value: int) -> Lookups:
    return Lookups(size=1, ids=np.array([value]))


def rest(value: int) -> Samples:
    return Samples(dense=np.full((1, 1), value, np.float32), labels=np.zeros(1, np.float32))


def dense_value(source: Source) -> float | None:
    found = source.poll_dense()
    return None if found is None else float(found.dense[0, 0])


def test_nothing_waits_for_a_stream_that_is_not_ready() -> None:
    source = Source(Slow([None, ids(1), ids(2)]), Slow([None, rest(1), None, rest(2)]))
    assert source.poll_ids() is None
    assert source.poll_ids() is not None
    assert [dense_value(source), dense_value(source)] == [None, 1]
    assert source.poll_ids() is not None
    assert [dense_value(source), dense_value(source)] == [None, 2]
    assert source.ended


def test_a_whole_batch_waits_for_both_its_parts() -> None:
    source = Source(Slow([None, ids(1), ids(2)]), Slow([None, rest(1), rest(2)]))
    found = [source.poll() for _ in range(4)]
    assert [own if own is None else int(own.batch.ids[0]) for own in found] == [None, None, 1, 2]


def test_ids_whose_rest_is_late_are_not_lost_when_the_caller_begins_to_look_ahead() -> None:
    source = Source(Slow([ids(1), ids(2)]), Slow([None, rest(1), rest(2)]))
    assert source.poll() is None
    found = [source.poll_ids(), source.poll_ids()]
    assert [None if own is None else int(own.batch.ids[0]) for own in found] == [1, 2]
    assert [dense_value(source), dense_value(source)] == [1, 2]


def test_broken_ids_are_told_only_when_no_rest_before_them_can_be_broken_any_more() -> None:
    source = Source(Slow([ids(0), ids(1), DataError("ids")]), Slow([rest(0), None, rest(1), None, rest(2)]))
    assert [source.poll_ids() is not None for _ in range(2)] == [True, True]
    assert [source.poll_ids(), source.poll_ids()] == [None, None]
    with pytest.raises(DataError, match="ids"):
        source.poll_ids()
    assert [dense_value(source), dense_value(source)] == [0, 1]


def test_a_broken_rest_before_broken_ids_is_told_instead() -> None:
    source = Source(Slow([ids(0), ids(1), DataError("ids")]), Slow([rest(0), None, DataError("dense")]))
    assert [source.poll_ids() is not None for _ in range(2)] == [True, True]
    assert source.poll_ids() is None
    for ask in (source.poll_ids, source.poll_ids):
        with pytest.raises(DataError, match="dense"):
            ask()
    assert dense_value(source) == 0
    with pytest.raises(DataError, match="dense"):
        source.poll_dense()


def test_closing_closes_both_streams() -> None:
    streams = Slow([]), Slow([])
    Source(*streams).close()
    assert [stream.closed for stream in streams] == [True, True]
