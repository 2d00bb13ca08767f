"""Locks a run directory, marks its run complete, and notes who starts there and the error that a process failed with.

    <role>.failure    of a process that may fail before the link exists; ends a waiting peer (`failure_since`).
                      A parent notes there what killed its child, for the peer that has lost it
    <role>.starting   the peer waits for as long as that process lives (`PeerStart`)

A launcher notes the start of its children (for several ranks, torchrun and the parent of the prefetchers), and a
process that has read its job notes itself, before its slow imports. Once it can be reached it removes the note; from
then on `transport.connect_timeout` counts. The next start removes a failure note.
"""

import fcntl
import os
import re
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, Self

import msgspec

from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.disk import is_locked, not_a_link, try_lock, unreadable
from rowcast.runtime.errors import ConfigError, PeerKilled, PeerLost, RowcastError, advice, cleaned, peer_failure, told
from rowcast.runtime.machine import OtherProcess, boot_id, seen

COMPLETE = "complete"
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # the locked file is overwritten
Role = Literal["prefetcher", "trainer"]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    train_steps: int
    epochs: int  # data.epochs at that time
    max_steps: int | None = None  # --max-steps if that ended the run; None if the data did
    patience: int = 0  # eval.patience if that ended the run
    reason: str = ""  # as the trainer says, if eval.patience ended the run

    @property
    def cause(self) -> tuple[str, str]:
        """What ended the run, and the key or option that changes it."""
        if self.patience:
            return self.reason, "eval.patience"
        if self.max_steps is None:
            return f"data.epochs = {self.epochs}", "data.epochs"
        return f"--max-steps {self.max_steps}", "--max-steps"

    def leaves_more(self, epochs: int, patience: int, max_steps: int | None) -> bool:
        """Returns whether a run with these settings, of at most `max_steps` train steps, would train further."""
        if max_steps is not None and max_steps <= self.train_steps:
            return False
        if self.patience:
            return not 0 < patience <= self.patience
        return epochs > self.epochs or self.max_steps is not None


class FailureNote(msgspec.Struct, frozen=True, kw_only=True):
    code: int  # 0: its parent noted that it was killed
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
        with ExitStack() as stack:
            stack.callback(os.close, self._lock)
            if not try_lock(self._lock, self.path / f"{self._role}.lock"):
                holder = os.pread(self._lock, 32, 0).decode() or "unknown"
                raise ConfigError(
                    f"run directory {self.path} is held by a {self._role} with process id {holder}; "
                    "end it first, or use another run directory (job.run_dir)"
                )
            stack.pop_all()
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            has_started(self.path, self._role)  # it may have been refused
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open too
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
        write_note(self.path, self._role, *told(error))

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

    def was_completed_since(self, began_s: float) -> bool:
        """`began_s`: Unix time."""
        with suppress(FileNotFoundError):
            return (self.path / COMPLETE).stat().st_mtime >= began_s
        return False

    def refuse_complete(self, epochs: int, patience: int, max_steps: int | None = None) -> None:
        """Raises ConfigError if the run here is complete and these settings add no train steps.

        A run that was killed or stopped continues."""
        completion = self.completion()
        if completion is not None and not completion.leaves_more(epochs, patience, max_steps):
            cause, key = completion.cause
            raise ConfigError(
                f"the run in {self.path} finished after {completion.train_steps} train steps ({cause}); to train it "
                f"further raise {key}; to train its model on other data, set another job.run_dir and add "
                f"--from {self.path}; to train a new model in its place add --fresh (in a script: fresh=True): "
                "it replaces this one with its first checkpoint"
            )


def holder(run_dir: Path, role: Role) -> str | None:
    """Returns the process id that the running process of this role has noted ("unknown" if none), or None if no such
    process runs. Raises ConfigError, Unreadable."""
    path = run_dir / f"{role}.lock"
    try:
        with path.open() as lock:
            return (lock.read(32) or "unknown") if is_locked(lock.fileno(), path) else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from None


def failure_path(run_dir: Path, role: Role) -> Path:
    return run_dir / f"{role}.failure"


def write_note(run_dir: Path, role: Role, code: int, sentence: str) -> None:
    with suppress(OSError):
        note = FailureNote(code=code, sentence=sentence, boot_id=boot_id(), at_s=time.monotonic())
        write_durably(failure_path(run_dir, role), msgspec.json.encode(note) + b"\n")


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
    if not is_new:
        return None
    return peer_failure(note.code, note.sentence) if note.code else PeerKilled(cleaned(note.sentence))


PAIR_FOLDER = re.compile(r"rank-[0-9]{3,}")


def pair_folder(run_dir: Path, rank: int, count: int) -> Path:
    """Returns the folder of a rank of `count`, for its locks, socket, failure notes, log, table files and timeline."""
    assert 0 <= rank < count, f"rank {rank} of {count}"
    return run_dir if count == 1 else run_dir / f"rank-{rank:03d}"


def unused_pair_folders(run_dir: Path, count: int) -> list[Path]:
    """Lists folders there that belong to no rank of `count`, only to ranks of a different count; `run_dir` may be
    one."""
    used = {pair_folder(run_dir, rank, count) for rank in range(count)}
    ranks = (path for path in sorted(run_dir.iterdir()) if PAIR_FOLDER.fullmatch(path.name) and not path.is_symlink())
    return [folder for folder in (run_dir, *ranks) if folder not in used]


def note_path(folder: Path, role: Role) -> Path:
    return folder / f"{role}.starting"


def note_start(folder: Path, role: Role, pid: int) -> None:
    """If the note cannot be written, the peer waits until its time-out."""
    process = seen(pid)
    with suppress(OSError):
        if process is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with open(note_path(folder, role), "w", opener=not_a_link) as note:
                note.write(f"{pid} {process.start}")


def has_started(folder: Path, role: Role) -> None:
    with suppress(OSError):
        note_path(folder, role).unlink(missing_ok=True)


class PeerStart:
    """Watches the process that has noted its start."""

    def __init__(self, folder: Path, role: Role, hangs_after_s: float) -> None:
        self._path, self._hangs_after_s = note_path(folder, role), hangs_after_s
        self._ticks: int | None = None
        self._worked_s = 0.0  # when `_ticks` grew, by the monotonic clock

    def goes_on(self) -> bool:
        """Whether that process lives on this host, is not stopped by a signal, and has used processor time within
        `hangs_after_s`."""
        now_s, ticks = time.monotonic(), None
        with suppress(OSError, ValueError):  # no note, or one that is just being written
            pid, start = self._path.read_text().split()
            ticks = OtherProcess(int(pid), start).processor_ticks
        if ticks != self._ticks:
            self._ticks, self._worked_s = ticks, now_s
        return ticks is not None and now_s - self._worked_s < self._hangs_after_s
