"""What `rowcast check` says of histories that are cut, and of times that fall."""

import re

import msgspec
import numpy as np

from rowcast.analysis.check.data import SeenHistories, check_histories
from rowcast.protocol.batch import Batch
from tests.support.facts import facts
from tests.support.next_item import LENGTH, job_of


def batch(lengths: list[int], times: list[int]) -> Batch:
    """Histories of `lengths`; a positive each."""
    bags = [*lengths, *[1] * len(lengths), *[0] * len(lengths)]
    return Batch(
        dense=np.zeros((len(lengths), 0), np.float32),
        labels=np.zeros(len(lengths), np.float32),
        ids=np.zeros(sum(bags), np.int64),
        offsets=np.append(0, np.cumsum(bags)),
        inputs={"time": np.array(times, np.int64)},
    )


def said(*batches: Batch) -> list[str]:
    seen, job = SeenHistories(), job_of("hstu")
    job = msgspec.structs.replace(job, data=msgspec.structs.replace(job.data, of={"time": "history"}))
    for own in batches:
        seen.add(own, job)
    return [f"{own.level}: {own.sentence}" for own in check_histories(job, seen)]


def test_histories_that_rise_and_fit_are_not_mentioned() -> None:
    """A time may be less than the last of the sample before."""
    assert said(batch([LENGTH, 0, 2], [*range(LENGTH), 0, 0])) == []


def test_cut_histories_and_times_that_fall_are_counted_over_all_batches() -> None:
    cut, falling = said(
        batch([LENGTH + 1, 0, 2], [*range(LENGTH + 1), 9, 4]), batch([LENGTH + 2], [3, 2, 1, *range(LENGTH - 1)])
    )
    assert re.match(facts("ok", "2 of 4 histories", f"model.history = {LENGTH}"), cut)
    assert re.match(facts("warning", "2 of 4 histories", "from 9 to 4", "sort"), falling)
