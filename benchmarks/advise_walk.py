"""Does the model behind `prefetcher advise`'s `least ms` agree with a walk of the pipeline?

    python -m benchmarks.advise_walk --config examples/demo.toml

For some capacities of the curve and some times of a step, both get the same rates: those that `advise` counts on. The
first model is the slower of a step and the mean over depth + 1 steps of the slowest of four stages. The second is
`prefetcher predict`'s walk over whole plans. Batches come decoded, and every thread has a core.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from rowcast.analysis.advise.advise import AdviseRequest, machine_rates
from rowcast.analysis.advise.cost import Rates, demand
from rowcast.analysis.advise.curve import Trials
from rowcast.analysis.advise.read import SamplingPlan, observe
from rowcast.analysis.predict.pipeline import Planned
from rowcast.analysis.predict.planned import plan_job
from rowcast.analysis.predict.predict import START_SHARE, described, walk
from rowcast.analysis.progress import Silent
from rowcast.analysis.simulate.grid import with_values
from rowcast.job.file import load_job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.readers.reader import open_reader, stream_columns
from rowcast.runtime.memory import free_memory

CAPACITIES = 4  # points of the curve, evenly spaced
STEPS_MS = (0.5, 1.0, 2.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AsAdvised:
    """Implements `pipeline.Durations` with the rates of `advise`."""

    plan: list[Planned]
    groups: tuple[GroupSpec, ...]
    rates: Rates
    step_s: float
    plan_s: float

    def __call__(self, name: str, step: int, pieces: int = 1) -> float:
        own = self.plan[step].counted
        assert own is not None, "steps of a plan are counted"
        nbytes = np.array([group.record_bytes for group in self.groups])
        fetched, back = (
            np.array([getattr(group, which) for group in own.counts.groups]) for which in ("fetched", "written_back")
        )
        read, first, write = (
            1 / np.array([getattr(row, which) for row in self.rates.rows]) for which in ("read", "first", "write")
        )
        new, link = np.array(own.first), self.rates.link_bytes_s
        seconds = {
            "plan": self.plan_s,
            "fetch": float((fetched - new) @ read + new @ first),
            "copy in": float(fetched @ nbytes + self.rates.plan_bytes) / link,
            "step": self.step_s,
            "copy out": float(back @ nbytes) / link,
            "write back": float(back @ write),
        }
        return seconds.get(name, 0.0) / (1 if name in ("plan", "step") else pieces)


def main(
    config: Annotated[Path, typer.Option()],
    max_steps: int = 300,
    sample: float = 0.05,
    overrides: Annotated[list[str] | None, typer.Option("--set")] = None,
) -> None:
    job = load_job(config, tuple(overrides or ()))
    request = AdviseRequest(sample=SamplingPlan(share=sample, samples=None), memory_bytes=free_memory() / 2)
    reader = open_reader(job, stream_columns(job)[0])
    observed = observe(job, reader, request.sample, max_steps, request.memory_bytes, lambda: None)
    trials = Trials(observed, job, Silent())
    rates = machine_rates(observed, job, request, trials.smallest, reader.num_dense)
    typer.echo(f"planning {1e3 * rates.plan_s:.2f} ms a batch; ms a step")
    everything = demand(observed, trials.moved(trials.capacities[-1]), rates, job.lookahead.depth)
    chosen = np.linspace(0, len(trials.capacities) - 1, CAPACITIES).round().astype(int)
    for capacity in (trials.capacities[at] for at in chosen):
        cache = {"capacity": capacity, "policy": "lookahead", "pin": None, "groups": {}}
        own = with_values(job, {"cache": cache, "lookahead": {"horizon": "auto"}})
        began_s = time.process_time()
        plan, wiring, _ = plan_job(own, max_steps)
        planned_s = time.process_time() - began_s
        needed = demand(observed, trials.moved(capacity), rates, job.lookahead.depth)
        stretch_s = needed.stretch_s[len(needed.stretch_s) // START_SHARE :]
        least_s = needed.stretch_s[needed.stretch_s > 1.01 * everything.stretch_s].max(initial=0.0)
        typer.echo(f"{capacity:,} bytes, least ms {1e3 * least_s:.2f}; planned in {planned_s:.1f} s")
        for step_ms in STEPS_MS:
            stages_ms = 1e3 * float(np.maximum(stretch_s, step_ms / 1e3).mean())
            for name, plan_s in (("planning free", 0.0), ("planning too", rates.plan_s)):
                durations = AsAdvised(
                    plan=plan, groups=group_specs(job), rates=rates, step_s=step_ms / 1e3, plan_s=plan_s
                )
                began_s = time.process_time()
                walked = walk(plan, wiring, durations, {})
                walk_s = time.process_time() - began_s
                bound = max(stages_ms, 1e3 * plan_s)
                typer.echo(
                    f"  step {step_ms:5.1f}, {name}: stages {bound:6.2f}, walked {1e3 * walked.step_s:6.2f} "
                    f"in {walk_s:.2f} s, {described(walked)}"
                )


if __name__ == "__main__":
    typer.run(main)
