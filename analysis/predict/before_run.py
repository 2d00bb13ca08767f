"""`prefetcher run --rates`: foretells the pace of a run from its first steps, before it starts."""

from pathlib import Path

from rowcast.analysis.predict.foretold import measured_rows
from rowcast.analysis.predict.job import predict_job
from rowcast.job.device_rates import read_rates
from rowcast.job.prediction import PREDICTION_VERSION, RunPrediction, read_prediction
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs

WALKED_STEPS = 300  # evaluation steps included


def foretell_run(job: Job, rates: Path, *, max_steps: int | None = None, fresh: bool = False) -> RunPrediction | None:
    """None if the run directory holds a prediction from the same rates, and the run continues. Raises ConfigError and
    DataError as `predict` does."""
    device = read_rates(rates)
    earlier = None if fresh else read_prediction(job.run_dir)
    if earlier is not None and earlier.rates == device.checksum:
        return None
    # without the evaluation after the last train step
    first = WALKED_STEPS if max_steps is None else min(max_steps, WALKED_STEPS)
    [found] = predict_job(job, [device], measured_rows(job, group_specs(job)), max_steps=max_steps, first=first)
    return RunPrediction(
        version=PREDICTION_VERSION,
        step_ms=1e3 * found.walked.step_s,
        margin=found.margin,
        bound_by=dict(found.walked.bound_by),
        waits=found.walked.waits,
        outside=found.outside,
        device=device.device,
        rates=device.checksum,
        steps=found.steps,
    )
