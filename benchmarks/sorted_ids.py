"""Ids sorted by how often they occur, the order that is hardest to divide evenly: `benchmarks/sorted_ids.toml`.

Id k of a feature has a probability proportional to (k + 1) ** -`zipf`, in the order of its number. The synthetic reader
permutes its ids instead.
"""

from collections.abc import Callable, Iterator

import numpy as np

import rowcast
from rowcast.prefetcher.readers.formats.synthetic import Zipf


def open_batches(
    job: rowcast.Job, num_batches: int = 100, zipf: float = 1.05
) -> Callable[[str, int], Iterator[rowcast.Batch]]:
    columns = [Zipf(table.num_embeddings, zipf) for table in job.tables for _ in table.features]
    size = job.data.batch_size

    def batches(split: str, epoch: int) -> Iterator[rowcast.Batch]:
        rng = np.random.default_rng([job.job.seed, split == "eval", epoch])
        for _ in range(num_batches if split == "train" else 0):
            ids = np.concatenate([column.ranks(rng.random(size)) for column in columns])
            yield rowcast.Batch(dense=np.zeros((size, 1), np.float32), labels=np.zeros(size, np.float32), ids=ids)

    return batches
