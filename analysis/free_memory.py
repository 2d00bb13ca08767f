"""Free memory and control-group limits, read from the kernel's files."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def free_memory(root: Path = ROOT) -> int:
    """Bytes that this process can still take without swapping, within its control groups. `root` is for tests."""
    meminfo = (root / "proc/meminfo").read_text()
    free = [int(kib) * 1024 for kib in re.findall(r"^MemAvailable:\s*(\d+) kB", meminfo, flags=re.MULTILINE)]
    return min([*free, *cgroup_room(root)])


def cgroup_room(root: Path = ROOT) -> Iterator[int]:
    """Bytes left under each limit of this process's control groups and their parents; nothing without a limit."""
    for controllers, name in re.findall(
        r"^\d+:([^:]*):(.*)$", (root / "proc/self/cgroup").read_text(), flags=re.MULTILINE
    ):
        mount = {"": "sys/fs/cgroup", "memory": "sys/fs/cgroup/memory"}.get(controllers)
        if mount is None:
            continue
        limit, usage = (
            ("memory.max", "memory.current") if not controllers else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        group = Path(name.lstrip("/"))
        for folder in (group, *group.parents):
            room = room_in(root / mount / folder, limit, usage)
            if room is not None:
                yield room


def room_in(folder: Path, limit: str, usage: str) -> int | None:
    """Limit - usage + file pages that the kernel would drop first; None if the group has no limit or is not visible."""
    try:
        allowed, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return None
    if not allowed.isdigit():  # "max"
        return None
    droppable = [int(nbytes) for nbytes in re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, flags=re.MULTILINE)]
    return max(0, int(allowed) - used + max(droppable, default=0))
