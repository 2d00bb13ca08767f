"""The planning stage: turns batches into plans, at most a fixed number of steps ahead of the trainer."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from rowcast.prefetcher.pipeline.barrier import PrefetcherBarrier
from rowcast.prefetcher.pipeline.batch_checksums import BatchChecksums
from rowcast.prefetcher.pipeline.fetcher import Fetcher, PlannedBarrier, PlanStream
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.source import Source
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.batch import Cut, Samples
from rowcast.protocol.messages import StopRequest, Welcome
from rowcast.protocol.parts import Belonging, arrays_of_samples, batch_specs, check_same, samples_of
from rowcast.protocol.plan import StepPlan, pack
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import RemoteProtocolError, RowcastError
from rowcast.runtime.telemetry.logs import get_logger


class Pace(Protocol):
    """See `checkpoints.interval.PaceMeter`."""

    def steps(self, done: int, planned: int) -> int | None: ...

    def must_wait(self, planned: int) -> bool:
        """Returns whether planning must wait for the interval after `planned` steps of this attempt."""


def plans_ahead(depth: int) -> int:
    """Returns how many steps plans may be beyond the last completed one."""
    return 2 * depth + 2


class PlanningStage:
    """Makes plans up to 2 * depth + 2 steps beyond the last completed one, so that a stop is prompt. Announces each to
    the stores.

    Adds a barrier to the plan stream wherever the planner says that a checkpoint is due. A *fault*, an error of the
    reader, ends the stream with a barrier where its batch would be.
    """

    def __init__(
        self,
        *,
        source: Source,
        planner: RowPlanner,
        stores: tuple[TrackedStore, ...],
        plans: PlanStream,
        fetcher: Fetcher,
        barrier: PrefetcherBarrier,
        welcome: Welcome,
        belonging: Belonging,
        counters: PrefetcherCounters,
    ) -> None:
        self.planned_through: int | None = None
        self._source = source
        self._planner = planner
        planner.evaluating = welcome.start.eval_batch is not None
        self._stores = stores
        self._plans = plans
        self._fetcher = fetcher
        self._barrier = barrier
        self._ahead = plans_ahead(welcome.depth)
        self._start = welcome.start
        self._position = welcome.start  # after the last plan
        self.checksums = BatchChecksums(welcome.depth)
        self._samples: deque[Samples] = deque()  # of the batch to be planned next, and of the one after it
        self._misses_dense = False
        self._counters = counters
        self.stop_reason: str | None = None
        self._last_step: int | None = None  # of a stop, if ranks have agreed on one
        self._ended = False
        self._fault: RowcastError | None = None  # ends the run after the last plan
        self._dense_ended = False  # the fault is in the dense part that follows `_samples`
        self._barrier_sent = False
        self.pace: Pace | None = None  # converts a time between checkpoints into train steps
        self._belonging, self._announced = belonging, welcome.inputs
        self._cuts: deque[Cut] = deque()  # this rank's entries in the arrays of each batch in the horizon
        # of each step that is planned and may not be done, and of the one before the first
        self._position_after: dict[int, Position] = {welcome.start.step - 1: welcome.start}
        self.on_plan: Callable[[StepPlan], None] = lambda plan: None
        # called once, with the train steps between checkpoints
        self.on_interval: Callable[[int], None] = lambda steps: None

    @property
    def waits_for_batches(self) -> bool:
        return not self._barrier_sent and (self._misses_dense or (not self._ended and self._planner.wants_batch > 0))

    @property
    def waits_for_credit(self) -> bool:
        return not self._barrier_sent and not self._misses_dense and self._planner.ready()

    @property
    def _data_is_planned(self) -> bool:
        """Whether all data is planned, so that a stop would change nothing."""
        return (self._dense_ended and not self._samples) or (self._ended and not self._planner.ready())

    def stop(self, request: StopRequest) -> None:
        """Makes no plan after the next turn, and a barrier after the last plan. The mail's thread calls it.

        With a `next_step` the run continues there, and with an `after_step` plans continue to that one. Raises
        RemoteProtocolError unless the first is in progress, or if one after the second is planned.
        """
        next_step, after_step = request.next_step, request.after_step
        if after_step is not None and after_step < (self.planned_through or 0):
            raise RemoteProtocolError(
                f"StopRequest: the last step is to be {after_step}, but step {self.planned_through} is planned"
            )
        self._last_step = after_step
        if next_step is not None:
            position = self._position_after.get(next_step - 1)
            if position is None:
                raise RemoteProtocolError(
                    f"StopRequest: step {next_step} is not among the steps that are planned and not done"
                )
            self._barrier.cut_short(position, request)
        self.stop_reason = request.reason

    def read_ids_ahead(self) -> bool:
        """Adds one batch's ids to the horizon if the planner needs them for its next plan."""
        if self._barrier_sent or self._ended or not self._planner.wants_batch:
            return False
        try:
            ids = self._source.poll_ids()
        except RowcastError as fault:
            self._note(fault)
            return self._end("a fault")
        if ids is not None:
            with self._counters.timed("read", ids.step):
                self.checksums.add_ids(ids)
                self._planner.add(ids)
                samples = samples_of(ids.batch.size, self._planner.rank)
                self._cuts.append(arrays_of_samples(ids.batch, samples, self._belonging))
            return True
        return self._source.ended and self._end("the end")

    @property
    def _next_step(self) -> int:
        return self._start.step if self.planned_through is None else self.planned_through + 1

    def _end(self, how: str) -> bool:
        self.checksums.end(how)
        self._planner.end()
        self._ended = True
        return True

    def _note(self, fault: RowcastError) -> None:
        self._fault = fault
        get_logger().warning("training will end at a fault", train_step=self._position.train_step, fault=str(fault))

    def _has_dense(self) -> bool:
        """Whether the next plan's batch and the one after it have their dense parts, as far as there are any."""
        wanted = min(2, self._planner.num_known)
        while len(self._samples) < wanted and not self._dense_ended:
            dense = self._poll_dense()
            if dense is None:
                break
            self.checksums.add_dense(dense)
            self._samples.append(dense)
        self._misses_dense = len(self._samples) < wanted and not self._dense_ended
        return bool(self._samples) and not self._misses_dense

    def _poll_dense(self) -> Samples | None:
        try:
            dense = self._source.poll_dense()
            if dense is not None:
                found = batch_specs(dense, self._belonging.arrays)
                if found != self._announced:
                    check_same(found, self._announced, f"the batch of step {self._next_step + len(self._samples)}")
            return dense
        except RowcastError as fault:
            self._note(fault)
            self._dense_ended = True
            return None

    def plan_next(self) -> bool:
        if self._barrier_sent:
            return False
        if self.stop_reason is not None and self._last_step is None and not self._data_is_planned:
            return self._send_barrier(self.stop_reason, last=True)
        if self._data_is_planned:
            return self._send_end()
        if not self._planner.ready():
            return False
        # only here, where every rank knows whether the data has ended as well
        if self.stop_reason is not None and self.planned_through == self._last_step is not None:
            return self._send_barrier(self.stop_reason, last=True)
        if self._planner.checkpoint_due:
            return self._send_barrier("checkpoint", last=False)
        step = self._next_step
        done = self._start.step - 1 if self._fetcher.done_through is None else self._fetcher.done_through
        self._find_interval(done)
        if self.pace is not None and self.pace.must_wait(step - self._start.step):
            return False
        if step > done + self._ahead or not self._has_dense():
            return False
        with self._counters.timed("plan", step):
            following = self._planner.known.next.following
            plan = self._planner.plan()
            for store, group in zip(self._stores, plan.groups, strict=True):
                store.store.stage(step, group)
        crash_point("plan made")
        samples = self._samples.popleft().within(self._cuts.popleft())
        self._counters.planned(plan, len(samples.labels))
        self.on_plan(plan)
        self._plans.append(pack(samples, plan, self.checksums.planned()))
        self.planned_through = step
        self._position = self._position_after[step] = following
        self._position_after.pop(step - self._ahead - 1, None)
        return True

    def _find_interval(self, done: int) -> None:
        # called before a plan is made, so that the interval changes between two plans
        steps = None if self.pace is None else self.pace.steps(done - self._start.step + 1, self._position.train_step)
        if steps is not None:
            self.pace = None
            self.on_interval(steps)
            self._planner.checkpoint_every = steps

    def _send_end(self) -> bool:
        if self._fault is None:
            return self._send_barrier("end of data", finished=True, last=True)
        return self._send_barrier("a fault in the data", last=True)

    def _send_barrier(self, reason: str, *, finished: bool = False, last: bool) -> bool:
        evaluated = self._planner.evaluated
        if evaluated:
            self._position = self._position_after[self._next_step - 1] = self._planner.known.next.position
        barrier = PlannedBarrier(
            plan=self._planner.barrier(reason, finished),
            position=self._position,
            last=last,
            ahead=self.checksums.ahead,
            fault=self._fault if self._data_is_planned else None,
            evaluated=evaluated or finished,
        )
        self._plans.append(barrier)
        self._barrier_sent = last
        return True
