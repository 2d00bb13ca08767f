"""Keeps a run's losses and evaluations: in `losses.f32` as it grows, and in checkpoints."""

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

import msgspec
import numpy as np
import torch

from rowcast.protocol.messages import Welcome
from rowcast.runtime.arrays import F32
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.disk import not_a_link
from rowcast.runtime.errors import ConfigError, RemoteProtocolError, RowcastError, advice
from rowcast.trainer.models.evaluate import Evaluation
from rowcast.trainer.report.report_json import RECENT

RESULTS = LOSSES, REPORT, PAGE = "losses.f32", "report.json", "report.html"


class EarlierResults:
    """Results of an earlier run, kept in `<run_dir>/earlier` until the run that replaces it has a checkpoint on disk.

    `<run_dir>/earlier/run_id` names that run. It is called `run_id.partial` while that run's results are being moved. A
    folder with neither file is not ours; nor is any other file."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "earlier"
        self._owner, self._moving = (self._folder / name for name in ("run_id", "run_id.partial"))

    def check(self, welcome: Welcome, *, fresh: bool) -> None:
        """Raises ConfigError if the run would lose results of an earlier one, or cannot keep them. `fresh`: this
        command also replaces them."""
        if welcome.fresh:
            self.check_place()
        resumes = welcome.checkpoint != "" and not welcome.fresh
        if (self._run_dir / REPORT).exists() and not fresh and not resumes:
            raise ConfigError(
                f"a new run begins, but {self._run_dir} holds the report of an earlier one; add --fresh to this "
                "command too, or set another job.run_dir in both"
            )

    def begin(self, welcome: Welcome) -> None:
        """Begins a run, which replaces the earlier one or continues it. Raises ConfigError."""
        if welcome.fresh:
            self.set_aside(welcome.replaces)
            return
        self.give_up()
        for name in (REPORT, PAGE):
            (self._run_dir / name).unlink(missing_ok=True)  # written by this run before it was stopped

    def end(self, welcome: Welcome, *, has_checkpoint: bool) -> None:
        """Ends that run, also after a loss. Without a checkpoint it has replaced nothing."""
        if welcome.fresh and has_checkpoint:
            self.give_up()
        elif welcome.fresh:
            self.bring_back()

    def check_place(self) -> None:
        """Raises ConfigError if foreign files are where results will be set aside."""
        is_free = not os.path.lexists(self._folder) or is_own_folder(self._folder, empty=True)
        if self._results() and not is_free and self._held() is None:
            raise ConfigError(
                f"{self._folder} is where a fresh run keeps the results of the one before until its first checkpoint, "
                "but it holds files that rowcast did not put there; move them elsewhere and start again"
            )

    def set_aside(self, run_id: str) -> None:
        """Sets results aside for a new run, which replaces run `run_id` ("" if that has no checkpoint). Raises
        ConfigError.

        If a killed run has already set aside the results of run `run_id`, deletes the killed run's results."""
        held = self._held()
        if held == run_id and self._owner.exists():
            for path in self._results():
                path.unlink()
            return
        if held is not None and held != run_id:
            self.give_up()  # they belong to a run that was replaced meanwhile
        self.check_place()
        try:
            self._move(self._results(), run_id)
        except OSError as error:
            raise ConfigError(
                f"{self._folder}: the results of the earlier run cannot be kept there ({error.strerror}); let this "
                "user write there and start again"
            ) from None

    def bring_back_of(self, run_id: str) -> None:
        """Restores the results of run `run_id` that a killed run set aside but did not replace."""
        if self._held() == run_id:
            self.bring_back()

    def bring_back(self) -> None:
        """Restores the earlier results: the new run ended without a checkpoint."""
        if self._held() is not None:
            for name in RESULTS:
                with suppress(FileNotFoundError):
                    (self._folder / name).replace(self._run_dir / name)
            self.give_up()

    def give_up(self) -> None:
        """Deletes the earlier results: their run is replaced. Other files in the folder stay."""
        if self._held() is not None:
            with suppress(OSError):
                for name in (*RESULTS, self._moving.name, self._owner.name):
                    (self._folder / name).unlink(missing_ok=True)
                self._folder.rmdir()

    def _results(self) -> list[Path]:
        return [path for name in RESULTS if (path := self._run_dir / name).exists()]

    def _move(self, results: list[Path], run_id: str) -> None:
        if results or self._moving.exists():
            self._folder.mkdir(exist_ok=True)
            self._moving.write_text(run_id)
            for path in results:
                path.replace(self._folder / path.name)
            self._moving.replace(self._owner)

    def _held(self) -> str | None:
        """Returns the run of the results in the folder; None if the folder is not ours."""
        notes = (note for note in (self._owner, self._moving) if note.is_file() and not note.is_symlink())
        note = next(notes, None) if is_own_folder(self._folder) else None
        return None if note is None else note.read_text(errors="replace")


def is_own_folder(path: Path, *, empty: bool = False) -> bool:
    return path.is_dir() and not path.is_symlink() and not (empty and any(path.iterdir()))


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
    """The results of a rank above 0: the same, but only rank 0 writes them."""

    def __enter__(self) -> Self:
        return self

    def _write(self, content: bytes) -> None:
        pass


class EvaluationOnly(ResultsInMemory):
    """The results of `trainer eval`, and of a script that keeps its own: restores nothing from a checkpoint."""

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Does nothing: the run's results are not these."""
