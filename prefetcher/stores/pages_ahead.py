"""Compiled loops that bring pages of a mapped file into memory before they are needed, without the GIL.

A page fault reads one page and waits for it. The kernel reads many at once if it knows them all first, so these loops
request them (`ask_for`) and then wait (`touch`). Record i of a file starts at `offset` + i * `stride`; `numbers`
ascend.
"""

import mmap

from rowcast.prefetcher.stores.row_loops import Positions
from rowcast.runtime.arrays import Bytes
from rowcast.runtime.compiled import c_madvise, compiled_loop

PAGE, WILL_NEED = mmap.PAGESIZE, mmap.MADV_WILLNEED


@compiled_loop
def ask_for(file: Bytes, offset: int, stride: int, numbers: Positions) -> None:
    """Requests the pages of these records, adjacent ones together. Waits only for room in the kernel's queue."""
    start = file.ctypes.data
    begin, end = 0, 0  # pages requested together
    for i in range(len(numbers)):
        first = (offset + numbers[i] * stride) // PAGE
        if first > end:
            c_madvise(start + begin * PAGE, (end - begin) * PAGE, WILL_NEED)
            begin = first
        end = max(end, (offset + (numbers[i] + 1) * stride - 1) // PAGE + 1)
    c_madvise(start + begin * PAGE, (end - begin) * PAGE, WILL_NEED)


@compiled_loop
def touch(file: Bytes, offset: int, stride: int, numbers: Positions) -> int:
    """Waits for these records' pages and maps them. The result is meaningless; it keeps the compiler from dropping the
    reads."""
    found = 0
    for i in range(len(numbers)):
        begin = offset + numbers[i] * stride
        for at in range(begin, begin + stride, PAGE):
            found += file[at]
        found += file[begin + stride - 1]
    return found
