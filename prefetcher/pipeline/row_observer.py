"""Defines an observer of rows between store and trainer; `--verify` is one (`rowcast.prefetcher.verify`)."""

from typing import Any

import numpy.typing as npt

from rowcast.prefetcher.stores.store import Records
from rowcast.protocol.messages import RowChecksums
from rowcast.protocol.plan import BarrierPlan, StepPlan

SlotArrays = dict[str, npt.NDArray[Any]]  # i32 by name, for the plan's or barrier's block


class RowObserver:
    """Called in every run. This base class does nothing."""

    # the fetcher's thread

    def open_plan(self, plan: StepPlan) -> SlotArrays:
        """Returns the slots whose checksums the trainer must report. Called before the plan is sent."""
        return {}

    def open_barrier(self, barrier: BarrierPlan) -> SlotArrays:
        """As `open_plan`, of a barrier."""
        return {}

    def rows_read(self, step: int, group: int, start: int, rows: Records) -> None:
        """Checks rows of a plan's fetch, from `start` on, as the store returned them. Raises DataError if they differ
        from the last written ones."""

    def plan_read(self, step: int) -> None:
        """All of a plan's rows are read, and its last piece is not announced yet."""

    @property
    def must_read_back(self) -> bool:
        """Whether rows were written and not read since. Read at a barrier with all rows home."""
        return False

    def read_back(self, step: int | None) -> bool:
        """Reads some of them without waiting. Returns whether any arrived. Raises DataError if they differ."""
        return False

    # the write-back's thread

    def rows_home(self, step: int | None, barrier: int | None, group: int, start: int, rows: Records) -> None:
        """Checks dirty rows, from `start` on, before they are written. Raises DataError if the slots held other
        rows."""

    # the mail's thread

    def reported(self, message: RowChecksums) -> None:
        """Checks checksums of slots. Raises DataError if the slots held other rows than expected."""
