"""Stores rows in this process's memory, which a row takes only once it was trained."""

import mmap

import numpy as np

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.row_loops import Words
from rowcast.prefetcher.stores.table_store import TableStore
from rowcast.runtime.errors import ConfigError


def open_store(job: Job, group: GroupSpec, incarnation: int, checkpoint: str | None) -> "MemoryStore":
    return MemoryStore(group)


def lazy_array(num_rows: int, num_words: int) -> Words:
    """Returns u64 [num_rows, num_words] of zeros that take memory page by page as they are written. Raises MemoryError.

    numpy would ask for huge pages: the first write of a row would clear 2 MiB, and a sparse table take all its memory.
    """
    try:
        memory = mmap.mmap(-1, max(1, num_rows * num_words * 8))
    except (OSError, OverflowError, ValueError):
        raise MemoryError from None
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint64, num_rows * num_words).reshape(num_rows, num_words)


class MemoryStore(TableStore):
    """All tables of a group in one lazily committed array. Nothing outlives the process."""

    def __init__(self, group: GroupSpec) -> None:
        try:
            words, marks = lazy_array(group.num_rows, group.record_bytes // 8), np.zeros(group.num_rows, np.uint8)
        except MemoryError:
            raise ConfigError(
                f"tables of group {group.name} need {group.num_rows * group.record_bytes / 2**30:.1f} GiB, more than "
                "this machine can address; use fewer rows or a smaller embedding_dim"
            ) from None
        super().__init__(group, words, marks)
