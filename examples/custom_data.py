"""Your own data set: `data.format = "examples.custom_data:open_batches"`, with `[data.options] num_batches = 100`."""

from collections.abc import Callable, Iterator

import numpy as np

import rowcast


def open_batches(job: rowcast.Job, num_batches: int = 100) -> Callable[[str, int], Iterator[rowcast.Batch]]:
    """Called once with `data.options`; the result is called for each epoch's training and for each evaluation."""
    rows = [table.num_embeddings for table in job.tables for _ in table.features]
    size = job.data.batch_size

    def batches(split: str, epoch: int) -> Iterator[rowcast.Batch]:
        rng = np.random.default_rng([job.job.seed, split == "eval", epoch])
        for _ in range(num_batches if split == "train" else num_batches // 10):
            # one row of ids per feature: feature-major when flattened
            ids = np.stack([rng.integers(0, n, size) for n in rows])
            labels = (ids[0] % 2 == 0).astype(np.float32)
            dense = rng.normal(size=(size, 4)).astype(np.float32)
            yield rowcast.Batch(dense=dense, labels=labels, ids=ids.reshape(-1))

    return batches
