"""Where a run's results go: `losses.f32` as it grows, the last evaluation, and both of them into a checkpoint."""

import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec
import numpy as np
import torch

from protocol.errors import RemoteProtocolError, RowcastError
from protocol.faults import crash_point
from trainer.dense import Tensors
from trainer.report import Evaluation

RECENT = 100  # losses that the report's mean is of


class ResultFiles:
    """Implements `loop.Results`. Use as a context manager, once an incarnation.

    All losses of the run are kept, 4 bytes a train step: a checkpoint holds them, so that `losses.f32` is the same after any restart.
    """

    def __init__(self, run_dir: Path) -> None:
        self.evaluation_result: Evaluation | None = None
        self.shown: Callable[[Evaluation], None] = lambda result: None
        self._path = run_dir / "losses.f32"
        self._losses = array("f")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        with self._sentence():
            self._file = self._path.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """All losses are in the file, also for a reader that comes after a loss of power. Idempotent."""
        if self._file is not None:
            file, self._file = self._file, None
            with self._sentence(), file:
                file.flush()
                os.fsync(file.fileno())

    @property
    def train_steps(self) -> int:
        """Of the run, those before a restart included."""
        return len(self._losses)

    @property
    def mean_loss(self) -> float | None:
        return float(np.mean(self._losses[-RECENT:], dtype=np.float64)) if self._losses else None

    def loss(self, train_step: int, loss: np.float32) -> None:
        if train_step != len(self._losses):
            raise RemoteProtocolError(f"train step {train_step} came where {len(self._losses)} losses were restored and computed before it")
        crash_point("loss not written")
        self._write(loss.tobytes())
        crash_point("loss written")
        self._losses.append(float(loss))

    def evaluation(self, result: Evaluation) -> None:
        self.evaluation_result = result
        self.shown(result)

    def state(self) -> Tensors:
        result = b"" if self.evaluation_result is None else msgspec.json.encode(self.evaluation_result)
        return {
            "losses": torch.tensor(np.array(self._losses, np.float32)),
            "evaluation": torch.tensor(list(result), dtype=torch.uint8),
        }

    def restore(self, tensors: Tensors) -> None:
        if "losses" in tensors:
            self._losses = array("f", tensors["losses"].numpy().tobytes())
            self._write(self._losses.tobytes())
        if "evaluation" in tensors and len(tensors["evaluation"]):
            self.evaluation_result = msgspec.json.decode(tensors["evaluation"].numpy().tobytes(), type=Evaluation)

    def _write(self, content: bytes) -> None:
        assert self._file is not None, "losses come only while the run is open"
        with self._sentence():
            self._file.write(content)

    @contextmanager
    def _sentence(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RowcastError(f"{self._path}: losses cannot be written ({error.strerror}); free space there and start over") from None


class EvaluationOnly(ResultFiles):
    """Of `trainer eval`: it writes no losses, and takes none from the checkpoint."""

    def __enter__(self) -> Self:
        return self

    def restore(self, tensors: Tensors) -> None:
        """The run's own results are none of this one's."""
