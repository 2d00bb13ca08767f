"""Locks a run directory, marks its run complete, and notes the error that a process failed with.

A process may fail before the link exists. So it writes a note, `<role>.failure`, which ends a waiting peer
(`failure_since`). The process's next start removes the note.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

import msgspec

from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.clock import boot_id
from rowcast.runtime.errors import ConfigError, PeerLost, RowcastError, advice, peer_failure, told

COMPLETE = "complete"
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # the locked file is overwritten
Role = Literal["prefetcher", "trainer"]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    train_steps: int
    epochs: int  # data.epochs at that time
    max_steps: int | None = None  # --max-steps if that ended the run; None if the data did

    @property
    def cause(self) -> str:
        return f"data.epochs = {self.epochs}" if self.max_steps is None else f"--max-steps {self.max_steps}"

    def leaves_more(self, epochs: int, max_steps: int | None) -> bool:
        """Returns whether a run of `epochs` epochs and at most `max_steps` train steps would train further."""
        if max_steps is not None and max_steps <= self.train_steps:
            return False
        return epochs > self.epochs or self.max_steps is not None


class FailureNote(msgspec.Struct, frozen=True, kw_only=True):
    code: int
    sentence: str
    boot_id: str
    at_s: float  # by the monotonic clock of that boot


class RunDirectory:
    """Locks `<run_dir>/<role>.lock` while it is open. The kernel frees the lock of a killed process."""

    def __init__(self, path: Path, role: Role) -> None:
        self.path = path
        self._role = role
        self._lock: int | None = None

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / f"{self._role}.lock", LOCK_FLAGS, 0o600)
        except OSError as error:
            change = advice(error.errno, "choose another")
            raise ConfigError(
                f"job.run_dir = {str(self.path)!r} cannot be written ({error.strerror}); {change}"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode() or "unknown"
            os.close(self._lock)
            raise ConfigError(
                f"run directory {self.path} is held by a {self._role} with process id {holder}; "
                "end it or set another job.run_dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def clear_failure(self) -> None:
        with suppress(OSError):  # a remaining note is older than every reader
            failure_path(self.path, self._role).unlink(missing_ok=True)

    def note_failure(self, error: BaseException) -> None:
        """Notes `error`, to end a waiting peer. Notes nothing if the peer is lost or failed first, or after an
        interrupt.

        If the note cannot be written, the peer waits until its time-out."""
        is_own = isinstance(error, Exception) and not isinstance(error, PeerLost)
        if not is_own or (isinstance(error, RowcastError) and error.is_peers):
            return
        code, sentence = told(error)
        with suppress(OSError):
            note = FailureNote(code=code, sentence=sentence, boot_id=boot_id(), at_s=time.monotonic())
            write_durably(failure_path(self.path, self._role), msgspec.json.encode(note) + b"\n")

    def mark_complete(self, completion: Completion) -> None:
        """Call when both sides are done: the last checkpoint is on disk, and the trainer has written its report."""
        write_durably(self.path / COMPLETE, msgspec.json.encode(completion) + b"\n")

    def go_on(self) -> None:
        (self.path / COMPLETE).unlink(missing_ok=True)

    def completion(self) -> Completion | None:
        """Returns how the run here ended; None if it is not complete. Raises ConfigError."""
        path = self.path / COMPLETE
        try:
            return msgspec.json.decode(path.read_bytes(), type=Completion)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"{path}: cannot be read ({error}); remove it if the run in {self.path} is not complete"
            ) from None

    def refuse_complete(self, epochs: int, max_steps: int | None = None) -> None:
        """Raises ConfigError if the run here is complete and `epochs` and `max_steps` add no train steps.

        A run that was killed or stopped continues."""
        completion = self.completion()
        if completion is not None and not completion.leaves_more(epochs, max_steps):
            raise ConfigError(
                f"the run in {self.path} finished after {completion.train_steps} train steps ({completion.cause}); "
                "to train it further raise that; to train its model on other data, set another job.run_dir and add "
                f"--from {self.path}; to train a new model in its place add --fresh (in a script: fresh=True): "
                "it replaces this one with its first checkpoint"
            )


def is_held(run_dir: Path, role: Role) -> bool:
    """Returns whether a process of that role is running there."""
    try:
        with (run_dir / f"{role}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def failure_path(run_dir: Path, role: Role) -> Path:
    return run_dir / f"{role}.failure"


def note_refusal(run_dir: Path, role: Role, error: ConfigError) -> None:
    """Like `note_failure`, for a process that has not locked its run directory yet. Without a run directory no peer
    waits."""
    with suppress(ConfigError):  # a different process of that role holds it and was not refused
        if run_dir.is_dir():
            with RunDirectory(run_dir, role) as directory:
                directory.note_failure(error)


def failure_since(run_dir: Path, role: Role, since_s: float) -> RowcastError | None:
    """Returns the error of a process of that role that failed after `since_s`, by this host's monotonic clock, or
    None."""
    try:
        note = msgspec.json.decode(failure_path(run_dir, role).read_bytes(), type=FailureNote)
        is_new = note.boot_id == boot_id() and note.at_s >= since_s
    except (OSError, msgspec.DecodeError):  # there is no note, or it is not ours
        return None
    return peer_failure(note.code, note.sentence) if is_new else None
