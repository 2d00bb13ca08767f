"""A bad reader and a bad model, named in job files as `module:factory`. The decoding child imports no torch here."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from rowcast.job.schema import Job
from rowcast.protocol.batch import Batch, Kind

if TYPE_CHECKING:
    from torch import nn

FOREVER_S = 600.0


def hanging_reader(job: Job, num_batches: int) -> Callable[[Kind, int], Iterable[Batch]]:
    """So many batches, and then nothing, not even an end."""

    def batches(split: Kind, epoch: int) -> Iterator[Batch]:
        size = job.data.batch_size
        for step in range(num_batches):
            ids = np.full(size * len(job.features), step % 100, np.int64)
            yield Batch(dense=np.zeros((size, 2), np.float32), labels=np.zeros(size, np.float32), ids=ids)
        time.sleep(FOREVER_S)

    return batches


def slow_model(job: Job, num_dense: int, build_s: float = 0.0, forward_s: float = 0.0) -> "nn.Module":
    """DLRM that takes its time. Sleeping holds the main thread as a long operation would, and lets the others run."""
    from rowcast.trainer.models.dlrm import DLRM

    model = DLRM(job, num_dense)
    time.sleep(build_s)
    model.register_forward_pre_hook(lambda module, inputs: time.sleep(forward_s))
    return model


def unseeded(job: Job, seeded_batches: int) -> Callable[[Kind, int], Iterable[Batch]]:
    """200 batches; after the first ones, nobody reads the same ids twice."""

    def batches(split: Kind, epoch: int) -> Iterator[Batch]:
        size = job.data.batch_size
        for step in range(200 if split == "train" else 0):
            rng = np.random.default_rng(step if step < seeded_batches else None)
            ids = rng.integers(0, 100, size * len(job.features))
            yield Batch(dense=np.zeros((size, 2), np.float32), labels=np.zeros(size, np.float32), ids=ids)

    return batches
