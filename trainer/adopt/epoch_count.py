"""Counts the epochs of a script's `for` loops, also for a run that continues within or right after an epoch.

checkpoint within epoch 1             | rest of 1 | 2 | 3 |
after its last batch, in the loop     | (empty)   | 2 | 3 |      the script then does its work after an epoch
after its `for` loop                  | 2 | 3 |
"""

from rowcast.runtime.checkpoint_manifest import Position


class EpochCount:
    def __init__(self) -> None:
        self.first = 0  # the first epoch of this process
        self.completed = 0  # epochs whose `for` loop has ended; a checkpoint holds it
        self._start: Position | None = None  # the checkpoint's, until the first `for` loop has found its epoch

    def begin(self, start: Position | None) -> None:
        """`start`: the position of the checkpoint that the run continues from."""
        self._start, self.first = start, 0 if start is None else start.epoch

    def next(self, following: int | None) -> int | None:
        """Returns the epoch of the next `for` loop, None if there is none; `following` is the epoch of the next
        batch."""
        return (
            self._start.epoch if self._start is not None and self._has_empty_rest(self._start, following) else following
        )

    def consume_finished(self, following: int | None) -> bool:
        """Returns whether the next `for` loop is the empty rest of the checkpoint's epoch. Only the first call can
        return True."""
        start, self._start = self._start, None
        if start is None or not self._has_empty_rest(start, following):
            return False
        self.end(start.epoch)
        return True

    def end(self, epoch: int) -> None:
        self.completed = epoch + 1

    def _has_empty_rest(self, start: Position, following: int | None) -> bool:
        has_begun = start.train_batch > 0 or start.eval_batch is not None
        return has_begun and (following is None or start.epoch < following) and self.completed <= start.epoch
