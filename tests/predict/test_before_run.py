"""What `prefetcher run --rates` foretells before a run, and when it keeps what it foretold."""

from pathlib import Path

import pytest

from rowcast.analysis.predict import before_run
from rowcast.analysis.predict.before_run import foretell_run
from rowcast.job.prediction import PREDICTION, read_prediction, write_prediction
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.sealed import render, seal
from tests.support.made_up_device import FREE, device, job


@pytest.fixture
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(before_run, "measured_rows", lambda job, groups: FREE)
    path = tmp_path / "rates.json"
    path.write_bytes(render(seal(device(per_step=50.0))))
    return path


def test_a_run_is_foretold_from_its_first_steps(tmp_path: Path, rates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_run, "WALKED_STEPS", 12)
    own = job(job={"run_dir": str(tmp_path)}, checkpoint={"every": 0})
    found = foretell_run(own, rates)
    assert found is not None
    assert found.steps == 12
    assert found.step_ms == pytest.approx(50_000, rel=0.05)
    assert next(iter(found.bound_by)) == "step"
    assert found.device == "cpu"


def test_a_run_that_continues_keeps_its_prediction_unless_the_rates_are_others(tmp_path: Path, rates: Path) -> None:
    own = job(job={"run_dir": str(tmp_path)}, checkpoint={"every": 0})
    first = foretell_run(own, rates)
    assert first is not None
    write_prediction(tmp_path, first)
    kept = read_prediction(tmp_path)
    assert kept is not None
    assert kept.step_ms == first.step_ms
    assert foretell_run(own, rates) is None
    assert foretell_run(own, rates, fresh=True) is not None
    rates.write_bytes(render(seal(device(per_step=100.0))))
    other = foretell_run(own, rates)
    assert other is not None
    assert other.step_ms == pytest.approx(2 * first.step_ms, rel=0.05)


def test_a_prediction_that_was_changed_is_refused(tmp_path: Path, rates: Path) -> None:
    own = job(job={"run_dir": str(tmp_path)}, checkpoint={"every": 0})
    first = foretell_run(own, rates)
    assert first is not None
    write_prediction(tmp_path, first)
    path = tmp_path / PREDICTION
    path.write_bytes(path.read_bytes().replace(b'"steps": ', b'"steps": 1'))
    with pytest.raises(DataError, match="it was changed after it was written"):
        read_prediction(tmp_path)


def test_without_rates_the_run_ends_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`trainer rates --out"):
        foretell_run(job(), tmp_path / "none.json")
