"""Which epoch the next `for` is, for every place at which a checkpoint may stand."""

import pytest

from rowcast.runtime.checkpoint_manifest import Position
from rowcast.trainer.adopt.connect.script_state import EpochCount


@pytest.mark.parametrize(
    ("start", "over", "following", "to_come", "is_empty"),
    [
        (None, 0, 0, 0, False),
        (None, 0, None, None, False),
        (Position(step=6, train_step=6, epoch=1, train_batch=2), 1, 1, 1, False),
        (Position(step=8, train_step=8, epoch=1, train_batch=4), 1, 2, 1, True),
        (Position(step=8, train_step=8, epoch=1, train_batch=4), 2, 2, 2, False),
        (Position(step=12, train_step=12, epoch=2, train_batch=4), 2, None, 2, True),
        (Position(step=12, train_step=12, epoch=2, train_batch=4), 3, None, None, False),
        (Position(step=10, train_step=8, epoch=1, train_batch=4, eval_batch=2), 1, 2, 1, True),
        (Position(step=9, train_step=8, epoch=1, train_batch=4, eval_batch=1), 1, 1, 1, False),
        (Position(step=50, train_step=50), 3, 0, 0, False),  # another run's model, at the beginning of other data
    ],
)
def test_the_next_epoch_is_known(
    start: Position | None, over: int, following: int | None, to_come: int | None, is_empty: bool
) -> None:
    epochs = EpochCount()
    epochs.completed = over
    epochs.begin(start)
    assert epochs.next(following) == to_come
    assert epochs.consume_finished(following) == is_empty
    assert epochs.next(following) == following, "an empty rest comes once"
    assert epochs.first == (0 if start is None else start.epoch)
