"""TensorBoard event files, read back by TensorBoard itself."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowcast.job.file import load_job
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.process import Signals
from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.trainer.models.evaluate import Evaluation, TaskEvaluation
from rowcast.trainer.report.progress import HistoryMark
from rowcast.trainer.report.results import ResultFiles
from rowcast.trainer.report.tensorboard import LOSSES_A_MARK, TensorBoardWriter, check_board
from rowcast.trainer.run.attempt import TrainerRun

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
Scalars = dict[str, list[tuple[int, float]]]  # name -> (train step, value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    folder = tmp_path / "events"
    check_board(folder)
    return folder


def mark(time_s: float, train_step: int, waited_s: float = 0.0) -> HistoryMark:
    return HistoryMark(
        time_s=time_s,
        train_step=train_step,
        train_steps=train_step,
        steps=train_step,
        samples=90 * train_step,
        eval_samples=10 * train_step,
        stalls=(waited_s, 0.0, 0.0, 0.0, 0.0),
        unique_rows=50 * train_step,
        hits=40 * train_step,
        bytes_to_device=0,
        bytes_from_device=0,
    )


def results_with(tmp_path: Path, losses: int) -> ResultFiles:
    with ResultFiles(tmp_path) as results:
        for step in range(losses):
            results.loss(step, np.float32(step))
    return results


def read(folder: Path) -> Scalars:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_a_mark_and_an_evaluation_come_back(tmp_path: Path, folder: Path) -> None:
    with TensorBoardWriter(folder, results_with(tmp_path, losses=4), 0) as board:
        board.marked(mark(10.0, 0), mark(12.0, 4, waited_s=0.5))
        board.evaluation(Evaluation(train_step=4, auc=0.75, logloss=0.5, accuracy=0.25))
        tasks = (TaskEvaluation(label="buy", num_labels=9, auc=0.5, logloss=None),)
        board.evaluation(Evaluation(train_step=4, auc=None, logloss=0.5, accuracy=0.25, tasks=tasks))
    found = read(folder)
    assert found["loss"] == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert found["speed/samples_per_s"] == [(4, 200.0)]
    assert found["stall_share/rows"] == [(4, 0.25)]
    assert found["stall_share/barrier"] == [(4, 0.0)]
    assert found["cache/hit_ratio"][0] == pytest.approx((4, 0.8))
    assert found["eval/auc"] == [(4, 0.75)]
    assert len(found["eval/logloss"]) == 2
    assert found["eval/auc/buy"] == [(4, 0.5)]
    assert "eval/logloss/buy" not in found


def test_many_steps_between_two_marks_are_put_together(tmp_path: Path, folder: Path) -> None:
    losses = 10 * LOSSES_A_MARK
    with TensorBoardWriter(folder, results_with(tmp_path, losses), 0) as board:
        board.marked(mark(0.0, 0), mark(1.0, losses))
        board.marked(mark(1.0, losses), mark(2.0, losses))
    found = read(folder)["loss"]
    assert len(found) == LOSSES_A_MARK
    assert found[0] == (10, 4.5)
    assert found[-1] == (losses, losses - 5.5)


def test_a_run_that_goes_on_takes_back_what_an_earlier_process_wrote_of_later_steps(
    tmp_path: Path, folder: Path
) -> None:
    with TensorBoardWriter(folder, results_with(tmp_path, losses=6), 0) as board:
        board.marked(mark(0.0, 0), mark(1.0, 6))
    with TensorBoardWriter(folder, results_with(tmp_path, losses=8), 4) as board:
        board.marked(mark(0.0, 4), mark(1.0, 8))
    assert [step for step, _ in read(folder)["loss"]] == [1, 2, 3, 5, 6, 7, 8], (
        "TensorBoard drops the step it goes on from as well"
    )


def test_a_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'rowcast\[tensorboard\]'"):
        check_board(tmp_path)


def test_a_trainer_whose_events_could_not_be_written_ends_before_it_begins(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = load_job(DEMO, (f'job.run_dir="{tmp_path / "run"}"',))
    with pytest.raises(ConfigError, match="cannot be made"):
        TrainerRun(job, Signals(), tensorboard=tmp_path / "file" / "events").run()
    assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_the_events_and_not_the_run(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*scalar: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
    setup_logging("trainer")
    with TensorBoardWriter(folder, results_with(tmp_path, losses=4), 0) as board:
        board.marked(mark(0.0, 0), mark(1.0, 4))
        board.marked(mark(1.0, 4), mark(2.0, 4))
    assert capsys.readouterr().err.count("no more TensorBoard events are written") == 1
