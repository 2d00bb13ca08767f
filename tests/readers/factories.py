"""Factories of custom data sets as users write them, good and bad; jobs name them tests.readers.factories:<name>."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rowcast.job.schema import Job
from rowcast.protocol.batch import Batch, Kind
from rowcast.runtime.telemetry.logs import get_logger


def batch(value: int = 1, **changed: Any) -> Batch:
    """Two samples of the three features cat_3, cat_0 (table late) and cat_25 (table last), every id `value`."""
    good = Batch(
        dense=np.full((2, 4), value, np.float32),
        labels=np.array([0, 1], np.float32),
        ids=np.full(6, value, np.int64),
    )
    return replace(good, **changed)


def function(job: Job, num_batches: int = 3) -> Callable[[Kind, int], Iterator[Batch]]:
    def batches(split: Kind, epoch: int) -> Iterator[Batch]:
        return (batch(i + (3 if split == "eval" else 0)) for i in range(1 if split == "eval" else num_batches))

    return batches


def iterable(job: Job) -> list[Batch]:
    return [batch(i) for i in range(3)]


def iterator(job: Job) -> Iterator[Batch]:
    return (batch(i) for i in range(3))


def timed(job: Job) -> list[Batch]:
    return [batch(inputs={"time": np.array([i, i + 1])}) for i in range(3)]


def number(job: Job) -> int:
    return 7


def nothing(job: Job) -> list[Batch]:
    return []


not_callable = 7


def changed(job: Job, case: str) -> list[Any]:
    """A good batch, then one broken in the way that `case` names."""
    return [batch(), BROKEN[case][0]()]


def indexed(dtype: Any, position: int, value: float, shape: tuple[int, ...]) -> Any:
    array = np.ones(shape, dtype)
    array.flat[position] = value
    return array


BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "no batch": (lambda: {"ids": [1]}, "is dict; yield rowcast.protocol.batch.Batch"),
    "no samples": (lambda: batch(labels=np.zeros(0, np.float32)), "has no samples"),
    "labels of int": (lambda: batch(labels=np.zeros(2, np.int64)), "labels are int64[2]; give float32[2]"),
    "labels as a list": (lambda: batch(labels=[0.0, 1.0]), "labels are list; give float32[2]"),
    "two-dimensional labels": (
        lambda: batch(labels=np.zeros((2, 1), np.float32)),
        "labels are float32[2, 1]; give float32[2]",
    ),
    "narrow dense": (lambda: batch(dense=np.zeros((2, 3), np.float32)), "dense are float32[2, 3]; give float32[2, 4]"),
    "dense of double": (lambda: batch(dense=np.zeros((2, 4))), "dense are float64[2, 4]; give float32[2, 4]"),
    "ids of int32": (lambda: batch(ids=np.ones(6, np.int32)), "ids are int32[6]; give int64[6]"),
    "too few ids": (lambda: batch(ids=np.ones(5, np.int64)), "ids are int64[5]; give int64[6]"),
    "offsets of int32": (lambda: batch(offsets=np.arange(7, dtype=np.int32)), "offsets are int32[7]; give int64[7]"),
    "too few offsets": (lambda: batch(offsets=np.arange(6)), "offsets are int64[6]; give int64[7]"),
    "falling offsets": (
        lambda: batch(offsets=np.array([0, 1, 3, 2, 4, 5, 6])),
        "offsets must rise from 0 to the 6 ids",
    ),
    "offsets beyond the ids": (
        lambda: batch(offsets=np.arange(7) * 2),
        "offsets must rise from 0 to the 6 ids, but go from 0 to 12",
    ),
    "unexpected weights": (
        lambda: batch(weights=np.ones(6, np.float32)),
        "weights are given, but data.columns.weights names none",
    ),
    "an id beyond the table": (
        lambda: batch(ids=indexed(np.int64, 5, 7, (6,))),
        "look-up 5, column cat_25: id 7 is outside table last (num_embeddings = 7)",
    ),
    "a negative id": (
        lambda: batch(ids=indexed(np.int64, 2, -1, (6,))),
        "look-up 2, column cat_0: id -1 is outside table late",
    ),
    "NaN in dense": (
        lambda: batch(dense=indexed(np.float32, 6, np.nan, (2, 4))),
        "sample 1, column int_2: value nan is not finite",
    ),
    "an infinite label": (
        lambda: batch(labels=indexed(np.float32, 1, np.inf, (2,))),
        "sample 1, column label: value inf is not finite",
    ),
}


def slow_to_open(job: Job) -> list[Batch]:
    time.sleep(600)
    return []


def stuck(job: Job) -> Callable[[Kind, int], Iterator[Batch]]:
    """Gives two batches, then nothing for longer than any test."""

    def batches(split: Kind, epoch: int) -> Iterator[Batch]:
        yield batch(1)
        yield batch(2)
        time.sleep(600)

    return batches


def signalled(job: Job, number: int) -> Callable[[Kind, int], Iterator[Batch]]:
    """The decoding process gets a signal between two batches."""

    def batches(split: Kind, epoch: int) -> Iterator[Batch]:
        if split == "train":
            yield batch(1)
            os.kill(os.getpid(), number)
            yield batch(2)

    return batches


def logging(job: Job) -> list[Batch]:
    get_logger().warning("of the child", value=7)
    return [batch()]


def raising(job: Job) -> Callable[[Kind, int], Iterator[Batch]]:
    """A bug in the user's own code, after one batch."""

    def batches(split: Kind, epoch: int) -> Iterator[Batch]:
        yield batch(1)
        raise KeyError("user_id")

    return batches


def endless(job: Job) -> Callable[[Kind, int], Iterator[Batch]]:
    def batches(split: Kind, epoch: int) -> Iterator[Batch]:
        while True:
            yield batch(1)

    return batches
