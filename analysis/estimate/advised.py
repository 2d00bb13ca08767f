"""`prefetcher estimate --advised`: a step with the sections that `prefetcher advise` recommends for this device."""

import tomllib
from pathlib import Path

from rowcast.analysis.advise.advise import AdviseOptions, advise_job
from rowcast.analysis.estimate.device_rates import read_rates
from rowcast.analysis.estimate.durations import measured_rows
from rowcast.analysis.estimate.estimate import Estimate, estimate_job
from rowcast.analysis.progress import ProgressBar
from rowcast.analysis.simulate.grid import with_values
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs


def estimate_advised(job: Job, rates: Path, step_ms: float, *, max_steps: int | None = None) -> Estimate:
    """`step_ms`: what a step takes to compute there. Raises ConfigError and DataError."""
    with ProgressBar() as progress:
        request = AdviseOptions(max_steps=max_steps, step_ms=step_ms)
        recommended = tomllib.loads(advise_job(job, request, progress).recommended.toml)
    settings = tuple((f"{name}.{key}", str(value)) for name, own in recommended.items() for key, value in own.items())
    cache = {**recommended["cache"], "pin": None, "groups": {}}  # the curve knows neither pins nor shares
    own = with_values(job, {**recommended, "cache": cache})
    [found] = estimate_job(
        own, [read_rates(rates)], measured_rows(own, group_specs(own)), settings, max_steps=max_steps
    )
    return found
