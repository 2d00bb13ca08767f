"""The pace of a run, measured and foretold."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rowcast.job.prediction import PREDICTION, PREDICTION_VERSION, RunPrediction, write_prediction
from rowcast.trainer.report.history import HistoryMark
from rowcast.trainer.report.pace import Pace, pace_of
from rowcast.trainer.report.summary import foretold

BEGINNING = HistoryMark(
    time_s=3.0, train_step=0, train_steps=0, steps=0, samples=0, eval_samples=0, stalls=(0.0,) * 5,
    unique_rows=0, hits=0, bytes_to_device=0, bytes_from_device=0,
)  # fmt: skip


def marks(*moments: tuple[float, int]) -> list[HistoryMark]:
    """`moments`: seconds, and the number of steps done by then."""
    return [replace(BEGINNING, time_s=time_s, steps=steps) for time_s, steps in moments]


def foretell(run_dir: Path) -> None:
    own = RunPrediction(
        version=PREDICTION_VERSION, step_ms=80.0, margin=0.125, bound_by={"step": 1.0}, waits={}, outside=[],
        device="cpu", rates="0", steps=300,
    )  # fmt: skip
    write_prediction(run_dir, own)


def test_steps_that_fill_the_cache_do_not_count(tmp_path: Path) -> None:
    foretell(tmp_path)
    found = pace_of(tmp_path, marks((3.0, 0), (13.0, 10), (23.0, 30), (28.0, 80), (30.0, 100)))
    assert found == Pace(measured_ms=100.0, foretold_ms=80.0, margin=0.125, device="cpu")  # steps 30 to 100
    assert foretold(found) == "80.0 ms a step (+-12.5 %) by rates of cpu, measured 100.0 (+25%)"


@pytest.mark.parametrize("moments", [[], [(3.0, 0)], [(3.0, 0), (4.0, 5)], [(3.0, 0), (4.0, 5), (5.0, 5)]])
def test_a_run_too_short_for_a_pace_has_none(moments: Sequence[tuple[float, int]], tmp_path: Path) -> None:
    foretell(tmp_path)
    assert pace_of(tmp_path, marks(*moments)) is None


def test_a_prediction_that_is_absent_or_damaged_ends_no_run(tmp_path: Path) -> None:
    own = marks((3.0, 0), (4.0, 10), (5.0, 20))
    assert pace_of(tmp_path, own) is None
    (tmp_path / PREDICTION).write_text("{")
    assert pace_of(tmp_path, own) is None
