"""Saves the plans of an attempt as a trace, for `--save-trace`."""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.pipeline.engine import PrefetcherEngine
from rowcast.prefetcher.pipeline.plan_stream import PlannedStep
from rowcast.prefetcher.readers.schedule import PlacedIds
from rowcast.prefetcher.traces.header import trace_header
from rowcast.prefetcher.traces.writer import TraceWriter


def save_plans(
    stack: ExitStack, path: Path, job: Job, groups: tuple[GroupSpec, ...], engine: PrefetcherEngine
) -> Callable[[], None]:
    """Writes the engine's plans to `path` from now on. Call the returned function when the run is over."""
    writer = stack.enter_context(TraceWriter(path, trace_header(job, groups, engine.planner.slots)))
    before = [group.rows_flushed for group in engine.counters.groups.values()]  # by earlier attempts

    known: deque[PlacedIds] = deque()  # batches that are not planned

    def on_plan(planned: PlannedStep) -> None:
        writer.add(known.popleft(), planned.plan)

    def finish() -> None:
        if engine.finished:
            counted = zip(engine.counters.groups.values(), before, strict=True)
            flushed = tuple(group.rows_flushed - earlier for group, earlier in counted)
            writer.finish(flushed, finished=engine.barrier.finished)

    engine.planning.on_ids, engine.planning.on_plan = known.append, on_plan
    return finish
