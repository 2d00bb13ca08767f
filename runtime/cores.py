"""How many cores a process may use: those it may run on, and no more than a container's quota of their time."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # of a container its own


def usable_cores(cgroup: Path = CGROUP) -> int:
    """At least 1. A quota of 1.5 cores counts as 2: half a core too few costs more than threads that are throttled now and then.

    Source: `cpu.max` of cgroup v2, "$MAX $PERIOD" in microseconds, or "max $PERIOD" where there is no quota.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        return allowed if quota == "max" else max(1, min(allowed, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return allowed
