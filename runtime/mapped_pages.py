"""Asks the kernel for the pages of a mapped file that are needed next.

A page fault reads one page and waits for it. The kernel reads many at once if it knows them all first.
"""

import mmap

from rowcast.runtime.arrays import I64, Bytes
from rowcast.runtime.compiled import c_madvise, compiled_loop

PAGE, WILL_NEED = mmap.PAGESIZE, mmap.MADV_WILLNEED


@compiled_loop
def ask_for(file: Bytes, offset: int, stride: int, numbers: I64) -> None:
    """Requests the pages of these records, adjacent ones together. Waits only for room in the kernel's queue.

    Record i starts at `offset` + i * `stride`; `numbers` ascend."""
    start = file.ctypes.data
    begin, end = 0, 0  # pages requested together
    for i in range(len(numbers)):
        first = (offset + numbers[i] * stride) // PAGE
        if first > end:
            c_madvise(start + begin * PAGE, (end - begin) * PAGE, WILL_NEED)
            begin = first
        end = max(end, (offset + (numbers[i] + 1) * stride - 1) // PAGE + 1)
    c_madvise(start + begin * PAGE, (end - begin) * PAGE, WILL_NEED)
