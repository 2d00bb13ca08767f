"""The order of a run: steps, epochs, evaluations, --max-steps, and going on from any position."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import Pending, Reader, decoded, expected_train_steps, open_reader, schedule
from rowcast.protocol.batch import Batch, Kind, ScheduledBatch
from rowcast.runtime.checkpoint_manifest import Position
from tests.support.data_files import make_job, same_batch


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
