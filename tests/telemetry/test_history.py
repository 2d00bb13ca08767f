"""What is kept of a run over time: marks of the counters, evaluations, and TensorBoard's events."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowcast.job.file import load_job
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.process import Signals
from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.trainer.models.evaluate import Evaluation, TaskEvaluation
from rowcast.trainer.report.progress import EVERY_S, MAX_MARKS, HistoryMark, MarkHistory
from rowcast.trainer.report.results import EvaluationOnly, ResultFiles
from rowcast.trainer.report.tensorboard import LOSSES_A_MARK, TensorBoardWriter, check_board
from rowcast.trainer.run.attempt import TrainerRun
from rowcast.trainer.step.metrics import TrainerCounters, new_counters
from tests.support import three_steps


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Past:
    """A history of counters that a test moves on by hand."""

    def __init__(self) -> None:
        self.counters: TrainerCounters = new_counters(three_steps.groups())
        self.clock = Clock()
        self.history = MarkHistory(self.counters, clock=self.clock)
        self.first_step_s: float | None = None

    def step(self, seconds: float, kind: str = "train") -> None:
        """The loop's round for one step: it is begun, the history looks, and it is done `seconds` later."""
        if self.first_step_s is None:
            self.first_step_s = self.clock.now_s
        self.history.update(self.first_step_s)
        self.clock.now_s += seconds
        three_steps.trained(self.counters, kind, 32, 0.5)

    def close(self) -> list[HistoryMark]:
        self.history.close(self.first_step_s)
        return self.history.marks


def test_a_run_without_a_step_leaves_no_mark() -> None:
    past = Past()
    past.history.begin(0)
    past.clock.now_s += 60
    past.history.update(None)
    assert past.close() == []
    assert past.history.starts == []


def test_marks_stand_about_a_second_apart_and_end_with_the_last_counters() -> None:
    past = Past()
    past.history.begin(0)
    for _ in range(100):
        past.step(0.04)
    marks = past.close()
    gaps = np.diff([mark.time_s for mark in marks])
    assert len(marks) in (4, 5)
    assert all(EVERY_S <= gap < 2 * EVERY_S for gap in gaps[:-1])
    assert EVERY_S / 2 <= gaps[-1] < 2 * EVERY_S
    assert (marks[0].samples, marks[-1].samples) == (0, 3200)
    assert (marks[0].train_step, marks[-1].train_step) == (0, 100)


def test_waits_and_bytes_before_the_first_step_are_told_apart() -> None:
    past = Past()
    past.history.begin(0)
    past.counters.plan_ready(three_steps.plan_ready((4, 4), arrays_bytes=1000))
    past.clock.now_s += 60
    past.step(0.04)
    first, last = past.close()
    assert last.time_s - first.time_s < 1, "waiting for the first step is start-up"
    assert last.bytes_to_device - first.bytes_to_device == 4 * 64 + 4 * 128 + 1000, "but its rows are the run's"


def test_memory_is_bounded_and_no_count_is_lost() -> None:
    past, steps = Past(), 20 * MAX_MARKS
    past.history.begin(0)
    for _ in range(steps):
        past.step(EVERY_S)
    marks = past.close()
    assert MAX_MARKS / 2 <= len(marks) <= MAX_MARKS
    assert sum(last.steps - first.steps for first, last in pairwise(marks)) == steps
    gaps = np.diff([mark.time_s for mark in marks])
    assert gaps.min() > 0
    assert gaps.max() <= 2 * np.median(gaps), "the whole run is as well resolved as its end"


def test_evaluation_steps_count_as_steps_and_samples_and_not_as_train_steps() -> None:
    past = Past()
    past.history.begin(0)
    past.step(0.04)
    past.step(0.04, kind="eval")
    _, last = past.close()
    assert (last.steps, last.train_steps, last.train_step, last.samples, last.eval_samples) == (2, 1, 1, 32, 32)


def test_a_second_incarnation_is_marked_where_its_first_step_begins() -> None:
    past = Past()
    past.history.begin(0)
    for _ in range(30):
        past.step(0.1)
    past.history.begin(20)  # the checkpoint
    past.clock.now_s += 60
    past.first_step_s = None
    for _ in range(30):
        past.step(0.1)
    marks = past.close()
    assert past.history.starts == [0, 20]
    assert (marks[-1].train_step, marks[-1].steps) == (50, 60)
    waits = [(first, last) for first, last in pairwise(marks) if last.time_s - first.time_s > 50]
    assert len(waits) == 1


def test_a_listener_hears_of_each_mark_with_the_one_before() -> None:
    heard: list[tuple[HistoryMark, HistoryMark]] = []
    past = Past()
    past.history.begin(0, lambda before, mark: heard.append((before, mark)))
    for _ in range(100):
        past.step(0.2)
    past.close()
    assert len(heard) > 10
    assert all(before.time_s < mark.time_s for before, mark in heard)
    assert [mark for _, mark in heard[:-1]] == [before for before, _ in heard[1:]]
    assert heard[-1][1].steps == 100


# evaluations


def evaluations(number: int) -> list[Evaluation]:
    return [Evaluation(train_step=10 * i, auc=0.5, logloss=0.5, accuracy=i / number) for i in range(number)]


def test_all_evaluations_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    with ResultFiles(tmp_path) as results:
        for result in evaluations(3):
            results.evaluation(result)
        state = results.state()
    with ResultFiles(tmp_path) as restored:
        assert restored.evaluation_result is None
        restored.restore(state)
        assert restored.evaluations == evaluations(3)
        assert restored.evaluation_result == evaluations(3)[-1]


def test_an_evaluation_of_its_own_takes_none_from_the_checkpoint(tmp_path: Path) -> None:
    with ResultFiles(tmp_path) as results:
        results.evaluation(evaluations(1)[0])
        state = results.state()
    alone = EvaluationOnly(tmp_path)
    alone.restore(state)
    assert alone.evaluations == []


def test_the_file_of_losses_begins_with_those_of_the_checkpoint(tmp_path: Path) -> None:
    with ResultFiles(tmp_path) as results:
        for step in range(3):
            results.loss(step, np.float32(step))
        state = results.state()
    with ResultFiles(tmp_path) as restored:
        restored.restore(state)
        restored.loss(3, np.float32(3.0))
        assert restored.train_steps == 4
    assert np.fromfile(restored.path, np.float32).tolist() == [0.0, 1.0, 2.0, 3.0]


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
