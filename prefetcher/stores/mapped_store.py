"""Stores rows in a memory-mapped file, for tables larger than memory: the kernel caches the rows in use.

    0        header      one page: the layout, and the checkpoint that the file was closed at (table_header.py)
    4096     marks       one byte per row (row_loops.py), to the end of a page
    ...      records     of fixed stride, table after table

The file is scratch, and no checkpoint refers to it. It holds a checkpoint's rows only if it was closed at that
checkpoint, as its header then records. While it is open, and after a crash, the header marks it as worthless, and the
next process recreates it and restores. Only the header has a checksum: checking the records at a start would take as
long as restoring them. If the disk fails under the mapping, the kernel kills the process with SIGBUS.

The staging thread loads missing pages of coming steps into memory (pages_ahead.py).
"""

import mmap
from collections import deque
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, aligned
from rowcast.prefetcher.stores.pages_ahead import bring, present_among
from rowcast.prefetcher.stores.row_numbers import RowsInOrder
from rowcast.prefetcher.stores.store import Keys
from rowcast.prefetcher.stores.table_file import TableFile, table_path
from rowcast.prefetcher.stores.table_header import HEADER_BYTES, TableHeader, layout_digest, why_rebuilt
from rowcast.prefetcher.stores.table_store import TableStore
from rowcast.protocol.plan import GroupPlan
from rowcast.runtime.arrays import I64
from rowcast.runtime.machine import memory_limit
from rowcast.runtime.telemetry.logs import get_logger


def open_store(job: Job, group: GroupSpec, incarnation: int, checkpoint: str | None) -> "MappedStore":
    return MappedStore.open(group, job.job.seed, job.table_folder, incarnation=incarnation, checkpoint=checkpoint)


class MappedStore(TableStore):
    """Like MemoryStore, with the rows in `<folder>/<group>.rows`. Created by `open`."""

    works_ahead = True

    def __init__(self, group: GroupSpec, file: TableFile, header: TableHeader, *, restored: bool) -> None:
        marks_end, nbytes = file_layout(group)
        memory = file.map(nbytes)
        # in smaller files, reading ahead soon caches all rows after a restart
        if nbytes > memory_limit() // 2:
            # in larger files, it would replace rows in use by rows not requested
            memory.madvise(mmap.MADV_RANDOM, marks_end)
        self._bytes = np.frombuffer(memory, np.uint8)  # all of the file
        self._first_record = marks_end
        self._staged: deque[tuple[int, Keys, Keys]] = deque()  # step, rows to read, rows to write
        words = np.frombuffer(memory, np.uint64, group.num_rows * group.record_bytes // 8, marks_end)
        marks = np.frombuffer(memory, np.uint8, group.num_rows, HEADER_BYTES)
        super().__init__(group.name, RowsInOrder(group), words.reshape(group.num_rows, -1), marks)
        self._file = file
        self._header = header
        self._memory: mmap.mmap | None = memory  # None once it is closed
        self.restored = restored

    @classmethod
    def open(cls, group: GroupSpec, seed: int, folder: Path, *, incarnation: int, checkpoint: str | None) -> Self:
        """Holds the rows of `checkpoint` if the file was closed at it, otherwise none. Marks the file as open until it
        is closed at a checkpoint.

        `checkpoint` must identify content, not only a step; else an earlier run's rows of the same name would match.
        Raises ConfigError if another process has the file or the disk has too little space for all of it."""
        path, (_, nbytes), layout = table_path(folder, group.name), file_layout(group), layout_digest(group, seed)
        file = TableFile.open(path)
        try:
            reason = why_rows_are_lost(file, layout, checkpoint, nbytes)
            header = TableHeader(layout=layout, incarnation=incarnation, closed_at=None)
            file.begin(header, nbytes, keep=reason is None)
            get_logger().info(
                "table file", path=str(path), rows="kept" if reason is None else f"none: {reason}", nbytes=nbytes
            )
            return cls(group, file, header, restored=reason is None)
        except BaseException:
            file.close()
            raise

    def stage(self, step: int, plan: GroupPlan) -> None:
        self._staged.append((step, plan.fetch_keys, plan.evict_keys[: plan.num_dirty]))

    def advance(self, home_through: int | None) -> bool:
        """Makes the kernel read the pages of one step, unless the trainer has passed it."""
        while self._staged:
            step, fetched, victims = self._staged.popleft()
            if home_through is None or step > home_through:
                self._read_ahead(self.numbers.of(fetched), self.numbers.of(victims))
                return True
        return False

    def _read_ahead(self, fetched: I64, victims: I64) -> None:
        bring(self._bytes, HEADER_BYTES, 1, np.sort(np.concatenate([fetched, victims])))
        present = np.empty(len(fetched), np.int64)
        present = present[: present_among(self._marks, fetched, present)]
        # writing less than a page reads the page first
        touched = np.sort(np.concatenate([present, victims]))
        bring(self._bytes, self._first_record, 8 * self._words.shape[1], touched)

    def close(self, checkpoint: str | None = None) -> None:
        """Writes rows, then the header that declares them valid. A failure only costs a restore at the next start."""
        if checkpoint is not None and self._memory is not None:
            self._mark_closed(checkpoint, self._memory)
        super().close()
        self._bytes = np.empty(0, np.uint8)
        self._memory = None
        self._file.close()

    def _mark_closed(self, checkpoint: str, memory: mmap.mmap) -> None:
        try:
            memory.flush()
            self._file.sync()
            self._file.write_header(msgspec.structs.replace(self._header, closed_at=checkpoint))
        except OSError as error:
            get_logger().warning(
                "table file cannot be kept; the next start restores", path=str(self._file.path), error=str(error)
            )


def file_layout(group: GroupSpec) -> tuple[int, int]:
    marks_end = aligned(HEADER_BYTES + group.num_rows, mmap.PAGESIZE)
    return marks_end, aligned(marks_end + group.num_rows * group.record_bytes, mmap.PAGESIZE)


def why_rows_are_lost(file: TableFile, layout: str, checkpoint: str | None, nbytes: int) -> str | None:
    """Gives the reason; None if the file has the checkpoint's rows."""
    if file.nbytes == 0:
        return "a new file"
    reason = why_rebuilt(file.read_header(), layout, checkpoint)
    return f"it has {file.nbytes} of {nbytes} bytes" if reason is None and file.nbytes != nbytes else reason
