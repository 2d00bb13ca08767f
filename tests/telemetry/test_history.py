"""What is kept of a run over time: marks of the counters, and evaluations."""

from itertools import pairwise
from pathlib import Path

import numpy as np

from rowcast.trainer.models.evaluate import Evaluation
from rowcast.trainer.report.progress import EVERY_S, MAX_MARKS, History, HistoryMark
from rowcast.trainer.report.results import EvaluationOnly, ResultFiles
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
        self.history = History(self.counters, clock=self.clock)
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
