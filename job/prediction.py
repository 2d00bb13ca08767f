"""`prediction.json` in a run directory: what `prefetcher run --rates` foretold of the run."""

from pathlib import Path

from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.errors import RowcastError
from rowcast.runtime.sealed import Sealed, read_sealed, render, seal

PREDICTION, PREDICTION_VERSION = "prediction.json", 1


class RunPrediction(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    step_ms: float  # the mean of the steps that were walked, without the first quarter and the last few
    margin: float  # the share of it that the errors of the rates leave open
    bound_by: dict[str, float]  # tasks of the critical path, and their share of it
    waits: dict[str, float]  # such as "trainer: rows" -> share of the time
    outside: list[str]  # kernels that were not measured at such shapes
    device: str  # that the rates are of: "cpu", or the GPU's name
    rates: str  # checksum of the rates file
    steps: int  # that were walked, evaluation steps included


def read_prediction(run_dir: Path) -> RunPrediction | None:
    """None if there is none. Raises DataError if it has another version or was changed, and OSError."""
    try:
        return read_sealed(run_dir / PREDICTION, RunPrediction, PREDICTION_VERSION, "prediction")
    except FileNotFoundError:
        return None


def write_prediction(run_dir: Path, prediction: RunPrediction) -> None:
    """Raises RowcastError."""
    path = run_dir / PREDICTION
    try:
        write_durably(path, render(seal(prediction)))
    except OSError as error:
        raise RowcastError(f"{path}: cannot write the prediction ({error.strerror}); free space there") from None


def keep_prediction(run_dir: Path, prediction: RunPrediction | None, *, fresh: bool) -> None:
    """Writes what is foretold of the run that begins or goes on; a fresh one loses what an earlier run was foretold.
    Raises RowcastError."""
    if prediction is not None:
        write_prediction(run_dir, prediction)
    elif fresh:
        (run_dir / PREDICTION).unlink(missing_ok=True)
