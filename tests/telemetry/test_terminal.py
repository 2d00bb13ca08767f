import io
import os
import sys

import msgspec
import pytest
from rich.console import Console

from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.trainer.models.evaluate import Evaluation, TaskEvaluation
from rowcast.trainer.report.progress import TerminalProgress
from rowcast.trainer.step.metrics import TrainerCounters, new_counters
from tests.support import three_steps

RESULT = Evaluation(train_step=2, auc=0.71234567, logloss=0.5, accuracy=0.8)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def train(counters: TrainerCounters, steps: int, loss: float) -> None:
    for _ in range(steps):
        three_steps.trained(counters, "train", 100, loss)


def plain_console() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=False), file


def test_a_pipe_gets_a_line_early_then_every_few_seconds_and_at_the_end() -> None:
    counters, clock = new_counters(three_steps.groups()), Clock()
    console, file = plain_console()
    with TerminalProgress(counters, 40, console=console, clock=clock) as progress:
        clock.now += 60.0
        progress.update()
        assert file.getvalue() == "", "no step is done"
        for _ in range(12):
            clock.now += 1.0
            train(counters, 2, loss=0.25)
            counters.stalled("rows", 0.25)
            progress.update()
        train(counters, 1, loss=0.125)
    lines = file.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "step 6/40  loss 0.2500  17.0 s left  200 samples/s  stalled 25.0 %  hit ratio 60.0 %"
    assert lines[1].startswith("step 16/40  loss 0.2500  12.0 s left  200 samples/s  stalled 25.0 %")
    assert lines[2].startswith("step 25/40  loss 0.1250")


def test_evaluations_are_lines_as_they_come() -> None:
    console, file = plain_console()
    with TerminalProgress(new_counters(three_steps.groups()), None, console=console, clock=Clock()) as progress:
        progress.evaluation(RESULT)
        assert file.getvalue() == "eval after 2 train steps: AUC 0.712346, log loss 0.500000, accuracy 0.800000\n"
        progress.evaluation(Evaluation(train_step=1, auc=None, logloss=0.5, accuracy=1.0))
        progress.evaluation(Evaluation(train_step=6, auc=None, logloss=2.5, is_own_loss=True, accuracy=None))
    assert "eval after 1 train step: AUC undefined, log loss" in file.getvalue()
    assert "eval after 6 train steps: loss 2.500000\n" in file.getvalue()


def test_an_evaluation_of_several_labels_names_each() -> None:
    console, file = plain_console()
    tasks = (
        TaskEvaluation(label="click", num_labels=2000, auc=0.75, logloss=0.25),
        TaskEvaluation(label="buy", num_labels=3, auc=None, logloss=0.5),
        TaskEvaluation(label="stay", num_labels=0, auc=None, logloss=None),
        TaskEvaluation(label="price", num_labels=9, auc=None, logloss=None),
    )
    with TerminalProgress(new_counters(three_steps.groups()), None, console=console, clock=Clock()) as progress:
        progress.evaluation(msgspec.structs.replace(RESULT, tasks=tasks))
    assert file.getvalue() == (
        "eval after 2 train steps: AUC 0.712346, log loss 0.500000, accuracy 0.800000; click: AUC 0.750, "
        "log loss 0.250, 2,000 known; buy: AUC undefined, log loss 0.50, 3 known; stay: no known label; price: no log "
        "loss\n"
    )


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, _environ={"TERM": "xterm"})


def test_a_wide_terminal_has_a_bar_and_figures_in_one_live_line_and_evaluations_above_it() -> None:
    counters, clock = new_counters(three_steps.groups()), Clock()
    console = terminal(120)
    with TerminalProgress(counters, 40, console=console, clock=clock) as progress:
        clock.now += 1.0
        progress.update()
        assert "waiting for the first step" in written(console)
        train(counters, 9, loss=0.5)
        progress.update()
        assert "step 9" not in written(console)
        clock.now += 1.0
        train(counters, 1, loss=0.5)
        progress.update()
        assert f"\r\x1b[2K{'━' * 5:20} step 10/40  loss 0.5000  30.0 s left  100 samples/s" in written(console)
        assert "\n" not in written(console)
        progress.evaluation(RESULT)
        train(counters, 10, loss=0.25)
    text = written(console)
    assert f"accuracy 0.800000\n{'━' * 5:20} step 10/40" in text
    assert text.count("\n") == 2
    assert f"{'━' * 10:20} step 20/40  loss 0.2500" in text.splitlines()[-2]


def test_a_narrow_terminal_shows_the_time_that_is_left() -> None:
    counters, clock, console = new_counters(three_steps.groups()), Clock(), terminal(80)
    with TerminalProgress(counters, 1_234_567, console=console, clock=clock) as progress:
        for _ in range(2):
            train(counters, 10, loss=0.5)
            progress.update()
            clock.now += 1.0
    assert "34 h 17 min left" in written(console)


def test_an_evaluation_by_itself_fills_the_bar_by_its_own_steps() -> None:
    counters, clock = new_counters(three_steps.groups()), Clock()
    console = terminal(120)
    with TerminalProgress(counters, 40, first_step=40, mode="eval", eval_steps=8, console=console, clock=clock):
        for _ in range(2):
            three_steps.trained(counters, "eval", 100, None)
    assert f"{'━' * 5:20} step 2/8" in written(console)


def test_a_terminal_without_cursor_movements_gets_plain_lines() -> None:
    counters, clock = new_counters(three_steps.groups()), Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=120, _environ={"TERM": "dumb"})
    with TerminalProgress(counters, None, console=console, clock=clock) as progress:
        train(counters, 1, loss=0.5)
        clock.now += 5.0
        progress.update()
    assert written(console).startswith("step 1  loss 0.5000")
    assert "\x1b" not in written(console)


def test_a_log_file_is_not_animated_where_colour_is_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    counters = new_counters(three_steps.groups())
    with TerminalProgress(counters, None, clock=Clock()):
        train(counters, 1, loss=0.5)
    assert capsys.readouterr().out.startswith("step 1  loss 0.5000")


def test_training_goes_on_when_the_reader_of_a_pipe_has_gone(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("trainer")
    read_end, write_end = os.pipe()
    os.close(read_end)
    file = os.fdopen(write_end, "w", buffering=1)
    progress = TerminalProgress(
        new_counters(three_steps.groups()), None, console=Console(file=file, force_terminal=False), clock=Clock()
    )
    progress.start()
    progress.evaluation(RESULT)
    progress.evaluation(RESULT)
    progress.close()
    assert capsys.readouterr().err.count("stdout cannot be written") == 1
    with pytest.raises(BrokenPipeError):
        file.close()


def test_logs_of_a_terminal_appear_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None, _environ={"TERM": "xterm"})
    with TerminalProgress(new_counters(three_steps.groups()), None, console=console, clock=Clock()):
        sys.stderr.write("rings are not pinned\n")
        assert "rings are not pinned\n- waiting for the first step" in written(console)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
