"""The pace of a run, beside what `prefetcher run --rates` foretold of it."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rowcast.job.prediction import read_prediction
from rowcast.runtime.errors import RowcastError
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.report.history import HistoryMark

START_SHARE = 4  # the first quarter of the steps fills the cache, as in a prediction


class Pace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of train and evaluation steps, once the cache is full."""

    measured_ms: float  # a step
    foretold_ms: float
    margin: float  # the share of it that the errors of the rates leave open
    device: str  # that the rates are of, as `device_name` says it


def pace_of(run_dir: Path, marks: Sequence[HistoryMark]) -> Pace | None:
    """None if nothing was foretold, or if the run was too short for a pace. A prediction that cannot be read is warned
    of: it must not end a run."""
    try:
        foretold = read_prediction(run_dir)
    except (RowcastError, OSError) as error:
        get_logger().warning("the prediction cannot be read", error=str(error))
        return None
    measured_ms = measured(marks)
    if foretold is None or measured_ms is None:
        return None
    return Pace(measured_ms=measured_ms, foretold_ms=foretold.step_ms, margin=foretold.margin, device=foretold.device)


def measured(marks: Sequence[HistoryMark]) -> float | None:
    """Milliseconds a step from the end of the first quarter on; None if no two marks lie there."""
    steady = [mark for mark in marks if START_SHARE * mark.steps >= marks[-1].steps > 0]
    if len(steady) < 2 or steady[-1].steps == steady[0].steps:
        return None
    return 1e3 * (steady[-1].time_s - steady[0].time_s) / (steady[-1].steps - steady[0].steps)
