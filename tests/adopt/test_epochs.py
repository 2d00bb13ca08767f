"""Epochs of a script: saved one by one, counted on after a stop, ended early; with an undisturbed run's bits."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rowcast
from rowcast.runtime.checkpoint_manifest import newest_checkpoint, read_manifest
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.runtime.process import TOGETHER_S
from tests.adopt.scripts import Launches, copied, make, same, train_all, train_on
from tests.support.facts import facts

DATASET, EVALUATING = "tests.adopt.clicks:listed", "tests.adopt.clicks:lists"
WIDE = "ebc.embedding_bags.wide.weight"


class Script:
    """A training script of three epochs of four batches, with a schedule; what it did, in order."""

    def __init__(
        self, run_dir: Path, act: Callable[[Any, int, Any], object] = lambda loader, epoch, batch: None, **options: Any
    ) -> None:
        """`act` is called behind each step, and with batch None behind each epoch, where the schedule has stepped."""
        self.model, self.optimizer = make(run_dir, optimizer="adam")
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.losses: list[float] = []
        self.epochs: list[tuple[int, int]] = []  # each with its batches
        self.rates: list[float] = []
        named = {"epochs": 3, "dense": (self.model, self.optimizer, self.schedule), "dataset": DATASET, **options}
        with rowcast.connect(self.model.ebc, **named) as loader:
            self.loader = loader
            for epoch in loader.epochs:
                before = len(self.losses)
                for batch in loader:
                    self.rates.append(self.optimizer.param_groups[0]["lr"])
                    self.losses.append(train_on(self.model, self.optimizer, batch))
                    act(loader, epoch, batch)
                self.epochs.append((epoch, len(self.losses) - before))
                if loader.stopped:
                    break
                self.schedule.step()
                act(loader, epoch, None)
            self.end = copied(self.model.state_dict())


STOPS: dict[str, tuple[Callable[[Any], bool], int]] = {
    "in the loop": (lambda batch: batch is not None and batch.train_step == 5, 6),
    "with an epoch's last batch": (lambda batch: batch is not None and batch.train_step == 7, 8),
    "between two epochs": (lambda batch: batch is None, 4),
}


@pytest.mark.parametrize("where", STOPS)
def test_a_run_that_the_script_stops_goes_on_right_there(where: str, tmp_path: Path, launches: Launches) -> None:
    is_there, steps = STOPS[where]
    whole = Script(tmp_path / "whole")
    assert whole.epochs == [(0, 4), (1, 4), (2, 4)]

    def stop(loader: Any, epoch: int, batch: Any) -> None:
        if is_there(batch) and not loader.stopped:
            loader.stop("enough")

    stopped = Script(tmp_path / "stopped", stop)
    assert stopped.losses == whole.losses[:steps]
    assert stopped.loader.stopped == "enough"
    assert list(stopped.loader) == []
    assert list(stopped.loader.epochs) == []
    assert launches.children[-1].code == 0
    newest = newest_checkpoint(tmp_path / "stopped")
    assert newest is not None
    assert read_manifest(newest).position.train_step == steps

    shorter = Script(tmp_path / "shorter", max_steps=steps)
    assert same(stopped.end, shorter.end)

    rest = Script(tmp_path / "stopped")
    assert stopped.losses + rest.losses == whole.losses
    assert stopped.rates + rest.rates == whole.rates
    assert same(rest.end, whole.end)
    assert (
        rest.epochs[0]
        == {"in the loop": (1, 2), "with an epoch's last batch": (1, 0), "between two epochs": (1, 4)}[where]
    )
    assert launches.remains() == []


def test_a_batch_that_was_not_looked_at_is_the_first_of_the_run_that_goes_on(
    tmp_path: Path, launches: Launches
) -> None:
    whole = Script(tmp_path / "whole")
    model, optimizer = make(tmp_path / "stopped", optimizer="adam")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    loader = rowcast.connect(model.ebc, DATASET, epochs=3, dense=(model, optimizer, schedule))
    for batch in loader:
        if batch.train_step == 2:
            loader.stop()
            break
        losses.append(train_on(model, optimizer, batch))
    assert len(model.state_dict()) == 4
    rest = Script(tmp_path / "stopped")
    assert losses + rest.losses == whole.losses
    assert same(rest.end, whole.end)


def test_a_stop_before_the_first_batch_trains_nothing(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    start = copied(model.state_dict())
    with rowcast.connect(model.ebc, DATASET, dense=(model, optimizer)) as loader:
        loader.stop()
        assert list(loader) == []
        assert same(dict(model.state_dict()), start)
    assert launches.children[-1].code == 0
    assert launches.remains() == []


def test_a_stop_asked_for_before_the_optimizer_steps_comes_behind_the_step(tmp_path: Path, launches: Launches) -> None:
    whole = Script(tmp_path / "whole")
    model, optimizer = make(tmp_path / "stopped", optimizer="adam")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    steps = 0
    with rowcast.connect(model.ebc, DATASET, epochs=3, dense=(model, optimizer, schedule)) as loader:
        for dense, sparse, labels in loader:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)
            loader.stop()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            steps += 1
    assert steps == 1
    assert Script(tmp_path / "stopped").losses == whole.losses[1:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_run_behind_the_step_in_hand_and_the_script_goes_on(
    number: signal.Signals, tmp_path: Path, launches: Launches, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = {own: signal.getsignal(own) for own in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def interrupt(loader: Any, epoch: int, batch: Any) -> None:
        if batch is not None and batch.train_step == 5:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)  # as `timeout` does

    whole = Script(tmp_path / "whole")
    stopped = Script(tmp_path / "stopped", interrupt)
    assert stopped.losses == whole.losses[:6]
    err = capfd.readouterr().err
    assert f"rowcast: {number.name} came: the run stops after the current step" in err
    assert f"rowcast: stopped by {number.name} after 6 train steps, in epoch 1; the checkpoint is in" in err
    assert {own: signal.getsignal(own) for own in handlers} == handlers
    rest = Script(tmp_path / "stopped")
    assert stopped.losses + rest.losses == whole.losses
    assert same(rest.end, whole.end)


def test_a_signal_more_than_a_second_later_is_an_interrupt(tmp_path: Path, launches: Launches) -> None:
    def interrupt(loader: Any, epoch: int, batch: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(TOGETHER_S)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Script(tmp_path, interrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert launches.remains() == []


def test_a_scripts_own_handler_stays(tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        done = Script(
            tmp_path, lambda loader, epoch, batch: os.kill(os.getpid(), signal.SIGINT) if batch is None else None
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] * 3
    assert len(done.losses) == 12


def test_a_complete_run_is_shown_once_more_and_not_trained(
    tmp_path: Path, launches: Launches, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = Script(tmp_path)
    capfd.readouterr()
    again = Script(tmp_path)
    assert again.epochs == []
    assert same(again.end, whole.end)
    assert again.schedule.state_dict() == whole.schedule.state_dict(), "what the script did after its last epoch counts"
    assert len(launches.children) == 1, "no prefetcher is needed"
    assert (
        "is complete after 12 train steps, and nothing is trained; a larger epochs=N trains it further"
        in capfd.readouterr().err
    )
    model, optimizer = make(tmp_path, optimizer="adam")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert (
        train_all(model, optimizer, rowcast.connect(model.ebc, DATASET, epochs=3, dense=(model, optimizer, schedule)))
        == []
    )
    assert same(dict(model.state_dict()), whole.end)


def test_a_script_that_counts_epochs_by_itself_is_told_which_one_goes_on(
    tmp_path: Path, launches: Launches, capfd: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = make(tmp_path, optimizer="adam")
    with rowcast.connect(model.ebc, DATASET, epochs=3, dense=(model, optimizer)) as loader:
        for number, batch in enumerate(batch for _ in loader.epochs for batch in loader):
            train_on(model, optimizer, batch)
            if number == 5:
                loader.stop()
    assert "`for epoch in loader.epochs` counts on" not in capfd.readouterr().err
    model, optimizer = make(tmp_path, optimizer="adam")
    with rowcast.connect(model.ebc, DATASET, epochs=3, dense=(model, optimizer)) as loader:
        assert [len(train_all(model, optimizer, loader)) for _ in range(3)] == [2, 4, 0]
    assert "this first `for` is the rest of epoch 1, counted from 0" in capfd.readouterr().err


def test_a_script_with_other_settings_is_told_before_anything_starts(tmp_path: Path, launches: Launches) -> None:
    Script(tmp_path)
    model, optimizer = make(tmp_path, optimizer="sgd")
    with pytest.raises(
        ConfigError,
        match=facts("12 train steps", "optimizer.sparse.kind", "sgd", "adam"),
    ):
        rowcast.connect(model.ebc, DATASET, epochs=3, dense=(model, optimizer))
    assert len(launches.children) == 1


def test_a_script_that_died_behind_its_last_batch_does_the_rest_of_its_last_epoch(
    tmp_path: Path, launches: Launches
) -> None:
    whole = Script(tmp_path / "whole")

    def die(loader: Any, epoch: int, batch: Any) -> None:
        if epoch == 2 and batch is None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Script(tmp_path / "died", die)
    rest = Script(tmp_path / "died")
    assert rest.epochs == [(2, 0)]
    assert same(rest.end, whole.end)
    assert rest.schedule.state_dict() == whole.schedule.state_dict()
    assert Script(tmp_path / "died").epochs == []


def test_a_complete_run_goes_on_with_more_epochs(tmp_path: Path, launches: Launches) -> None:
    whole = Script(tmp_path / "whole", epochs=5)
    assert Script(tmp_path / "grown").losses == whole.losses[:12]
    rest = Script(tmp_path / "grown", epochs=5)
    assert rest.losses == whole.losses[12:]
    assert rest.rates == whole.rates[12:]
    assert same(rest.end, whole.end)


def test_an_epoch_without_a_loop_over_the_loader_is_a_mistake(tmp_path: Path, launches: Launches) -> None:
    model, optimizer = make(tmp_path)
    with rowcast.connect(model.ebc, DATASET, epochs=3, dense=(model, optimizer)) as loader:
        epochs = loader.epochs
        assert next(epochs) == 0
        with pytest.raises(RuntimeError, match=facts("epoch 0", "for batch in loader")):
            next(epochs)


def test_an_evaluation_that_a_stop_cuts_in_two_is_whole_in_the_run_that_goes_on(
    tmp_path: Path, launches: Launches
) -> None:
    found: list[list[float | None]] = []
    for name in ("whole", "stopped", "stopped"):
        model, optimizer = make(tmp_path / name)
        with rowcast.connect(model.ebc, EVALUATING, evaluate=True, dense=(model, optimizer)) as loader:
            for batch in loader:
                if batch.kind == "train":
                    train_on(model, optimizer, batch)
                    continue
                loader.record(logits=model.eval()(batch.dense_features, batch.sparse_features))
                model.train()
                if name == "stopped" and not found[1:]:
                    loader.stop()
        found.append([] if loader.evaluation is None else [loader.evaluation.logloss])
    assert found == [found[0], [], found[0]]
    assert found[0]


def stopped_in_the_third_epoch(run_dir: Path) -> Path:
    """Leaves a checkpoint behind each of the first two; returns the newer one."""

    def die(loader: Any, epoch: int, batch: Any) -> None:
        if epoch == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Script(run_dir, die, save_every="epoch")
    newest = newest_checkpoint(run_dir)
    assert newest is not None
    assert read_manifest(newest).train_steps == 8
    return newest


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


# no optimizer step in this process yet
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_a_run_whose_newest_checkpoint_is_damaged_continues_from_the_one_before(
    tmp_path: Path, launches: Launches
) -> None:
    whole = Script(tmp_path / "whole")
    damage(next(stopped_in_the_third_epoch(tmp_path / "died").glob("*.safetensors")))
    rest = Script(tmp_path / "died", save_every="epoch")
    assert rest.epochs == [(0, 0), (1, 4), (2, 4)], "the schedule steps behind epoch 0"
    assert rest.rates == whole.rates[4:]
    assert same(rest.end, whole.end)


def test_loaded_tables_do_not_replace_a_run_whose_newest_manifest_is_damaged(
    tmp_path: Path, launches: Launches
) -> None:
    newest = stopped_in_the_third_epoch(tmp_path)
    damage(newest / "manifest.json")
    model, optimizer = make(tmp_path, optimizer="adam")
    assert model.ebc.has_run
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    with pytest.raises(ConfigError, match="run of 4 train steps"):
        rowcast.connect(model.ebc, DATASET, epochs=3, dense=(model, optimizer))
    damage(newest.with_name("step-000000000004") / "manifest.json")
    model, optimizer = make(tmp_path, optimizer="adam")
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()}, strict=False)
    with (
        pytest.raises(RowcastError, match="2 checkpoints"),
        rowcast.connect(model.ebc, DATASET, epochs=3, dense=(model, optimizer)) as loader,
    ):
        list(loader)
