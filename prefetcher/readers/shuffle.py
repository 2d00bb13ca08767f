"""Shuffles rows reproducibly with numpy's Philox, keyed by seed, epoch and block."""

import numpy as np

from rowcast.prefetcher.readers.columns import Ids
from rowcast.prefetcher.readers.data_files import FileSpan
from rowcast.prefetcher.readers.hot_samples import HotSamples

UNSHUFFLED_ROWS = 65536  # in a block of an order without a shuffle


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

    @property
    def block_rows(self) -> int:
        return UNSHUFFLED_ROWS if self._window is None else self._window

    def block(self, block: int) -> Ids:
        """Returns the rows of a block of `block_rows`, in order, without keeping them."""
        first = block * self.block_rows
        num_rows = min(self.block_rows, self._num_rows - first)
        if self._window is None:
            return np.arange(first, first + num_rows, dtype=np.int64)
        return first + block_permutation(self._seed, self._epoch, block, num_rows)

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


class HotBlocks:
    """The order of one epoch's rows with alternating runs of hot and cold samples.

        order    h c c h c h c c c h c c     2 blocks:  h h | c c c c | h h | c c c c

    Both kinds keep their order in `order`. The order is a function of the row's number: the counts of each kind before
    each block of `order` give the position of a run.
    """

    def __init__(self, order: RowOrder, hot: HotSamples, num_blocks: int) -> None:
        self._order, self._hot = order, hot
        block_rows, num_rows = order.block_rows, hot.num_rows
        sizes = np.diff(np.minimum(np.arange(-(-num_rows // block_rows) + 1) * block_rows, num_rows))
        counts = hot.counts(block_rows)
        # samples of each kind, hot and cold, before each block, and in total
        self._before = [np.concatenate([[0], np.cumsum(own)]) for own in (counts, sizes - counts)]
        bounds = [own[-1] * np.arange(num_blocks + 1) // num_blocks for own in self._before]
        self._firsts = np.stack([own[:-1] for own in bounds], axis=1).ravel()  # of each run, among samples of its kind
        self._starts = np.concatenate([[0], np.cumsum(np.stack([np.diff(own) for own in bounds], axis=1).ravel())])
        self._last: tuple[int, tuple[Ids, Ids]] | None = None

    def rows(self, start: int, stop: int) -> Ids:
        first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
        parts = []
        for run in range(int(first), int(last) + 1):
            begin, end = max(start, int(self._starts[run])), min(stop, int(self._starts[run + 1]))
            if begin < end:
                moved = int(self._firsts[run] - self._starts[run])
                parts += self._of_kind(run % 2, begin + moved, end + moved)
        return np.concatenate(parts)

    def within(self, start: int, stop: int) -> FileSpan:
        """Returns the span of all rows: a block's samples are anywhere, and only formats that can read any row have
        blocks."""
        return FileSpan(start=0, stop=self._hot.num_rows)

    def _of_kind(self, kind: int, start: int, stop: int) -> list[Ids]:
        """Returns the samples `start` to `stop` of a kind, counted over the epoch; kind 0 is hot, 1 is cold."""
        before = self._before[kind]
        first, last = np.searchsorted(before, [start, stop - 1], side="right") - 1
        blocks = range(int(first), int(last) + 1)
        return [self._split(block)[kind][max(start - before[block], 0) : stop - before[block]] for block in blocks]

    def _split(self, block: int) -> tuple[Ids, Ids]:
        # the last block is kept, because consecutive batches share it
        if self._last is None or self._last[0] != block:
            rows = self._order.block(block)
            first = block * self._order.block_rows
            are_hot = self._hot.are_hot(first, first + len(rows))[rows - first]
            self._last = block, (rows[are_hot], rows[~are_hot])
        return self._last[1]
