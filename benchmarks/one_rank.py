"""What does a step of one rank spend on what placed tables and ranks of scripts added to it, if no key asks for them?

Trains a job in this process and one thread: the stages of its prefetcher and its trainer take turns. A step takes the
processor time of all turns that did something. Then the added work alone runs in a loop, with the run's own arguments:

    sources    which parts of a batch the rank looks up       prefetcher/planner/planner.py
    bags       the bags of each source, to check a plan       trainer/step/plan_check.py
    order      features in the order of the job               trainer/models/embedding.py

What it replaced is not subtracted. Figures are medians of the turns.

    python -m benchmarks.one_rank
    python -m benchmarks.one_rank --set data.batch_size=16 --steps 200
"""

import statistics
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer

from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import part_bounds
from rowcast.runtime.stages import Stage
from rowcast.trainer.models.embedding import in_job_order
from tests.support.batches import slots_for
from tests.support.driver import InProcessRun, Settings

REPEATS = 10_000
RING_BYTES = 2**26


class Counted:
    """A stage, and the processor time of its turns that did something."""

    def __init__(self, stage: Stage) -> None:
        self.seconds = 0.0
        self._stage = stage

    def __call__(self) -> bool:
        began_s = time.process_time()
        moved = self._stage()
        self.seconds += (time.process_time() - began_s) * moved
        return moved


def a_step(run: InProcessRun, steps: int) -> float:
    """Seconds of processor time, after as many steps that are not counted."""
    counted = list(map(Counted, run.advances))
    run.advances = [*counted]
    run.advance_until(lambda: len(run.losses()) >= steps)
    before = sum(own.seconds for own in counted), len(run.losses())
    run.advance_until(lambda: run.trainer.loop.finished)
    return (sum(own.seconds for own in counted) - before[0]) / (len(run.losses()) - before[1])


def added(run: InProcessRun, scheduled: ScheduledBatch) -> dict[str, Callable[[], object]]:
    check, arranger = run.trainer.cache._check, run.prefetcher.planner.arranger
    lookups, embeddings = scheduled.batch.lookups, run.runner._embeddings
    features = [torch.zeros(1, 1)] * len(run.job.features)

    def bags() -> None:
        ends = part_bounds(scheduled.batch.size, 1)
        for sources in check._sources:
            sum([count * (ends[part + 1] - ends[part]) for part, count in sources])

    return {
        "sources": lambda: arranger.sources([lookups], lookups),
        "bags": bags,
        "order": lambda: in_job_order(features, embeddings._places),
    }


def once(work: Callable[[], object]) -> float:
    """Seconds of processor time."""
    began_s = time.process_time()
    for _ in range(REPEATS):
        work()
    return (time.process_time() - began_s) / REPEATS


def turn(job: Job, batches: list[ScheduledBatch]) -> dict[str, float]:
    settings = Settings(
        slots=slots_for(group_specs(job), batches, "two batches"), ring_bytes=RING_BYTES, seeded_streams=False
    )
    run = InProcessRun(job, batches, settings)
    step_s = a_step(run, len(batches) // 2)
    return {"step": step_s, **{name: once(work) for name, work in added(run, batches[0]).items()}}


def main(
    config: Annotated[Path, typer.Option()] = Path("examples/demo.toml"),
    overrides: Annotated[list[str] | None, typer.Option("--set")] = None,
    steps: Annotated[int, typer.Option(help="counted ones")] = 40,
    turns: Annotated[int, typer.Option()] = 5,
) -> None:
    torch.set_num_threads(1)
    job = load_job(config, tuple(overrides or ()))
    batches = [own for own in islice(schedule(job, open_reader(job)), 2 * steps) if own.kind == "train"]
    found = [turn(job, batches) for _ in range(turns)]
    of = {name: statistics.median(own[name] for own in found) for name in found[0]}
    total_s = sum(own for name, own in of.items() if name != "step")
    for name, seconds in of.items():
        print(f"{name:10} {1e6 * seconds:10.2f} us")
    print(f"{'added':10} {1e6 * total_s:10.2f} us, {100 * total_s / of['step']:.3f} % of a step")


if __name__ == "__main__":
    typer.run(main)
