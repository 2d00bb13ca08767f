"""Keeps a run's losses and evaluations: in `losses.f32` as it grows, and in checkpoints."""

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec
import numpy as np
import torch

from rowcast.runtime.arrays import F32
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import RemoteProtocolError, RowcastError
from rowcast.trainer.models.model_state import Tensors
from rowcast.trainer.report.report_json import Evaluation

RESULTS = LOSSES, REPORT, PAGE = "losses.f32", "report.json", "report.html"
RECENT = 100  # losses that the report averages
MAX_EVALUATIONS = 1000  # evaluations that are kept


class EarlierResults:
    """Results of an earlier run, kept in `<run_dir>/earlier` until the run that replaces it has a checkpoint on disk.

    `<run_dir>/earlier/run_id` names that run. Without this file, the folder is not ours; other files in it never are.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "earlier"
        self._owner = self._folder / "run_id"

    def set_aside(self, run_id: str) -> None:
        """A new run begins, which replaces run `run_id` ("" if that has no checkpoint).

        If a killed run has already set aside the results of run `run_id`, its own results are deleted.
        """
        if self._owner.exists():
            if self._owner.read_text() == run_id:
                for name in RESULTS:
                    (self._run_dir / name).unlink(missing_ok=True)
                return
            self.give_up()  # they belong to a run that was replaced meanwhile
        found = [path for name in RESULTS if (path := self._run_dir / name).exists()]
        if found:
            self._folder.mkdir(exist_ok=True)
            self._owner.write_text(run_id)
            for path in found:
                path.replace(self._folder / path.name)

    def bring_back_of(self, run_id: str) -> None:
        """Restores the results of run `run_id`, which a killed run has set aside but not replaced."""
        if self._owner.exists() and self._owner.read_text() == run_id:
            self.bring_back()

    def bring_back(self) -> None:
        """The new run has ended without a checkpoint."""
        if self._owner.exists():
            for name in RESULTS:
                with suppress(FileNotFoundError):
                    (self._folder / name).replace(self._run_dir / name)
            self.give_up()

    def give_up(self) -> None:
        """The earlier run is replaced. Other files in the folder stay."""
        if not self._owner.exists():
            return
        with suppress(OSError):
            for name in (*RESULTS, self._owner.name):
                (self._folder / name).unlink(missing_ok=True)
            self._folder.rmdir()


class ResultFiles:
    """Implements `loop.Results`. Use as a context manager, once per attempt.

    Keeps all losses of the run, 4 bytes per train step: a checkpoint holds them, so that `losses.f32` is the same after
    any restart.
    """

    def __init__(self, run_dir: Path) -> None:
        # for the whole run, restarts included; thinned if there are very many
        self.evaluations: list[Evaluation] = []
        self.listeners: Sequence[Callable[[Evaluation], None]] = ()  # called with each evaluation as it ends
        self.path = run_dir / LOSSES
        self._losses = array("f")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        with self._sentence():
            self._file = self.path.open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Writes all losses durably. Idempotent."""
        if self._file is not None:
            file, self._file = self._file, None
            with self._sentence(), file:
                file.flush()
                os.fsync(file.fileno())

    @property
    def train_steps(self) -> int:
        """Train steps of the run with a loss, restarts included."""
        return len(self._losses)

    @property
    def evaluation_result(self) -> Evaluation | None:
        return self.evaluations[-1] if self.evaluations else None

    def losses_from(self, train_step: int) -> F32:
        """A copy of the losses from that train step of the run on."""
        return np.array(self._losses[train_step:], np.float32)

    @property
    def mean_loss(self) -> float | None:
        return float(np.mean(self._losses[-RECENT:], dtype=np.float64)) if self._losses else None

    def loss(self, train_step: int, loss: np.float32) -> None:
        if train_step != len(self._losses):
            raise RemoteProtocolError(
                f"train step {train_step} came where {len(self._losses)} losses were restored and computed before it"
            )
        crash_point("loss not written")
        self._write(loss.tobytes())
        crash_point("loss written")
        self._losses.append(float(loss))

    def evaluation(self, result: Evaluation) -> None:
        self.evaluations.append(result)
        thin(self.evaluations)
        for listener in self.listeners:
            listener(result)

    def state(self) -> Tensors:
        evaluations = msgspec.json.encode(self.evaluations)
        return {
            "losses": torch.tensor(self.losses_from(0)),
            "evaluations": torch.frombuffer(bytearray(evaluations), dtype=torch.uint8),
        }

    def restore(self, tensors: Tensors) -> None:
        if "losses" in tensors:
            self._losses = array("f", tensors["losses"].numpy().tobytes())
            self._write(self._losses.tobytes())
        self.restore_evaluations(tensors)

    def restore_evaluations(self, tensors: Tensors) -> None:
        if "evaluations" in tensors:
            self.evaluations = msgspec.json.decode(tensors["evaluations"].numpy().tobytes(), type=list[Evaluation])

    def _write(self, content: bytes) -> None:
        assert self._file is not None, "losses come only while the run is open"
        with self._sentence():
            self._file.write(content)

    @contextmanager
    def _sentence(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RowcastError(
                f"{self.path}: losses cannot be written ({error.strerror}); free space there and run again"
            ) from None


def thin(evaluations: list[Evaluation]) -> None:
    """Keeps MAX_EVALUATIONS, always the first and the last; drops the evaluation whose neighbours are closest.

    The result is a function of the evaluations alone, and so the same after a restart.
    """
    while len(evaluations) > MAX_EVALUATIONS:
        gaps = (evaluations[i + 1].train_step - evaluations[i - 1].train_step for i in range(1, len(evaluations) - 1))
        del evaluations[1 + min(enumerate(gaps), key=lambda gap: gap[1])[0]]


class ResultsInMemory(ResultFiles):
    """The results of a rank that is not the first: the same, but the first rank writes them."""

    def __enter__(self) -> Self:
        return self

    def _write(self, content: bytes) -> None:
        pass


class EvaluationOnly(ResultFiles):
    """The results of `trainer eval`: it writes no losses and restores nothing from the checkpoint."""

    def __enter__(self) -> Self:
        return self

    def restore(self, tensors: Tensors) -> None:
        """The results of the run are not results of this evaluation."""
