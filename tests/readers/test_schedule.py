"""The order of a run: steps, epochs, evaluations, --max-steps, and going on from any position."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import (
    Part,
    Pending,
    Reader,
    decoded,
    expected_train_steps,
    open_reader,
    schedule,
)
from rowcast.prefetcher.readers.source import Source, SourceCounters, SourceInfo
from rowcast.protocol.batch import Batch, Kind, Lookups, Samples, Scheduled, ScheduledBatch
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.errors import DataError
from tests.readers.polling import next_batch, next_dense, next_ids, polled_ahead
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
from tests.support.inline_source import InlineSource


def job_of(
    *, epochs: int = 1, eval_every: int = 0, samples: int = 50, eval_fraction: float = 0.2, shuffle: str = "full"
) -> Job:
    """40 training samples in 5 batches of 8, 10 for evaluation in 2."""
    job = make_job(
        "synthetic", synthetic={"samples": samples}, epochs=epochs, eval_fraction=eval_fraction, shuffle=shuffle
    )
    return msgspec.structs.replace(job, eval=msgspec.structs.replace(job.eval, every=eval_every))


def run(job: Job, max_steps: int | None = None, start: Position | None = None) -> list[ScheduledBatch]:
    return list(schedule(job, open_reader(job), max_steps, start))


def shown(job: Job, max_steps: int | None = None) -> str:
    """t and e a batch, by epochs."""
    placed = run(job, max_steps)
    epochs = range(placed[-1].epoch + 1 if placed else 0)
    return " ".join("".join(batch.kind[0] for batch in placed if batch.epoch == epoch) for epoch in epochs)


@pytest.mark.parametrize(
    ("epochs", "eval_every", "max_steps", "expected"),
    [
        (1, 0, None, "tttttee"),
        (2, 0, None, "tttttee tttttee"),
        (1, 2, None, "tteetteetee"),
        (1, 5, None, "tttttee"),
        (2, 5, None, "tttttee tttttee"),
        (2, 3, None, "ttteettee teettteetee"),
        (2, 10, None, "tttttee tttttee"),
        (1, 100, None, "tttttee"),
        (1, 0, 0, ""),
        (1, 1, 0, ""),
        (1, 0, 3, "tttee"),
        (1, 3, 3, "tttee"),
        (1, 2, 3, "tteetee"),
        (3, 0, 5, "tttttee"),
        (3, 0, 6, "tttttee tee"),
        (2, 0, 100, "tttttee tttttee"),
    ],
)
def test_evaluations_follow_every_n_steps_and_each_epoch_but_never_twice(
    epochs: int, eval_every: int, max_steps: int | None, expected: str
) -> None:
    assert shown(job_of(epochs=epochs, eval_every=eval_every), max_steps) == expected


@pytest.mark.parametrize("eval_every", [0, 2])
def test_without_evaluation_data_nothing_is_evaluated(eval_every: int) -> None:
    assert shown(job_of(epochs=2, eval_every=eval_every, eval_fraction=0.0, samples=40)) == "ttttt ttttt"


def test_steps_have_no_gaps_and_train_steps_count_training_batches_before() -> None:
    placed = run(job_of(epochs=2, eval_every=2))
    assert [batch.step for batch in placed] == list(range(len(placed)))
    for index, batch in enumerate(placed):
        assert batch.train_step == sum(earlier.kind == "train" for earlier in placed[:index])


class Recording:
    """A reader that notes what is read through it."""

    paths: ClassVar[list[Path]] = []
    invalid_ids = 0

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.dense_names = reader.dense_names
        self.read: list[Kind] = []

    def num_samples(self, split: Kind) -> int | None:
        return self._reader.num_samples(split)

    def batches(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Batch]:
        return decoded(self.pending(split, epoch, start))

    def pending(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Pending]:
        for pending in self._reader.pending(split, epoch, start):
            self.read.append(split)
            yield pending


def test_no_training_batch_beyond_the_last_step_is_read() -> None:
    job = job_of()
    recording = Recording(open_reader(job))
    list(schedule(job, recording, max_steps=3))
    assert recording.read == ["train"] * 3 + ["eval"] * 2


@pytest.mark.parametrize("max_steps", [None, 4, 7])
@pytest.mark.parametrize("eval_every", [0, 2, 5])
def test_going_on_from_any_position_gives_the_same_rest(eval_every: int, max_steps: int | None) -> None:
    job = job_of(epochs=2, eval_every=eval_every)
    whole = run(job, max_steps)
    for index, batch in enumerate(whole):
        assert_same(run(job, max_steps, through_json(batch.position)), whole[index:])
        assert_same(run(job, max_steps, through_json(batch.following)), whole[index + 1 :])


def through_json(position: Position) -> Position:
    return msgspec.json.decode(msgspec.json.encode(position), type=Position)


def assert_same(found: list[ScheduledBatch], expected: list[ScheduledBatch]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.step, a.kind, a.train_step, a.epoch, a.following) == (
            b.step,
            b.kind,
            b.train_step,
            b.epoch,
            b.following,
        )
        assert same_batch(a.batch, b.batch)


def test_a_run_that_goes_on_may_be_given_more_steps() -> None:
    job = job_of(epochs=2)
    end = run(job, max_steps=3)[-1].following
    rest = run(job, max_steps=6, start=end)
    assert "".join(batch.kind[0] for batch in rest) == "tteetee"
    assert [batch.train_step for batch in rest] == [3, 4, 5, 5, 5, 6, 6]


@pytest.mark.parametrize(
    ("epochs", "max_steps", "expected"), [(1, None, 5), (3, None, 15), (3, 7, 7), (1, 0, 0), (1, 99, 5)]
)
def test_train_steps_are_known_beforehand(epochs: int, max_steps: int | None, expected: int) -> None:
    job = job_of(epochs=epochs)
    assert expected_train_steps(job, open_reader(job), max_steps) == expected
    assert sum(batch.kind == "train" for batch in run(job, max_steps)) == expected


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
