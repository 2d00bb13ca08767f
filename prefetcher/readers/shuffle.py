"""Shuffles rows in an order that can be replayed: numpy's Philox, keyed by seed, epoch and block."""

import numpy as np

from rowcast.prefetcher.readers.columns import Ids
from rowcast.prefetcher.readers.data_files import FileSpan


def block_permutation(seed: int, epoch: int, block: int, num_rows: int) -> Ids:
    """Returns i64 [num_rows]: row i of the shuffled block is row permutation[i] of the block."""
    key = np.array([seed, epoch * 2**32 + block], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(num_rows).astype(np.int64, copy=False)


class RowOrder:
    """The order of one epoch's rows; each block of `window` rows is permuted by itself."""

    def __init__(self, *, seed: int, epoch: int, num_rows: int, window: int | None) -> None:
        """`window` None keeps the order; 0 makes one block of all rows."""
        self._seed, self._epoch = seed, epoch
        self._num_rows = num_rows
        self._window = max(num_rows, 1) if window == 0 else window
        self._last: tuple[int, Ids] | None = None

    def rows(self, start: int, stop: int) -> Ids:
        if self._window is None:
            return np.arange(start, stop, dtype=np.int64)
        parts = []
        for block in self._blocks(start, stop):
            first = block * self._window
            parts.append(first + self._permutation(block)[max(start - first, 0) : stop - first])
        return np.concatenate(parts)

    def within(self, start: int, stop: int) -> FileSpan:
        """Returns the span of these rows, or of the whole blocks that they come from."""
        if self._window is None:
            return FileSpan(start=start, stop=stop)
        blocks = self._blocks(start, stop)
        return FileSpan(
            start=blocks[0] * self._window, stop=min(blocks[-1] * self._window + self._window, self._num_rows)
        )

    def _blocks(self, start: int, stop: int) -> range:
        assert self._window is not None, "only an order with a window has blocks"
        return range(start // self._window, (stop - 1) // self._window + 1)

    def _permutation(self, block: int) -> Ids:
        # the last block is kept, because consecutive batches share it
        if self._last is None or self._last[0] != block:
            assert self._window is not None, "only an order with a window has blocks"
            num_rows = min(self._window, self._num_rows - block * self._window)
            self._last = block, block_permutation(self._seed, self._epoch, block, num_rows)
        return self._last[1]
