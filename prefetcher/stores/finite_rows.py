"""Finds rows that are not finite by their bits, in one pass over whole records.

NaN and infinities have every bit of the exponent set. Then adding its last bit to an element without a sign carries
into the bit of the sign. In no other element does it, and in no padding, which is zero:

    fp32    0x7F800000 + 0x00800000 = 0x80000000        infinity, the least of them
            0x7F7FFFFF + 0x00800000 = 0x7FFFFFFF        the largest finite value
"""

import numpy as np

from rowcast.job.embedding_tables import RowType
from rowcast.job.tables import ALIGNMENT, GroupSpec, aligned
from rowcast.prefetcher.stores.elements import elements_of, widened
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.runtime.arrays import U64
from rowcast.runtime.compiled import compiled_loop

WORD = 8  # bytes
# of the elements of a word: their signs, and the last bits of their exponents
BITS: dict[RowType, tuple[int, int]] = {
    "fp32": (0x8000_0000_8000_0000, 0x0080_0000_0080_0000),
    "fp16": (0x8000_8000_8000_8000, 0x0400_0400_0400_0400),
    "bf16": (0x8000_8000_8000_8000, 0x0080_0080_0080_0080),
}


class FiniteRows:
    """Looks at the records of one group: weights, master weights and optimizer state."""

    def __init__(self, group: GroupSpec) -> None:
        self._group = group
        self._signs: U64 = np.zeros(group.record_bytes // WORD, np.uint64)  # of each word of a record
        self._lasts: U64 = np.zeros_like(self._signs)
        for part in group.parts:
            words = slice(part.offset // WORD, (part.offset + aligned(part.nbytes, ALIGNMENT)) // WORD)
            self._signs[words], self._lasts[words] = BITS[part.dtype]

    def fault(self, keys: Keys, records: Records) -> str:
        """Returns what the first row that is not finite holds, as `row 7 of table users: weight[2] is nan`; "" if all
        are finite. `records`: u8 [n, record_bytes] of these keys."""
        if not carries(records.view(np.uint64), self._signs, self._lasts):
            return ""
        found: list[tuple[int, str]] = []
        for part in self._group.parts:
            values = widened(elements_of(records, part), part.dtype)
            rows, columns = np.nonzero(~np.isfinite(values))
            if len(rows):
                row, column = int(rows[0]), int(columns[0])
                found.append((row, f"{part.name}[{column}] is {values[row, column]}"))
        row, what = min(found, key=lambda own: own[0])
        return f"{self._group.row_name(int(keys[row]))}: {what}"


@compiled_loop
def carries(words: U64, signs: U64, lasts: U64) -> bool:
    """Whether any element of the records u64 [n, words of a record] carries into its sign."""
    found = np.uint64(0)
    for row in range(len(words)):
        for word in range(len(signs)):
            found |= ((words[row, word] & ~signs[word]) + lasts[word]) & signs[word]
    return bool(found != 0)
