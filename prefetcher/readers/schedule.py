"""Orders the batches of a whole run: training batches epoch by epoch, with evaluations between them.

places      Scheduled[Pending]     every batch, undecoded; the caller decodes the ones it needs
schedule    ScheduledBatch         the same, decoded
"""

from collections.abc import Generator, Iterator
from itertools import islice

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.reader import Pending, Reader, num_batches, whole_batch
from rowcast.protocol.batch import Scheduled, ScheduledBatch
from rowcast.runtime.checkpoint_manifest import Position


def schedule(
    job: Job, reader: Reader, max_steps: int | None = None, start: Position | None = None
) -> Iterator[ScheduledBatch]:
    for place in places(job, reader, max_steps, start):
        yield place.holding(whole_batch(place.batch))


def places(
    job: Job, reader: Reader, max_steps: int | None = None, start: Position | None = None
) -> Iterator[Scheduled[Pending]]:
    """Yields every batch of a run from `start` on, in order, with steps counted over the whole run.

    An evaluation follows each job.eval.every train steps and each epoch's training, once if the two coincide. Ends
    after `max_steps` train steps, counted from the run's first, and the epoch's evaluation; yields nothing for 0.
    """
    return Schedule(job, reader, max_steps).batches(start or Position())


def expected_train_steps(
    job: Job, reader: Reader, max_steps: int | None = None, start: Position | None = None
) -> int | None:
    """Counts the train steps of the whole run, also before `start`; None if the reader does not know its batches."""
    batches = num_batches(job, reader, "train")
    if batches is None:
        return None
    at = start or Position()
    steps = at.train_step + max(0, (job.data.epochs - at.epoch) * batches - at.train_batch)
    return steps if max_steps is None else min(steps, max_steps)


class Schedule:
    def __init__(self, job: Job, reader: Reader, max_steps: int | None) -> None:
        self._num_epochs, self._eval_every = job.data.epochs, job.eval.every
        self._reader, self._max_steps = reader, max_steps

    def batches(self, at: Position) -> Iterator[Scheduled[Pending]]:
        while at.epoch < self._num_epochs and not self._is_spent(at):
            at = yield from self._epoch(at)

    def _is_spent(self, at: Position) -> bool:
        """Returns whether the run ends here. No epoch starts without a train step left; a started epoch is still
        evaluated."""
        return at.train_batch == 0 and at.eval_batch is None and self._steps_left(at) == 0

    def _epoch(self, at: Position) -> Generator[Scheduled[Pending], None, Position]:
        evaluated = at.eval_batch is not None or self._eval_is_due(at)
        at = yield from self._evaluation(at)
        for decode in islice(self._reader.pending("train", at.epoch, at.train_batch), self._steps_left(at)):
            following = at.after_train()
            evaluated = self._eval_is_due(following)
            if evaluated:
                following = following.begin_eval()
            yield Scheduled(kind="train", position=at, following=following, batch=decode)
            at = yield from self._evaluation(following)
        if not evaluated:
            at = yield from self._evaluation(at.begin_eval())
        return at.next_epoch()

    def _evaluation(self, at: Position) -> Generator[Scheduled[Pending], None, Position]:
        if at.eval_batch is None:
            return at
        for decode in self._reader.pending("eval", at.epoch, at.eval_batch):
            yield Scheduled(kind="eval", position=at, following=at.after_eval(), batch=decode)
            at = at.after_eval()
        return at.end_eval()

    def _eval_is_due(self, at: Position) -> bool:
        """Returns whether job.eval.every falls on the last train step. Outside an evaluation, that one was made."""
        return self._eval_every > 0 and at.train_batch > 0 and at.train_step % self._eval_every == 0

    def _steps_left(self, at: Position) -> int | None:
        return None if self._max_steps is None else max(self._max_steps - at.train_step, 0)
