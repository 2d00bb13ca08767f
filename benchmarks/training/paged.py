"""Contestant: the loop that one would write in an afternoon for tables beyond memory. All tables are one memory-mapped
file; a step reads the distinct rows of its batch, trains them, and writes them back.

It is exact: a row gets one update a step. The kernel decides what stays in memory, and a step waits for every page that
has to come from the disk.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from rowcast.job.schema import Job
from rowcast.job.tables import table_specs
from rowcast.protocol.batch import Batch
from rowcast.protocol.first_values import initial_rows


class PagedRows:
    """Implements `stock.Rows` for single-hot features, each of a table of its own, tables of one width, and Adagrad."""

    def __init__(self, job: Job, file: Path) -> None:
        tables = table_specs(job)
        self._settings, self._dim = job.optimizer.sparse, tables[0].embedding_dim
        assert self._settings.kind == "adagrad", f"this loop has no {self._settings.kind}"
        self._first = np.cumsum([0, *(table.num_embeddings for table in tables)])
        self._file = np.memmap(file, np.float32, "w+", shape=(self._first[-1], 2 * self._dim))
        self._file[:, self._dim :] = self._settings.initial_accumulator
        for table, first in zip(tables, self._first, strict=False):
            rows = np.arange(table.num_embeddings, dtype=np.int64)
            self._file[first + rows, : self._dim] = initial_rows(job.job.seed, table, rows)

    def look_up(self, batch: Batch) -> tuple[Tensor, ...]:
        ids = batch.ids.reshape(len(self._first) - 1, batch.size) + self._first[:-1, None]
        self._touched, places = np.unique(ids, return_inverse=True)
        self._records = torch.from_numpy(self._file[self._touched])
        self._weights = self._records[:, : self._dim].clone().requires_grad_()
        return nn.functional.embedding(torch.from_numpy(places.reshape(ids.shape)), self._weights).unbind()

    def update(self) -> None:
        grad = self._weights.grad
        assert grad is not None, "the loss depends on the rows"
        sums = self._records[:, self._dim :] + grad * grad
        weights = self._weights.detach() - self._settings.lr * grad / (sums.sqrt() + self._settings.epsilon)
        self._file[self._touched] = torch.cat([weights, sums], 1).numpy()
