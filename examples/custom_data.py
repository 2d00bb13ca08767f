"""A data set of your own: `data.format = "examples.custom_data:open_batches"`, with `[data.options] num_batches = 100`."""

from collections.abc import Callable, Iterator

import numpy as np

from rowcast.job.schema import Job
from rowcast.protocol.batch import Batch, Kind


def open_batches(job: Job, num_batches: int = 100) -> Callable[[Kind, int], Iterator[Batch]]:
    """Called once with `data.options`; the result is called for each epoch's training and for each evaluation."""
    rows = [table.num_embeddings for table in job.tables for _ in table.features]
    size = job.data.batch_size

    def batches(split: Kind, epoch: int) -> Iterator[Batch]:
        rng = np.random.default_rng([job.job.seed, split == "eval", epoch])
        for _ in range(num_batches if split == "train" else num_batches // 10):
            # one row of ids a feature: feature-major when flattened
            ids = np.stack([rng.integers(0, n, size) for n in rows])
            labels = (ids[0] % 2 == 0).astype(np.float32)
            yield Batch(dense=rng.normal(size=(size, 4)).astype(np.float32), labels=labels, ids=ids.reshape(-1))

    return batches
