"""Lets the prefetcher yield to a trainer that computes on the same cores.

Torch divides an operation on the CPU among threads that wait for each other at its end: if the prefetcher holds one
thread's core, all wait. As background work (Linux: SCHED_IDLE, see sched(7)) it runs on idle cores, and any other
process preempts it at once. It cannot fall far behind its trainer, which needs no core while it waits for rows. But it
can starve beside other processes, and leaving the policy needs privileges. So it is off by default.
"""

import os

from rowcast.runtime.telemetry.logs import get_logger


def move_to_background() -> None:
    """Moves all threads of this process, and so their children. Warns if the system refuses."""
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError) as error:  # not Linux; a sandbox
        get_logger().warning("prefetcher.background has no effect here", reason=str(error))
