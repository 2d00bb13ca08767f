"""The planning stage: turns batches into plans, at most a fixed number of plans ahead of the trainer."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rowcast.job.schema import plans_ahead
from rowcast.prefetcher.pipeline.barrier import PrefetcherBarrier
from rowcast.prefetcher.pipeline.batch_checksums import BatchChecksums
from rowcast.prefetcher.pipeline.fetcher import Fetcher, PlannedBarrier, PlanStream
from rowcast.prefetcher.pipeline.key_exchange import NOT_KNOWN, KeyExchange
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.source import RankSource
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.batch import Samples, Scheduled
from rowcast.protocol.messages import StopRequest, Welcome
from rowcast.protocol.parts import batch_specs, check_same
from rowcast.protocol.plan import PlannedSteps, pack
from rowcast.runtime.checkpoint_manifest import BatchChecksum, Position
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import RemoteProtocolError, RowcastError
from rowcast.runtime.telemetry.logs import get_logger


class CheckpointClock:
    """Reports when `seconds` have passed since its last report, or since the start."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock, self._last_s = seconds, clock, clock()

    def is_due(self) -> bool:
        is_due = self._clock() - self._last_s >= self._seconds
        self._last_s = self._clock() if is_due else self._last_s
        return is_due


class DueBarrier(NamedTuple):
    reason: str
    last: bool  # nothing follows it
    finished: bool = False  # all data is planned
    after_samples: bool = False  # every rank must have its samples of the next step


class BarriersDue:
    """Decides what follows the last plan: one more, or the barrier of a stop, a fault, a checkpoint or the end.

    A *fault*, an error of any rank's reader, ends the stream with a barrier where its batch would be.
    """

    def __init__(self, planner: RowPlanner, keys: KeyExchange, barrier: PrefetcherBarrier, start: Position) -> None:
        self.planned_through: int | None = None
        self.position = start  # after the last plan
        self.stop_reason: str | None = None
        self.last_is_sent = False
        self.data_ended = False
        self.clock = CheckpointClock(math.inf)  # that of rank 0 names checkpoints for all ranks
        self._planner, self._keys, self._barrier = planner, keys, barrier
        self._last_step: int | None = None  # of a stop, if ranks have agreed on one
        # of each step that is planned and may not be done, and of the one before the first
        self._position_after: dict[int, Position] = {start.step - 1: start}
        self._first_step, self._start = start.step, start
        self._done_step = start.step - 1

    @property
    def next_step(self) -> int:
        return self._first_step if self.planned_through is None else self.planned_through + 1

    @property
    def step_after(self) -> int:
        """The first step that no plan may have: it has a fault, or follows the last step of a stop."""
        return min(self._keys.fault_step, NOT_KNOWN if self._last_step is None else self._last_step + 1)

    @property
    def data_is_planned(self) -> bool:
        """Whether all data is planned, so that a stop would change nothing."""
        return self.next_step >= self._keys.fault_step or (self.data_ended and not self._planner.ready())

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

    def due(self) -> DueBarrier | None:
        if self.data_is_planned:
            if self._keys.fault is None:
                return DueBarrier("end of data", last=True, finished=True)
            return DueBarrier("a fault in the data", last=True)
        if self.stop_reason is not None and self._last_step is None:
            return DueBarrier(self.stop_reason, last=True)
        if self._keys.checkpoint_step == NOT_KNOWN and self._planner.may_save and self.clock.is_due():
            self._keys.name_checkpoint()
        if self._planner.reaches(self._keys.checkpoint_step, self.next_step):
            return DueBarrier("checkpoint", last=False)
        if not self._planner.ready():
            return None
        # only here does every rank know whether the data has ended too, and that no rank finds a fault there
        if self.stop_reason is not None and self.planned_through == self._last_step is not None:
            return DueBarrier(self.stop_reason, last=True, after_samples=True)
        return DueBarrier("checkpoint", last=False) if self._planner.checkpoint_due else None

    def done(self, step: int) -> None:
        """`step`: the last one that is done."""
        for earlier in range(self._done_step, step):
            self._position_after.pop(earlier)
        self._done_step = step

    def position_after(self, done: int | None) -> Position:
        """`done`: the last step that is done."""
        return self._position_after.get(self._done_step if done is None else done, self._start)

    def planned(self, steps: Sequence[Scheduled[Any]]) -> None:
        for scheduled in steps:
            self.position = self._position_after[scheduled.step] = scheduled.following
        self.planned_through = steps[-1].step

    def send(self, due: DueBarrier, ahead: tuple[BatchChecksum, ...]) -> PlannedBarrier:
        """`ahead`: of the known batches that no plan has."""
        evaluated = self._planner.evaluated
        if evaluated:
            self.position = self._position_after[self.next_step - 1] = self._planner.known.next.first.position
        self.last_is_sent = due.last
        if self._planner.reaches(self._keys.checkpoint_step, self.next_step):
            self._keys.checkpoint_steps.popleft()
        if due.last:
            self._keys.stop_waiting()
        return PlannedBarrier(
            plan=self._planner.barrier(due.reason, due.finished),
            position=self.position,
            last=due.last,
            ahead=ahead,
            fault=self._keys.fault if self.data_is_planned else None,
            evaluated=evaluated or due.finished,
        )


class PlanningStage:
    """Makes up to 2 * depth + 2 plans beyond the last completed one, so that a stop is prompt. Announces each to
    the stores. `due` says when a barrier follows instead."""

    def __init__(
        self,
        *,
        source: RankSource,
        planner: RowPlanner,
        stores: tuple[TrackedStore, ...],
        plans: PlanStream,
        fetcher: Fetcher,
        barrier: PrefetcherBarrier,
        welcome: Welcome,
        counters: PrefetcherCounters,
    ) -> None:
        start = welcome.start
        self.keys = KeyExchange(planner, start.step)
        self.due = BarriersDue(planner, self.keys, barrier, start)
        self.checksums = BatchChecksums(planner.rank, source.belonging)
        self.on_plan: Callable[[PlannedSteps], None] = lambda plan: None
        planner.evaluating = start.eval_batch is not None
        self._source, self._planner, self._stores = source, planner, stores
        self._plans, self._fetcher, self._counters = plans, fetcher, counters
        self._first_step = start.step
        self._ahead = plans_ahead(welcome.depth)
        self._inputs = welcome.inputs
        self._samples: deque[Samples] = deque()  # of the batch to be planned next, and of some after it
        self._misses_dense = False

    @property
    def waits_for_batches(self) -> bool:
        wants_ids = not self.due.data_ended and self._planner.wants_batch > 0
        return not self.due.last_is_sent and (self._misses_dense or wants_ids)

    @property
    def waits_for_data(self) -> bool:
        """Whether every batch of the files that have arrived is read, and the next plan needs one of another."""
        return self.waits_for_batches and self._source.awaits_file

    @property
    def waits_for_credit(self) -> bool:
        return not self.due.last_is_sent and not self._misses_dense and self._planner.ready()

    def read_ids_ahead(self) -> bool:
        """Reads one batch's ids, or adds a batch that is complete to the horizon, if plans need them."""
        arrived = self.keys.advance()
        if self.due.last_is_sent:
            # ranks with a longer horizon have plans to make for which they need more lists
            return (self.keys.has_others and self._read_ids()) or arrived
        return self._add_complete() or self._read_ids() or arrived

    def _add_complete(self) -> bool:
        if self.due.data_ended or self.due.last_is_sent or not self._planner.wants_batch:
            return False
        complete = self.keys.take()
        if complete is not None:
            self._planner.add(*complete)
            return True
        if self.keys.ended:
            self._planner.end()
            self.due.data_ended = True
        return self.due.data_ended

    def _read_ids(self) -> bool:
        if not self.keys.wants_batch:
            return False
        try:
            ids = self._source.poll_ids()
        except RowcastError as fault:
            self._note(self.keys.next_step, fault)
            return True
        if ids is not None:
            with self._counters.timed("read", ids.step):
                parts = self._planner.own_parts(ids.batch)
                self.checksums.add_ids(ids, parts)
                sources = self._planner.arranger.sources(parts, self._source.whole)
                self.keys.add(ids, sources, self._source.checksum)
                self._add_complete()  # this batch, or, of several ranks, one that was read before
            return True
        if self._source.ended:
            self.keys.end()
        else:
            self.keys.flush()  # a slow reader must not keep lists that others may need
        return self._source.ended

    def _note(self, step: int, fault: RowcastError) -> None:
        self.keys.end_at(step, fault)
        train_step = self.due.position.train_step
        get_logger().warning("training will end at a fault", train_step=train_step, fault=str(fault))

    def _has_dense(self, num_steps: int) -> bool:
        """Whether this rank has the dense parts of the next `num_steps` batches and of some after them, as far as there
        are any, and every rank has those of these steps."""
        next_step = self.due.next_step
        wanted = min(self.keys.samples_ahead, self._planner.num_known, self.keys.fault_step - next_step)
        while len(self._samples) < wanted:
            dense = self._poll_dense(next_step + len(self._samples))
            if dense is None:
                break
            self.checksums.add_dense(dense)
            self._samples.append(dense)
            self.keys.read_samples(self._source.checksum)
        needed = min(num_steps + 1, wanted, self.keys.fault_step - next_step)
        self._misses_dense = len(self._samples) < needed
        has_all = len(self._samples) >= num_steps and not self._misses_dense
        return has_all and self.keys.all_have_samples(next_step, num_steps)

    def _poll_dense(self, step: int) -> Samples | None:
        try:
            dense = self._source.poll_dense()
            if dense is not None:
                inputs = batch_specs(dense, self._source.belonging.arrays)
                if inputs != self._inputs:
                    check_same(inputs, self._inputs, f"the batch of step {step}")
            return dense
        except RowcastError as fault:
            self._note(step, fault)
            return None

    def plan_next(self) -> bool:
        """Adds a plan or a barrier to the plan stream, if one is due and its batches are here."""
        if self.due.last_is_sent:
            return False
        barrier = self.due.due()
        if barrier is not None:
            if barrier.after_samples and not self._has_dense(1):
                return False
            self._plans.append(self.due.send(barrier, self.checksums.ahead))
            return True
        if not self._planner.ready():
            return False
        bundle = self._planner.known.next
        if self._fetcher.step_done is not None:
            self.due.done(self._fetcher.step_done)
        # rows of the bundle's other steps come as well
        num_steps = min(len(bundle.steps), self.due.step_after - self.due.next_step)
        has_dense = self._has_dense(num_steps)  # also without credit: others may plan more steps at once than this rank
        done = self._fetcher.done_through
        if bundle.plan > (self._first_step - 1 if done is None else done) + self._ahead:
            self._misses_dense = False
            return False
        if has_dense:
            self._plan(bundle.steps[:num_steps])
        return has_dense

    def _plan(self, steps: Sequence[Scheduled[Any]]) -> None:
        with self._counters.timed("plan", self.due.next_step):
            plan = self._planner.plan()
            for store, group in zip(self._stores, plan.move, strict=True):
                store.store.stage(plan.plan, group)
        crash_point("plan made")
        plan = replace(plan, steps=plan.steps[: len(steps)])
        samples = [self._samples.popleft() for _ in steps]
        self._counters.planned(plan, [len(batch.labels) for batch in samples])
        self.on_plan(plan)
        for _ in steps:
            self.checksums.planned()
            self.keys.planned()
        self.due.planned(steps)  # before the fetcher may send it: a StopRequest may name one of its steps
        self._plans.append(pack(samples, plan))
