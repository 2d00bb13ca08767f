"""Writes TensorBoard event files on request, at the history's marks, because a call takes tens of microseconds."""

import importlib
import os
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np

from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.models.evaluate import Evaluation
from rowcast.trainer.report.progress import HistoryMark
from rowcast.trainer.report.results import ResultFiles
from rowcast.trainer.step.metrics import StallReason

LOSSES_A_MARK = 10  # at most; the losses of more train steps are averaged


def check_board(folder: Path) -> None:
    """Raises ConfigError if event files cannot be written. Called before training."""
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        raise ConfigError(
            "--tensorboard needs the package tensorboard, which is not installed; pip install 'rowcast[tensorboard]'"
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--tensorboard {folder}: the folder cannot be made ({error.strerror}); choose another"
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--tensorboard {folder}: the folder cannot be written; choose another")


class TensorBoardWriter:
    """Writes the events of one attempt; does nothing without a folder.

    Use as a context manager. The main thread calls every method. The events of a run that continues from a checkpoint
    are marked: TensorBoard then omits an earlier process's events for later steps."""

    def __init__(self, folder: Path | None, results: ResultFiles, first_train_step: int) -> None:
        """`folder` has passed `check_board`; this attempt's train steps begin with `first_train_step`."""
        self._folder = folder
        self._results = results
        self._first_train_step = first_train_step
        self._next_loss = first_train_step
        self._writer: Any = None  # torch's SummaryWriter, whose package has no types

    def __enter__(self) -> Self:
        if self._folder is not None:
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            try:
                self._writer = writer(str(self._folder), purge_step=self._first_train_step)
            except OSError as error:
                self._give_up(error)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Flushes everything to the file. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                self._give_up(error)

    def marked(self, before: HistoryMark, mark: HistoryMark) -> None:
        if self._writer is None:
            return
        seconds, unique_rows = mark.time_s - before.time_s, mark.unique_rows - before.unique_rows
        self._losses()
        if seconds > 0:
            samples = mark.samples + mark.eval_samples - before.samples - before.eval_samples
            self._add("speed/samples_per_s", samples / seconds, mark.train_step)
            for reason, first, last in zip(get_args(StallReason), before.stalls, mark.stalls, strict=True):
                self._add(f"stall_share/{reason}", (last - first) / seconds, mark.train_step)
        if unique_rows:
            self._add("cache/hit_ratio", (mark.hits - before.hits) / unique_rows, mark.train_step)

    def evaluation(self, result: Evaluation) -> None:
        values = {"auc": result.auc, "logloss": result.logloss, "accuracy": result.accuracy}
        values |= {"normalized_entropy": result.normalized_entropy, **result.ranking}
        values |= {f"means/{name}": value for name, value in result.means.items()}
        for task in result.tasks:
            values |= {f"auc/{task.label}": task.auc, f"logloss/{task.label}": task.logloss}
        for name, value in values.items():
            if value is not None:
                self._add(f"eval/{name}", value, result.train_step)

    def _losses(self) -> None:
        """Adds the losses since the last mark; each average is at the last of its train steps."""
        losses = self._results.losses_from(self._next_loss)
        for part in np.array_split(losses, min(LOSSES_A_MARK, max(1, len(losses)))):
            if len(part):
                self._next_loss += len(part)
                self._add("loss", float(part.mean(dtype=np.float64)), self._next_loss)

    def _add(self, name: str, value: float, train_step: int) -> None:
        if self._writer is None:
            return
        try:
            self._writer.add_scalar(name, value, train_step)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Stops writing events after an error, without ending the run."""
        self._writer = None
        get_logger().warning("no more TensorBoard events are written", folder=str(self._folder), error=error.strerror)
