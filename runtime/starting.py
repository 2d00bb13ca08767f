"""Notes in a pair's folder who is starting there, so that the peer waits for as long as that process lives.

a launcher                       notes its children: for several ranks, torchrun and the parent of the prefetchers
a process that has read its job  notes itself, before its slow imports
once it can be reached           removes the note; from then on `transport.connect_timeout` counts
"""

import time
from contextlib import suppress
from pathlib import Path

from rowcast.runtime.other_process import OtherProcess, seen
from rowcast.runtime.run_directory import Role


def note_path(folder: Path, role: Role) -> Path:
    return folder / f"{role}.starting"


def note_start(folder: Path, role: Role, pid: int) -> None:
    """If the note cannot be written, the peer waits until its time-out."""
    process = seen(pid)
    with suppress(OSError):
        if process is not None:
            folder.mkdir(parents=True, exist_ok=True)
            note_path(folder, role).write_text(f"{pid} {process.start}")


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
        """Whether that process lives on this host, no signal has stopped it, and it has used processor time within
        `hangs_after_s`."""
        now_s, ticks = time.monotonic(), None
        with suppress(OSError, ValueError):  # no note, or one that is just being written
            pid, start = self._path.read_text().split()
            ticks = OtherProcess(int(pid), start).processor_ticks
        if ticks != self._ticks:
            self._ticks, self._worked_s = ticks, now_s
        return ticks is not None and now_s - self._worked_s < self._hangs_after_s
