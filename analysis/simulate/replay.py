"""Makes whole plans beside a simulation, look-up arrays included. Saves them as a trace, or compares them with one.

data or trace --> batches --> planner of one setting --> batches, to be recorded
                                    | plans
                                    +--> TraceWriter, or comparison with the plans of the trace
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path

from rowcast.analysis.simulate.grid import Grid, Setting, batches_jobs, capacity_jobs, settings, with_values
from rowcast.job.eviction_policies import EVICTION_POLICIES
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES
from rowcast.prefetcher.planner.level import Slots
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.prefetcher.traces.header import check_tables, same_settings, trace_header
from rowcast.prefetcher.traces.reader import TracedBatch, TraceReader
from rowcast.prefetcher.traces.writer import TraceWriter, plan_facts
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import BarrierPlan, StepPlan
from rowcast.runtime.errors import ConfigError, DataError

Counts = tuple[int, ...]  # of rows, one per group


def counts(barrier: BarrierPlan) -> Counts:
    return tuple(map(len, barrier.dirty))


class PlanWatcher:
    def plan(self, scheduled: ScheduledBatch, plan: StepPlan) -> None:
        """Called with each plan, in order."""

    def data_ended(self) -> None:
        """Called after the last batch; plans may still follow."""

    def ended(self, flushed: Counts) -> None:
        """Called after the last barrier; `flushed`: rows that barriers wrote back, per group."""


def planned_beside(
    batches: Iterable[ScheduledBatch], planner: RowPlanner, *watchers: PlanWatcher
) -> Iterator[ScheduledBatch]:
    """Yields `batches` unchanged and plans them as they pass. A batch that does not fit ends the planning, not the
    batches."""
    flushed: list[Counts] = []
    known: deque[ScheduledBatch] = deque()  # not planned
    fits = True
    for scheduled in batches:
        if fits:
            planner.add(scheduled)
            known.append(scheduled)
            fits = plan_ready(planner, known, watchers, flushed)
        yield scheduled
    if fits:
        planner.end()
        for watcher in watchers:
            watcher.data_ended()
        if plan_ready(planner, known, watchers, flushed):
            flushed.append(counts(planner.barrier("end of data", finished=True)))
            for watcher in watchers:
                watcher.ended(tuple(map(sum, zip(*flushed, strict=True))))


def plan_ready(
    planner: RowPlanner, known: deque[ScheduledBatch], watchers: Sequence[PlanWatcher], flushed: list[Counts]
) -> bool:
    """Adds the checkpoints' barriers to `flushed`. Returns False if a batch does not fit; the simulation of the setting
    reports it."""
    while planner.ready():
        if planner.checkpoint_due:
            flushed.append(counts(planner.barrier("checkpoint", finished=False)))
        try:
            plan = planner.plan()
        except ConfigError:
            return False
        scheduled = known.popleft()
        for watcher in watchers:
            watcher.plan(scheduled, plan)
    return True


class Saving(PlanWatcher):
    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer

    def plan(self, scheduled: ScheduledBatch, plan: StepPlan) -> None:
        self._writer.add(scheduled, plan)

    def ended(self, flushed: Counts) -> None:
        self._writer.finish(flushed, finished=True)


class Comparing(PlanWatcher):
    """A `PlanWatcher` over a trace's batches: plans made with the trace's settings must equal those of the trace.

    If the trace's run was stopped, or only its beginning is read, its last plans were made with more batches known than
    are available here: they are not compared."""

    def __init__(self, replay: "Replay") -> None:
        self.num_compared = 0
        self._replay = replay
        self._comparable = True

    def plan(self, scheduled: ScheduledBatch, plan: StepPlan) -> None:
        assert isinstance(scheduled, TracedBatch), f"step {plan.step} is not from a trace"
        if not self._comparable:
            return
        ours, theirs = plan_facts(plan), scheduled.facts
        if ours != theirs:
            raise DataError(
                f"step {plan.step} of the trace was planned differently when it was saved: {sum(theirs.rows_fetched)} "
                f"rows fetched and checksum {theirs.checksum}, here {sum(ours.rows_fetched)} and {ours.checksum}; use "
                "the version that saved it"
            )
        self.num_compared += 1

    def data_ended(self) -> None:
        self._comparable = self._replay.is_complete

    def ended(self, flushed: Counts) -> None:
        if self._comparable and flushed != self._replay.reader.rows_flushed:
            raise DataError(f"the trace's barriers flushed {self._replay.reader.rows_flushed} rows, here {flushed}")


class Replay:
    """The batches of a trace, up to `max_steps` train steps. If the trace has an evaluation after the last of them, it
    is included."""

    def __init__(self, reader: TraceReader, max_steps: int | None) -> None:
        self.reader = reader
        self._max_steps = max_steps
        self._num_given = 0

    @property
    def is_complete(self) -> bool:
        return self.reader.finished and self._num_given == self.reader.num_steps

    @property
    def is_measured(self) -> bool:
        """Whether the first batches are the run's. They decide the slots of each group, and the rows of "static"."""
        return self._num_given >= MEASURED_BATCHES or self.is_complete

    def batches(self) -> Iterator[TracedBatch]:
        self._num_given = 0
        for scheduled in takewhile(self._is_wanted, self.reader.steps()):
            self._num_given += 1
            yield scheduled

    def _is_wanted(self, scheduled: ScheduledBatch) -> bool:
        return self._max_steps is None or scheduled.kind == "eval" or scheduled.train_step < self._max_steps


class BatchesAndPlans:
    def __init__(
        self,
        stack: ExitStack,
        job: Job,
        grid: Grid,
        *,
        trace: Path | None,
        save_trace: Path | None,
        max_steps: int | None,
    ) -> None:
        """Traces stay open until `stack` is closed. Raises ConfigError and DataError."""
        self.job = job
        self._stack = stack
        self._save_trace, self._max_steps = save_trace, max_steps
        self._replay: Replay | None = None
        self._comparing: Comparing | None = None
        if trace is not None:
            for name, values in (("--batch-size", grid.batch_sizes), ("--shuffle", grid.shuffles)):
                if values:
                    raise ConfigError(
                        f"{name}: a trace has its own batches, in one order; omit this option or simulate over the data"
                    )
            reader = stack.enter_context(TraceReader(trace))
            check_tables(reader.header, job, f"--trace {trace}")
            self.job = with_values(job, {"data": {"batch_size": reader.header.batch_size}})
            self._replay = Replay(reader, max_steps)
        if save_trace is not None:
            require_one_run(self.job, grid)

    @property
    def num_compared(self) -> int | None:
        """The number of plans identical to the trace's; None if no setting was the trace's."""
        return None if self._comparing is None else self._comparing.num_compared

    def open_batches(self, own: Job) -> Iterable[ScheduledBatch]:
        if self._replay is not None:
            return self._replay.batches()
        return schedule(own, open_reader(own), self._max_steps)

    def watch(self, setting: Setting, slots: Sequence[Slots]) -> list[PlanWatcher]:
        if setting.policy not in EVICTION_POLICIES:
            return []
        header = trace_header(setting.job, group_specs(setting.job), slots)
        watchers: list[PlanWatcher] = []
        replay = self._replay
        if (
            replay is not None
            and self._comparing is None
            and replay.is_measured
            and same_settings(replay.reader.header, header)
        ):
            self._comparing = Comparing(replay)
            watchers.append(self._comparing)
        if self._save_trace is not None:
            watchers.append(Saving(self._stack.enter_context(TraceWriter(self._save_trace, header))))
        return watchers


def require_one_run(job: Job, grid: Grid) -> None:
    """Raises ConfigError unless the grid is a single setting that a run can have."""
    found = [
        setting
        for own in batches_jobs(job, grid)
        for cap in capacity_jobs(own, grid)
        for setting in settings(cap, grid)
    ]
    if len(found) > 1:
        raise ConfigError(
            f"--save-trace saves the plans of one setting, and these are {len(found)}; give one value of each"
        )
    if found[0].policy not in EVICTION_POLICIES:
        raise ConfigError(
            f"--save-trace: --policy {found[0].policy} makes no plans; give one of {', '.join(EVICTION_POLICIES)}"
        )
