"""`prefetcher estimate --advised`: a step with the sections that `prefetcher advise` recommends for this device."""

import tomllib
from pathlib import Path

from rowcast.analysis.advise.advise import MEMORY_SHARE, USUAL_SHARE, AdviseRequest, advise_job
from rowcast.analysis.advise.read import SamplingPlan
from rowcast.analysis.estimate.device_rates import read_rates
from rowcast.analysis.estimate.durations import measured_rows
from rowcast.analysis.estimate.estimate import Estimate, estimate_job
from rowcast.analysis.progress import ProgressBar
from rowcast.analysis.simulate.grid import with_values
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.runtime.machine import free_memory


def estimate_advised(job: Job, rates: Path, step_ms: float, *, max_steps: int | None = None) -> Estimate:
    """`step_ms`: what a step takes to compute there. Raises ConfigError and DataError."""
    with ProgressBar() as progress:
        request = AdviseRequest(
            sample=SamplingPlan(share=USUAL_SHARE, samples=None),
            max_steps=max_steps,
            step_ms=step_ms,
            memory_bytes=MEMORY_SHARE * free_memory(),
            progress=progress,
        )
        recommended = tomllib.loads(advise_job(job, request).recommended.toml)
    settings = tuple((f"{name}.{key}", str(value)) for name, own in recommended.items() for key, value in own.items())
    cache = {**recommended["cache"], "pin": None, "groups": {}}  # the curve knows neither pins nor shares
    own = with_values(job, {**recommended, "cache": cache})
    [found] = estimate_job(
        own, [read_rates(rates)], measured_rows(own, group_specs(own)), settings, max_steps=max_steps
    )
    return found
