"""Lets the prefetcher yield to a trainer that computes on the same cores.

Torch divides an operation on the CPU among threads that wait for each other at its end: if the prefetcher holds the
core of one, all of them wait. As background work (Linux: SCHED_IDLE, see sched(7)) it runs where a core is idle, and is
preempted at once when another process needs it. It cannot fall far behind its own trainer, which needs no core while it
waits for rows; but it can starve beside other processes, and leaving the policy takes privileges. So a job must ask for
it.
"""

import os

from rowcast.runtime.telemetry.logs import get_logger


def move_to_background() -> None:
    """Moves this thread and all threads and processes that it starts. Warns if the system refuses."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError) as error:  # not Linux; a sandbox
        get_logger().warning("prefetcher.background has no effect here", reason=str(error))
