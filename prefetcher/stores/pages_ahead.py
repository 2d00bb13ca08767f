"""Compiled loops that bring pages of a mapped file into memory before they are needed, without the GIL.

A page fault reads one page and waits for it. The kernel reads many at once if it knows them all first, so these loops
request them (`ask_for`) and then wait (`touch`). Record i of a file starts at `offset` + i * `stride`; `numbers`
ascend.
"""

import mmap

import numpy as np

from rowcast.prefetcher.stores.row_loops import Marks, Positions
from rowcast.runtime.arrays import Bytes
from rowcast.runtime.compiled import c_madvise, c_mincore, compiled_loop

PAGE, WILL_NEED = mmap.PAGESIZE, mmap.MADV_WILLNEED
LOOKED_AT = 64  # records checked before a batch is requested


def bring(file: Bytes, offset: int, stride: int, numbers: Positions) -> None:
    """Returns once the pages of these records are in memory. `file` is all of the file, mapped.

    Checks 64 of the records and does nothing if all are in memory: requesting 8,000 pages that are there costs 4 ms,
    the check 0.03 ms."""
    looked_at = numbers[:: max(1, len(numbers) // LOOKED_AT)]
    if are_there(file, offset, stride, looked_at, np.empty(1, np.uint8)):
        return
    ask_for(file, offset, stride, numbers)
    touch(file, offset, stride, numbers)


@compiled_loop
def are_there(file: Bytes, offset: int, stride: int, numbers: Positions, state: Bytes) -> bool:
    """Returns whether the kernel reports each record's first page as in memory. Overwrites `state` u8 [1]."""
    for i in range(len(numbers)):
        page = (offset + numbers[i] * stride) // PAGE * PAGE
        if c_mincore(file.ctypes.data + page, PAGE, state.ctypes.data) == 0 and state[0] & 1 == 0:
            return False
    return True


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


@compiled_loop
def present_among(marks: Marks, numbers: Positions, out: Positions) -> int:
    """Fills `out` with the rows that were written; returns how many there are."""
    found = 0
    for i in range(len(numbers)):
        out[found] = numbers[i]
        found += marks[numbers[i]] != 0
    return found
