"""The run directory: which process holds it, and whether a run in it is over."""

import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from protocol.errors import ConfigError
from protocol.manifest import newest_checkpoint, read_manifest

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

    def remove(self, names: Iterable[str]) -> None:
        """Removes files and folders of an earlier run, where they are there."""
        for name in names:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def refuse_used(self) -> None:
        """Raises ConfigError where a checkpoint of an earlier run is here: it would be mixed with this one's."""
        folder = newest_checkpoint(self.path)
        if folder is None:
            return
        manifest = read_manifest(folder)
        if manifest.finished:
            how = f"finished after {manifest.train_steps} train steps"
        else:
            how = f"was stopped after {manifest.train_steps} train steps, and resuming is not supported yet"
        raise ConfigError(f"the run in {self.path} {how}; add --fresh to start over, or set another job.run_dir")
