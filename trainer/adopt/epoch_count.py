"""Which epoch the next `for` over the loader is, where a run goes on in the middle of one or behind its last batch.

checkpoint within epoch 1            | rest of 1 | 2 | 3 |
behind its last batch, in the loop   | (empty)   | 2 | 3 |      so that the script does what it does behind an epoch
behind its `for`                     | 2 | 3 |
"""

from rowcast.runtime.position import Position


class EpochCount:
    def __init__(self) -> None:
        self.first = 0  # of this process
        self.over = 0  # epochs whose `for` has ended; a checkpoint holds it
        self._start: Position | None = None  # of the checkpoint, until the first `for` has found its epoch

    def begin(self, start: Position | None) -> None:
        """`start`: of the checkpoint that the run goes on from."""
        self._start, self.first = start, 0 if start is None else start.epoch

    def next(self, following: int | None) -> int | None:
        """The epoch of the next `for`, where `following` is the epoch of the next batch; None: there is none."""
        return (
            self._start.epoch if self._start is not None and self._has_empty_rest(self._start, following) else following
        )

    def consume_finished(self, following: int | None) -> bool:
        """Whether the next `for` is the rest of the checkpoint's epoch, and empty. Once it was asked, never again."""
        start, self._start = self._start, None
        if start is None or not self._has_empty_rest(start, following):
            return False
        self.end(start.epoch)
        return True

    def end(self, epoch: int) -> None:
        """The `for` over it has ended."""
        self.over = epoch + 1

    def _has_empty_rest(self, start: Position, following: int | None) -> bool:
        has_begun = start.train_batch > 0 or start.eval_batch is not None
        return has_begun and (following is None or start.epoch < following) and self.over <= start.epoch
