"""The run directory: which process holds it, and whether a run in it is over."""

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from protocol.errors import ConfigError
from protocol.manifest import write_durably

COMPLETE = "complete"
Role = Literal["prefetcher", "trainer"]


class RunDirectory:
    """Holds `<run_dir>/<role>.lock` for as long as it is open. The kernel frees the lock of a process that is killed."""

    def __init__(self, path: Path, role: Role) -> None:
        self.path = path
        self._role = role
        self._lock: int | None = None

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / f"{self._role}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"job.run_dir = {str(self.path)!r} cannot be written ({error.strerror}); choose another") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode() or "unknown"
            os.close(self._lock)
            raise ConfigError(
                f"run directory {self.path} is held by a {self._role} with process id {holder}; end it or set another job.run_dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove_run(self) -> None:
        """Gives up the run that is here."""
        for name in ("checkpoints", "tables"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        (self.path / COMPLETE).unlink(missing_ok=True)

    def mark_complete(self, train_steps: int) -> None:
        """Both sides are done: the last checkpoint is on disk, and the trainer has written its report."""
        write_durably(self.path / COMPLETE, f"{train_steps}\n".encode())

    def refuse_complete(self) -> None:
        """Raises ConfigError where the run that is here is over. One that was killed or stopped goes on."""
        path = self.path / COMPLETE
        if path.exists():
            raise ConfigError(
                f"the run in {self.path} finished after {path.read_text().strip()} train steps; add --fresh to start over (in a script: "
                f"fresh=True), or set another job.run_dir"
            )
