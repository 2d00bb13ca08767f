"""Reads rows back from the stores, block by block and without waiting, to check that they kept what was written."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from rowcast.job.tables import KEY_SHIFT, GroupSpec
from rowcast.prefetcher.stores.store import Records, Ticket
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.runtime.arrays import I64

BLOCK_ROWS = 4096


@dataclass(slots=True)
class ReadBackBlock:
    group: int
    keys: I64  # ascending
    rows: Records | None = None
    ticket: Ticket | None = None  # once its read has begun


class ReadBack:
    """The fetcher's thread calls it, at a barrier."""

    def __init__(self, groups: tuple[GroupSpec, ...], stores: tuple[TrackedStore, ...]) -> None:
        self._stores = stores
        self._record_bytes = [group.record_bytes for group in groups]
        by_table = {table.index: group.index for group in groups for table in group.tables}
        self._group_of = np.array([by_table[table] for table in range(len(by_table))], np.int64)
        self._blocks: deque[ReadBackBlock] = deque()

    @property
    def active(self) -> bool:
        return bool(self._blocks)

    def begin(self, keys: I64) -> None:
        """`keys`: ascending, of any tables."""
        groups = self._group_of[keys >> KEY_SHIFT]
        for group in range(len(self._stores)):
            own = keys[groups == group]
            self._blocks.extend(
                ReadBackBlock(group, own[start : start + BLOCK_ROWS]) for start in range(0, len(own), BLOCK_ROWS)
            )

    def advance(self) -> tuple[int, I64, Records] | None:
        """Returns a group, some of its keys and their rows; None: the store is not done."""
        block = self._blocks[0]
        if block.ticket is None or block.rows is None:
            block.rows = np.empty((len(block.keys), self._record_bytes[block.group]), np.uint8)
            block.ticket = self._stores[block.group].read(block.keys, block.rows)
        if not block.ticket.done():
            return None
        self._blocks.popleft()
        return block.group, block.keys, block.rows
