"""The batches of a training script: the rows that it will look up, step by step, as it tells them.

A batch is one sample, and each table a feature with a bag of distinct rows. Samples stay in the script."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rowcast.job.tables import TableSpec
from rowcast.prefetcher.readers.source import SourceCounters, SourceInfo
from rowcast.protocol.batch import Batch, Lookups, Samples, Scheduled
from rowcast.protocol.messages import Ids
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import RemoteProtocolError

NO_SAMPLES = Samples(dense=np.zeros((1, 0), np.float32), labels=np.zeros(1, np.float32))


class ScriptIds:
    """Implements `BatchStream`. The mail's thread calls `accept`, the planning's the others."""

    ended = False  # the script may always look up more

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self.counters = SourceCounters()
        self._sizes = [table.num_embeddings for table in tables]
        self._step = self._train_step = 0  # of the next batch
        self._parts: list[bytes] = []  # of its rows
        self._arrived: deque[Scheduled[Batch]] = deque()

    def accept(self, message: Ids) -> None:
        """Raises RemoteProtocolError if rows are missing, repeated or in no table."""
        self._parts.append(message.rows)
        rows = np.frombuffer(b"".join(self._parts), np.int64)
        if message.step != self._step or len(message.counts) != len(self._sizes) or len(rows) > sum(message.counts):
            raise RemoteProtocolError(f"rows of step {message.step} do not follow those before, of step {self._step}")
        if len(rows) < sum(message.counts):
            return
        offsets: I64 = np.cumsum([0, *message.counts])
        for table, (size, (first, end)) in enumerate(zip(self._sizes, pairwise(offsets), strict=True)):
            if not ascend_below(size, rows[first:end]):
                raise RemoteProtocolError(f"rows of step {message.step} do not ascend within table {table}")
        self._arrived.append(
            Scheduled.at(
                step=self._step,
                kind="train" if message.trains else "eval",
                train_step=self._train_step,
                epoch=0,
                batch=Batch.of(Lookups(size=1, ids=rows, offsets=offsets), NO_SAMPLES),
            )
        )
        self._step, self._train_step, self._parts = self._step + 1, self._train_step + message.trains, []

    def start(self) -> None:
        """Nothing has to start: the script sends."""

    def info(self) -> SourceInfo:
        return SourceInfo(dense_names=[], expected_train_steps=None, num_train=None, num_eval=None, paths=[])

    def take(self) -> Scheduled[Batch] | None:
        if not self._arrived:
            return None
        self.counters.batches += 1
        return self._arrived.popleft()

    def close(self) -> None:
        self._arrived.clear()


def ascend_below(size: int, rows: I64) -> bool:
    return not len(rows) or bool(rows[0] >= 0 and rows[-1] < size and (np.diff(rows) > 0).all())
