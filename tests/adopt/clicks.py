"""Data sets of training scripts, as tests.adopt.clicks:<name>: two features of one table, one of another; 8 a batch."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rowcast.protocol.batch import Kind

SIZE, ROWS = 8, (500, 6)


def ids_of(step: int) -> npt.NDArray[np.int64]:
    """[B, 3]"""
    rng = np.random.default_rng(step)
    return np.stack([rng.integers(0, rows, SIZE) for rows in (ROWS[0], ROWS[0], ROWS[1])], axis=1)


def batch(step: int) -> tuple[Any, Any, Any]:
    ids = ids_of(step)
    return np.full((SIZE, 2), step, np.float32), ids, ids[:, 0] % 2 == 0


def train(batches: int = 8, sleep_s: float = 0.0) -> Iterator[Any]:
    for step in range(batches):
        time.sleep(sleep_s)
        yield batch(step)


def listed(batches: int = 4) -> list[Any]:
    """The same in each epoch, and nothing to evaluate."""
    return [batch(step) for step in range(batches)]


def with_evaluation(batches: int = 4) -> Callable[[Kind, int], Iterator[Any]]:
    return lambda split, epoch: (batch(100 * epoch + step) for step in range(batches if split == "train" else 2))


def broken() -> Iterator[Any]:
    yield batch(0)
    raise KeyError("user_id")


def gone() -> Iterator[Any]:
    os._exit(9)
    yield


def lists(batches: int = 4) -> Callable[[Kind, int], list[Any]]:
    """Both splits with a length."""
    return lambda split, epoch: [batch(step) for step in range(batches if split == "train" else 2)]


def two_tasks() -> Callable[[Kind, int], list[Any]]:
    """Labels [B, 2], of which every second of the second column is unknown."""
    batches = [
        (dense, ids, np.stack([clicked, clicked], axis=1).astype(np.float32)) for dense, ids, clicked in listed()
    ]
    for _, _, labels in batches:
        labels[::2, 1] = np.nan
    return lambda split, epoch: batches


def by_name() -> list[Any]:
    """One batch, whose ids say whose they are."""
    dense, ids, labels = batch(0)
    return [(dense, {"a": ids[:, 0], "b": ids[:, 1], "c": ids[:, 2]}, labels)]


def mixed_up() -> list[Any]:
    """Columns c, a, b instead of a, b, c: no id is outside `wide`, and `small` is too small."""
    dense, ids, labels = batch(0)
    return [(dense, ids[:, [2, 0, 1]], labels)]
