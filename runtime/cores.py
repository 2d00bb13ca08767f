"""Counts the cores that a process may run on, within its container's quota."""

import os
from pathlib import Path

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
