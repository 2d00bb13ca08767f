"""What decides bits besides job and data: torch's threads and facts of the machine. Checkpoints record both.

Also what this process may take (memory and cores of the machine, or less in a control group), what the kernel says of
another process, and this host's IPv4 addresses, without sending anything.
"""

import ctypes
import fcntl
import os
import platform
import re
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from rowcast.runtime.errors import ConfigError
from rowcast.runtime.ranges import Number, Text

MAX_THREADS = 2**12


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    threads: Number = 0  # of torch; 0: not recorded
    facts: tuple[tuple[Text, Text], ...] = ()  # names and values, such as ("torch", "2.13.0")

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads = {self.threads} must be from 0 to {MAX_THREADS}")


UNRECORDED = Machine()


def threads_of_run(setting: int | str, first: int, recorded: int, *, trains: bool) -> int:
    """`setting`: trainer.threads. `first`: of a first start. `recorded`: 0 if no checkpoint names a number. `trains`:
    False for an evaluation, which may have another number. Raises ConfigError."""
    if isinstance(setting, str) or not recorded:
        return recorded or first
    if trains and setting != recorded:
        raise ConfigError(
            f"trainer.threads = {setting}, but this run computes with trainer.threads = {recorded}, and another number "
            f"gives other bits; set trainer.threads = {recorded} or remove it, or begin a new run with --fresh"
        )
    return setting


def differences(was: Machine, now: Machine) -> list[str]:
    """Names the facts that differ, with both values."""
    before, after = dict(was.facts), dict(now.facts)
    return [
        f"{name} is {after.get(name, 'not set')}, and was {before.get(name, 'not set')}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]


ROOT = Path("/")
CPUINFO = Path("/proc/cpuinfo")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
MOST_KEPT = 2**30  # bytes of an allocation; larger ones return to the system when freed
MOST_KEPT_BEFORE = 2**25  # the most that older versions of glibc accept


def free_memory(root: Path = ROOT) -> int:
    """Returns the bytes that this process can still take without swapping. `root` is for tests."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", (root / "proc/meminfo").read_text(), flags=re.MULTILINE)
    assert match is not None, "/proc/meminfo has no MemAvailable"
    return min([int(match[1]) * 1024, *control_groups(root)])


def control_groups(root: Path = ROOT) -> Iterator[int]:
    """Yields the room, in bytes, of each control group of this process, and of their parents, that has a limit."""
    lines = (root / "proc/self/cgroup").read_text()
    for controllers, name in re.findall(r"^\d+:([^:]*):(.*)$", lines, flags=re.MULTILINE):
        mount = {"": "sys/fs/cgroup", "memory": "sys/fs/cgroup/memory"}.get(controllers)
        if mount is None:
            continue
        limit, usage = (
            ("memory.max", "memory.current") if not controllers else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        group = Path(name.lstrip("/"))
        for folder in (group, *group.parents):
            room = room_of(root / mount / folder, limit, usage)
            if room is not None:
                yield room


def room_of(folder: Path, limit: str, usage: str) -> int | None:
    """Returns limit - usage + file pages that the kernel would drop first; None if the group has no limit or is not
    visible."""
    try:
        allowed, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return None
    if not allowed.isdigit():  # "max"
        return None
    droppable = [int(nbytes) for nbytes in re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, flags=re.MULTILINE)]
    return max(0, int(allowed) - used + max(droppable, default=0))


def keep_freed_memory() -> None:
    """Makes glibc keep memory that this process frees, for its next allocations.

    A train step on a CPU repeatedly allocates and frees the same tensors. By default glibc returns the largest to the
    system each time, and reallocating costs a page fault per page. Does nothing with other C libraries."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        if not mallopt(M_MMAP_THRESHOLD, MOST_KEPT):
            mallopt(M_MMAP_THRESHOLD, MOST_KEPT_BEFORE)


STAT = Path("/proc/stat")
CGROUP = Path("/sys/fs/cgroup")  # in a container, the container's group


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Returns at least 1. A quota of 1.5 cores counts as 2: half a core too few costs more than some throttling.

    Source: `cpu.max` of cgroup v2, "$MAX $PERIOD" in microseconds, or "max $PERIOD" without a quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        return allowed if quota == "max" else max(1, min(allowed, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return allowed


def free_cores(seconds: float = 0.5) -> float:
    """Returns how many of the usable cores are idle, on average over this time; all of them where Linux does not report
    it."""
    ticks = list[list[int]]()
    for wait_s in (seconds, 0.0):
        try:  # user, nice, system, idle, iowait, irq, softirq, steal
            ticks.append([int(word) for word in STAT.read_text(encoding="ascii").split(maxsplit=9)[1:9]])
        except (OSError, ValueError):
            return usable_cores()
        time.sleep(wait_s)
    spent = [after - before for before, after in zip(ticks[0], ticks[1], strict=True)]
    return usable_cores() * (spent[3] + spent[4]) / max(1, sum(spent))


def processor() -> str:
    """The model's name."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.machine()


# another process on this host, as the kernel sees it

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
    def began_s(self) -> float:
        """Unix time."""
        after_boot_s = int(self.start) / os.sysconf("SC_CLK_TCK")
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + after_boot_s

    @property
    def runs(self) -> bool:
        """Returns whether it lives and no signal has stopped it."""
        return self.processor_ticks is not None

    @property
    def processor_ticks(self) -> int | None:
        """Returns the processor time that it has used; None unless it `runs`."""
        status = stat_of(self.pid)
        runs = status is not None and status.start == self.start and status.state not in "TZX"
        return status.ticks if status is not None and runs else None


def seen(pid: int) -> OtherProcess | None:
    status = stat_of(pid)
    return None if status is None else OtherProcess(pid, status.start)


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


SMAPS = Path("/proc/self/smaps")
MAP = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*\n((?:[A-Z].*\n)*)", re.MULTILINE)


def mapped_bytes(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the resident bytes of this process's memory maps that hold an address of these spans, and how many of
    them are in huge pages; zeros if the kernel does not say. The kernel may put maps together that lie side by side."""
    resident = huge = 0
    with suppress(OSError):
        for first, end, facts in MAP.findall(SMAPS.read_text()):
            if any(begin < int(end, 16) and int(first, 16) < stop for begin, stop in spans):
                kib = {name: int(count) for name, count in re.findall(r"(\w+): +(\d+) kB", facts)}
                resident += 1024 * kib["Rss"]
                huge += 1024 * (kib.get("AnonHugePages", 0) + kib.get("ShmemPmdMapped", 0))
    return resident, huge


SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def own_addresses() -> dict[str, str]:
    """Returns the address of each interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def interface_toward(address: str, port: int) -> str | None:
    """Returns the interface of the IPv4 route to an address, None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError:
            return None
        source = probe.getsockname()[0]
    return next((name for name, address_of_name in own_addresses().items() if address_of_name == source), None)
