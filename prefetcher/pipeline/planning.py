"""The planning stage: turns batches into plans, at most a fixed number of plans ahead of the trainer."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from rowcast.prefetcher.pipeline.barrier import PrefetcherBarrier
from rowcast.prefetcher.pipeline.batch_checksums import BatchChecksums
from rowcast.prefetcher.pipeline.fetcher import Fetcher, PlannedBarrier, PlanStream
from rowcast.prefetcher.pipeline.key_exchange import NOT_KNOWN, KeyExchange
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.source import RankSource
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.batch import Samples
from rowcast.protocol.messages import StopRequest, Welcome
from rowcast.protocol.parts import batch_specs, check_same
from rowcast.protocol.plan import PlannedSteps, pack
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
    """Returns how many plans may be made beyond the last completed one."""
    return 2 * depth + 2


class PlanningStage:
    """Makes up to 2 * depth + 2 plans beyond the last completed one, so that a stop is prompt. Announces each to
    the stores.

    Adds a barrier to the plan stream wherever the planner says that a checkpoint is due. A *fault*, an error of any
    rank's reader, ends the stream with a barrier where its batch would be.
    """

    def __init__(
        self,
        *,
        source: RankSource,
        planner: RowPlanner,
        keys: KeyExchange,
        checksums: BatchChecksums,
        stores: tuple[TrackedStore, ...],
        plans: PlanStream,
        fetcher: Fetcher,
        barrier: PrefetcherBarrier,
        welcome: Welcome,
        lookup_arrays: Mapping[str, str],
        counters: PrefetcherCounters,
    ) -> None:
        """`lookup_arrays`: of the batch, with the feature of each."""
        self.planned_through: int | None = None
        self._source = source
        self._planner = planner
        self._keys = keys
        planner.evaluating = welcome.start.eval_batch is not None
        self._stores = stores
        self._plans = plans
        self._fetcher = fetcher
        self._barrier = barrier
        self._ahead = plans_ahead(welcome.depth)
        self._start = welcome.start
        self._position = welcome.start  # after the last plan
        self.checksums = checksums
        self._samples: deque[Samples] = deque()  # of the batch to be planned next, and of some after it
        self._misses_dense = False
        self._counters = counters
        self.stop_reason: str | None = None
        self._last_step: int | None = None  # of a stop, if ranks have agreed on one
        self._ended = False
        self._barrier_sent = False
        self.pace: Pace | None = None  # converts a time between checkpoints into train steps
        self._lookup_arrays, self._announced = lookup_arrays, welcome.inputs
        # of each step that is planned and may not be done, and of the one before the first
        self._position_after: dict[int, Position] = {welcome.start.step - 1: welcome.start}
        self._done_step = welcome.start.step - 1
        self.on_plan: Callable[[PlannedSteps], None] = lambda plan: None
        # called once, with the train steps between checkpoints
        self.on_interval: Callable[[int], None] = lambda steps: None

    @property
    def waits_for_batches(self) -> bool:
        return not self._barrier_sent and (self._misses_dense or (not self._ended and self._planner.wants_batch > 0))

    @property
    def awaited_ranks(self) -> tuple[int, ...]:
        return self._keys.awaited

    @property
    def waits_for_credit(self) -> bool:
        return not self._barrier_sent and not self._misses_dense and self._planner.ready()

    @property
    def _data_is_planned(self) -> bool:
        """Whether all data is planned, so that a stop would change nothing."""
        return self._next_step >= self._keys.fault_step or (self._ended and not self._planner.ready())

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
        """Reads one batch's ids, or adds a batch that is complete to the horizon, if plans need them."""
        arrived = self._keys.advance()
        if self._barrier_sent:
            # ranks with a longer horizon have plans to make for which they need more lists
            return (self._keys.has_others and self._read_ids()) or arrived
        return self._add_complete() or self._read_ids() or arrived

    def _add_complete(self) -> bool:
        if self._ended or self._barrier_sent or not self._planner.wants_batch:
            return False
        complete = self._keys.take()
        if complete is not None:
            self._planner.add(*complete)
            return True
        if self._keys.ended:
            self._planner.end()
            self._ended = True
        return self._ended

    def _read_ids(self) -> bool:
        if not self._keys.wants_batch:
            return False
        try:
            ids = self._source.poll_ids()
        except RowcastError as fault:
            self._note(self._keys.next_step, fault)
            return True
        if ids is not None:
            with self._counters.timed("read", ids.step):
                parts = self._planner.own_parts(ids.batch)
                self.checksums.add_ids(ids, parts)
                sources = self._planner.arranger.sources(parts, self._source.whole)
                self._keys.add(ids, sources, self._source.checksum)
                self._add_complete()  # this batch, or, of several ranks, one that was read before
            return True
        if self._source.ended:
            self._keys.end()
        else:
            self._keys.flush()  # a slow reader must not keep lists that others may need
        return self._source.ended

    @property
    def _next_step(self) -> int:
        return self._start.step if self.planned_through is None else self.planned_through + 1

    def _note(self, step: int, fault: RowcastError) -> None:
        self._keys.end_at(step, fault)
        get_logger().warning("training will end at a fault", train_step=self._position.train_step, fault=str(fault))

    def _has_dense(self, num_steps: int) -> bool:
        """Whether this rank has the dense parts of the next `num_steps` batches and of some after them, as far as there
        are any, and every rank has those of these steps."""
        wanted = min(self._keys.samples_ahead, self._planner.num_known, self._keys.fault_step - self._next_step)
        while len(self._samples) < wanted:
            dense = self._poll_dense()
            if dense is None:
                break
            self.checksums.add_dense(dense)
            self._samples.append(dense)
            self._keys.read_samples(self._source.checksum)
        needed = min(num_steps + 1, wanted, self._keys.fault_step - self._next_step)
        self._misses_dense = len(self._samples) < needed
        has_all = len(self._samples) >= num_steps and not self._misses_dense
        return has_all and self._keys.all_have_samples(self._next_step, num_steps)

    def _poll_dense(self) -> Samples | None:
        step = self._next_step + len(self._samples)
        try:
            dense = self._source.poll_dense()
            if dense is not None:
                found = batch_specs(dense, self._lookup_arrays)
                if found != self._announced:
                    check_same(found, self._announced, f"the batch of step {step}")
            return dense
        except RowcastError as fault:
            self._note(step, fault)
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
        # only here, where every rank knows whether the data has ended as well, and that no rank finds a fault there
        if self.stop_reason is not None and self.planned_through == self._last_step is not None:
            return self._has_dense(1) and self._send_barrier(self.stop_reason, last=True)
        if self._planner.checkpoint_due:
            return self._send_barrier("checkpoint", last=False)
        bundle, next_step = self._planner.known.next, self._next_step
        self._find_interval(self._forget_done())
        if self.pace is not None and self.pace.must_wait(bundle.last.step - self._start.step):
            return False
        end = min(self._keys.fault_step, NOT_KNOWN if self._last_step is None else self._last_step + 1)
        num_steps = min(len(bundle.steps), end - next_step)  # rows of the bundle's other steps come as well
        has_dense = self._has_dense(num_steps)  # also without credit: others may plan more steps at once than this rank
        done = self._fetcher.done_through
        if bundle.plan > (self._start.step - 1 if done is None else done) + self._ahead:
            self._misses_dense = False
            return False
        if not has_dense:
            return False
        with self._counters.timed("plan", next_step):
            plan = self._planner.plan()
            for store, group in zip(self._stores, plan.move, strict=True):
                store.store.stage(plan.plan, group)
        crash_point("plan made")
        plan = replace(plan, steps=plan.steps[:num_steps])
        samples = [self._samples.popleft() for _ in plan.steps]
        self._counters.planned(plan, [len(own.labels) for own in samples])
        self.on_plan(plan)
        for scheduled in bundle.steps[:num_steps]:
            self.checksums.planned()
            self._keys.planned()
            self._position = self._position_after[scheduled.step] = scheduled.following
        self._plans.append(pack(samples, plan))
        self.planned_through = next_step + num_steps - 1
        return True

    def _forget_done(self) -> int:
        """Forgets all but the last of the steps that are done, and returns it."""
        before, done = self._done_step, self._fetcher.step_done
        self._done_step = before if done is None else done
        for step in range(before, self._done_step):
            self._position_after.pop(step)
        return self._done_step

    def _find_interval(self, done: int) -> None:
        # called before a plan is made, so that the interval changes between two plans
        steps = None if self.pace is None else self.pace.steps(done - self._start.step + 1, self._position.train_step)
        if steps is not None:
            self.pace = None
            self.on_interval(steps)
            self._planner.checkpoint_every = steps

    def _send_end(self) -> bool:
        if self._keys.fault is None:
            return self._send_barrier("end of data", finished=True, last=True)
        return self._send_barrier("a fault in the data", last=True)

    def _send_barrier(self, reason: str, *, finished: bool = False, last: bool) -> bool:
        evaluated = self._planner.evaluated
        if evaluated:
            self._position = self._position_after[self._next_step - 1] = self._planner.known.next.first.position
        barrier = PlannedBarrier(
            plan=self._planner.barrier(reason, finished),
            position=self._position,
            last=last,
            ahead=self.checksums.ahead,
            fault=self._keys.fault if self._data_is_planned else None,
            evaluated=evaluated or finished,
        )
        self._plans.append(barrier)
        self._barrier_sent = last
        if last:
            self._keys.stop_waiting()
        return True
