"""The planning stage: batches in, plans out, never further ahead of the trainer than its credit."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from rowcast.prefetcher.pipeline.fetcher import Fetcher, PlannedBarrier, PlannedStep
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.batch_parts import DenseBatch
from rowcast.prefetcher.readers.schedule import PlacedBatch, PlacedIds
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.runtime.position import Position


class BatchSource(Protocol):
    """Batches in step order, decoded somewhere else: their ids far ahead, the rest when they are planned."""

    @property
    def ended(self) -> bool:
        """Whether the ids of every batch were handed out."""

    def poll_ids(self) -> PlacedIds | None:
        """Those of the next batch, or None when none have been decoded yet. Raises what the reader raised."""

    def poll_dense(self) -> DenseBatch | None:
        """That of the oldest batch that has not had it yet, or None when it has not been decoded yet. Raises what the reader raised."""


class Pace(Protocol):
    """As `checkpoints.interval.PaceMeter`."""

    def steps(self, done: int, planned: int) -> int | None: ...


class PlanningStage:
    """Plans may be made up to 2 * depth + 2 steps beyond the last one that the trainer completed, so that a stop is prompt.

    Checkpoints go into the stream of plans where the planner says that one is due.
    """

    def __init__(
        self,
        source: BatchSource,
        planner: RowPlanner,
        fetcher: Fetcher,
        depth: int,
        start: Position,
        measured: list[PlacedBatch],
        counters: PrefetcherCounters,
        pace: Pace | None = None,
    ) -> None:
        """`pace`: where the time between checkpoints has yet to become a number of train steps, what finds it."""
        self.planned_through: int | None = None
        self._source = source
        self._planner = planner
        self._fetcher = fetcher
        self._ahead = 2 * depth + 2
        self._first_step = start.step
        self._position = start  # after the last plan
        self._measured = measured  # read whole to divide the capacity, before there was a planner
        self._rests: deque[DenseBatch] = (
            deque()
        )  # of measured batches that are known, and of the one to be planned next
        self._misses_rest = False
        self._counters = counters
        self.stop_reason: str | None = None
        self._ended = False
        self._barrier_sent = False
        self._pace = pace
        self._start = start
        self._followings: dict[int, Position] = {}  # after each step that was planned and may not be done
        self.on_plan: Callable[[PlannedStep], None] = lambda planned: None
        # is told the train steps between checkpoints, once
        self.on_interval: Callable[[int], None] = lambda steps: None

    @property
    def waits_for_batches(self) -> bool:
        """The next plan needs a batch that has not been decoded yet."""
        return not self._barrier_sent and (self._misses_rest or (not self._ended and self._planner.wants_batch > 0))

    @property
    def waits_for_credit(self) -> bool:
        """The next plan would be too far ahead of the trainer."""
        return not self._barrier_sent and not self._misses_rest and self._planner.ready()

    @property
    def _data_is_planned(self) -> bool:
        """Nothing is left to plan; a stop has nothing left to stop."""
        return self._ended and not self._planner.ready()

    def stop(self, reason: str, next_step: int | None = None) -> None:
        """No plan is made after the next `advance`; a barrier follows the last one. Called by the mail's thread.

        `next_step`: the trainer passes over this step and all after it, so that is where the run goes on. Raises RemoteProtocolError where
        it is none of the steps under way.
        """
        if next_step is not None:
            position = self._start if next_step == self._first_step else self._followings.get(next_step - 1)
            if position is None:
                raise RemoteProtocolError(
                    f"StopRequest: step {next_step} is none of those that are planned and not done"
                )
            self._fetcher.cut_short(position, reason)
        self.stop_reason = reason

    def advance(self) -> bool:
        if self._barrier_sent:
            return False
        if self.stop_reason is not None and not self._data_is_planned:
            return self._send_barrier(self.stop_reason, finished=False, last=True)
        return self._plan_next() or self._read_next()

    def _read_next(self) -> bool:
        """One batch enters the horizon, where the planner still needs one for its next plan."""
        if self._ended or not self._planner.wants_batch:
            return False
        ids = self._next_measured() if self._measured else self._source.poll_ids()
        if ids is not None:
            with self._counters.timed("read", ids.step):
                self._planner.add(ids)
        elif self._source.ended:
            self._planner.end()
            self._ended = True
        else:
            return False
        return True

    def _next_measured(self) -> PlacedIds:
        ids, rest = self._measured.pop(0).divided()
        self._rests.append(rest)
        return ids

    def _has_rest(self) -> bool:
        """Whether the rest of the batch to be planned next is here."""
        if not self._rests:
            rest = self._source.poll_dense()
            self._rests.extend([] if rest is None else [rest])
        self._misses_rest = not self._rests
        return not self._misses_rest

    def _plan_next(self) -> bool:
        if not self._planner.ready():
            return self._data_is_planned and self._send_barrier("end of data", finished=True, last=True)
        if self._planner.checkpoint_due:
            return self._send_barrier("checkpoint", finished=False, last=False)
        step = self._first_step if self.planned_through is None else self.planned_through + 1
        done = self._first_step - 1 if self._fetcher.done_through is None else self._fetcher.done_through
        self._find_interval(done)
        if step > done + self._ahead or not self._has_rest():
            return False
        with self._counters.timed("plan", step):
            ids, plan = self._planner.plan()
        crash_point("plan made")
        assert isinstance(ids, PlacedIds), "the planner returns what it was given"
        batch = ids.with_dense(self._rests.popleft())
        planned = PlannedStep(batch=batch, plan=plan)
        self._counters.planned(plan, batch.batch.size)
        self.on_plan(planned)
        self._fetcher.push(planned)
        self.planned_through = step
        self._position = self._followings[step] = batch.following
        self._followings.pop(step - self._ahead - 1, None)
        return True

    def _find_interval(self, done: int) -> None:
        """Before a plan is made: the planner hears of it between two plans."""
        steps = None if self._pace is None else self._pace.steps(done - self._first_step + 1, self._position.train_step)
        if steps is not None:
            self._pace = None
            self.on_interval(steps)
            self._planner.checkpoint_every = steps

    def _send_barrier(self, reason: str, *, finished: bool, last: bool) -> bool:
        self._fetcher.push(
            PlannedBarrier(plan=self._planner.barrier(reason, finished), position=self._position, last=last)
        )
        self._barrier_sent = last
        return True
