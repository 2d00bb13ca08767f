"""Reads from the kernel the state of a different process on this host."""

import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CREDENTIALS = struct.Struct("3i")  # ucred: process, user, group
AFTER_COMMAND = 3  # the fields of /proc/PID/stat are counted from 1, and the second may contain any text
STATE, USER_TIME, SYSTEM_TIME, START = 3, 14, 15, 22


class Stat(NamedTuple):
    state: str  # one letter: T if a signal such as SIGSTOP has stopped it, Z if it has ended; t if a debugger holds it
    start: str  # in clock ticks since the host's
    ticks: int  # processor time of all its threads


def stat_of(pid: int) -> Stat | None:
    """Reads a process's state; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = sum(int(fields[number - AFTER_COMMAND]) for number in (USER_TIME, SYSTEM_TIME))
    return Stat(fields[STATE - AFTER_COMMAND], fields[START - AFTER_COMMAND], ticks)


@dataclass(frozen=True, slots=True)
class OtherProcess:
    pid: int
    start: str  # a process number is reused after its process ends

    @property
    def runs(self) -> bool:
        """Returns whether it lives and no signal has stopped it."""
        return self.processor_ticks is not None

    @property
    def processor_ticks(self) -> int | None:
        """Returns the processor time that it has used; None unless it `runs`."""
        found = stat_of(self.pid)
        runs = found is not None and found.start == self.start and found.state not in "TZX"
        return found.ticks if found is not None and runs else None


def seen(pid: int) -> OtherProcess | None:
    found = stat_of(pid)
    return None if found is None else OtherProcess(pid, found.start)


def at_other_end(descriptor: int) -> OtherProcess | None:
    """Returns the process that connected or listened at the other end of a unix socket.

    None if it is not visible from here, as between containers, or if this is not a unix socket."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:  # already closed
        return None
    try:
        pid, _, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    except OSError:
        return None
    finally:
        connection.detach()
    return seen(pid) if pid else None


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Returns the host kernel's boot id, the same in all its containers. Raises OSError.

    Processes with the same one have the same `time.monotonic` and `time.perf_counter`."""
    return BOOT_ID.read_text().strip()
