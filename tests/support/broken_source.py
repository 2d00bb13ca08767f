"""Batches of which one is bad."""

from collections.abc import Sequence
from typing import Literal

from rowcast.protocol.batch import Lookups, Samples, Scheduled, ScheduledBatch
from rowcast.runtime.errors import DataError
from tests.support.driver import InProcessRun, ListSource

Where = Literal["ids", "dense"]


class BrokenSource(ListSource):
    """Finds a fault in the ids, or in the dense features, of one step."""

    def __init__(self, batches: Sequence[ScheduledBatch], step: int, where: Where) -> None:
        super().__init__(batches)
        self._fault_in = {"ids": -1, "dense": -1} | {where: step}
        self._next_dense = batches[0].step

    def poll_ids(self) -> Scheduled[Lookups] | None:
        if self._batches and self._batches[0].step == self._fault_in["ids"]:
            raise DataError("row 7 is bad")
        return super().poll_ids()

    def poll_dense(self) -> Samples | None:
        if self._next_dense == self._fault_in["dense"]:
            raise DataError("row 7 is bad")
        self._next_dense += 1
        return super().poll_dense()


def broken(run: InProcessRun, batches: Sequence[ScheduledBatch], step: int, where: Where) -> InProcessRun:
    run.prefetcher.planning._source._source = BrokenSource(batches, step, where)
    return run
