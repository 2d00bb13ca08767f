"""Keeps rows in this process's memory, allocated on first write."""

import numpy as np

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.row_numbers import RowsInOrder, physical_memory_bytes
from rowcast.prefetcher.stores.store import RowNumbers
from rowcast.prefetcher.stores.table_store import TableStore
from rowcast.prefetcher.stores.touched_rows import TouchedRows, reserved
from rowcast.runtime.errors import ConfigError

# Rows of a group up to this size are stored in key order, which is faster to read. In a larger group they are stored in
# order of first write: otherwise, if few rows are trained, each would take a separate page.
IN_ORDER_BYTES = 2**30


def open_store(job: Job, group: GroupSpec, incarnation: int, checkpoint: str | None) -> "MemoryStore":
    return MemoryStore(group)


class MemoryStore(TableStore):
    """All tables of a group in one lazily committed array. Nothing outlives the process."""

    def __init__(self, group: GroupSpec) -> None:
        nbytes, width = group.num_rows * group.record_bytes, group.record_bytes // 8
        try:
            numbers: RowNumbers = (
                RowsInOrder(group)
                if nbytes <= IN_ORDER_BYTES
                else TouchedRows(group, min(group.num_rows, physical_memory_bytes() // group.record_bytes))
            )
            from_one_end = isinstance(numbers, TouchedRows)
            words = reserved(numbers.most * width, huge_pages=from_one_end).reshape(numbers.most, width)
            marks = reserved(-(-numbers.most // 8), huge_pages=from_one_end).view(np.uint8)[: numbers.most]
        except MemoryError:
            raise ConfigError(
                f"tables of group {group.name} need {nbytes / 2**30:.1f} GiB of addresses, more than this process may "
                "reserve; allow it more (ulimit -v, vm.overcommit_memory), or use fewer rows"
            ) from None
        super().__init__(group.name, numbers, words, marks)
