"""Keeps a run's losses and evaluations: in `losses.f32` as it grows, and in checkpoints."""

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

import msgspec
import numpy as np
import torch

from rowcast.runtime.arrays import F32
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.disk import not_a_link
from rowcast.runtime.errors import RemoteProtocolError, RowcastError, advice
from rowcast.trainer.models.evaluate import Evaluation
from rowcast.trainer.report.report_json import RECENT

RESULTS = LOSSES, REPORT, PAGE = "losses.f32", "report.json", "report.html"


class ResultFiles:
    """Implements `loop.Results`. Use as a context manager, once per attempt.

    Keeps all losses of the run, 4 bytes per train step: a checkpoint holds them, so that `losses.f32` is the same after
    any restart."""

    def __init__(self, run_dir: Path) -> None:
        self.evaluations: list[Evaluation] = []  # of the whole run, restarts included
        self.listeners: Sequence[Callable[[Evaluation], None]] = ()  # called with each finished evaluation
        self.skipped = array("q")  # train steps whose dense weights a model's own step left as they were
        self.path = run_dir / LOSSES
        self._losses = array("f")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        with self._sentence():
            self._file = open(self.path, "wb", opener=not_a_link)
        return self

    def __exit__(self, *error: object) -> None:
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
        """Returns a copy of the losses from that train step of the run on."""
        return np.array(memoryview(self._losses)[train_step:], np.float32)

    @property
    def mean_loss(self) -> float | None:
        recent = np.array(self._losses[-RECENT:])
        return float(np.mean(recent, dtype=np.float64)) if len(recent) else None

    @property
    def first_loss(self) -> float | None:
        return self._losses[0] if self._losses else None

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
        for listener in self.listeners:
            listener(result)

    def state(self) -> dict[str, torch.Tensor]:
        evaluations = msgspec.json.encode(self.evaluations)
        return {
            "losses": torch.from_numpy(self.losses_from(0)),
            "evaluations": torch.frombuffer(bytearray(evaluations), dtype=torch.uint8),
            **({"skipped": torch.tensor(self.skipped, device="cpu")} if self.skipped else {}),
        }

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        if "losses" in tensors:
            self._losses = array("f", tensors["losses"].numpy().tobytes())
            self._write(self._losses.tobytes())
        if "skipped" in tensors:
            self.skipped[:] = array("q", tensors["skipped"].tolist())
        self.restore_evaluations(tensors)

    def restore_evaluations(self, tensors: dict[str, torch.Tensor]) -> None:
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
            change = advice(error.errno, "let this user write there")
            raise RowcastError(f"{self.path}: losses cannot be written ({error.strerror}); {change}") from None


class ResultsInMemory(ResultFiles):
    """The results of a rank above 0, which keeps the same ones; only rank 0 writes them."""

    def __enter__(self) -> Self:
        return self

    def _write(self, content: bytes) -> None:
        pass


class EvaluationOnly(ResultsInMemory):
    """The results of `trainer eval`, and of a script that keeps its own: restores nothing from a checkpoint."""

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Does nothing: the run's results are not these."""
