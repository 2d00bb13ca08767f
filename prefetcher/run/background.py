"""Giving way to a trainer that computes on the same cores.

Torch divides an operation on the CPU among threads that wait for each other at its end: where the prefetcher holds the core of one, all of
them wait. As background work (Linux: SCHED_IDLE, see sched(7)) it runs where nobody else wants a core, and is put aside at once when
somebody does. It cannot fall far behind its own trainer, which wants no core while it waits for rows; but behind others it can, and
nobody without privileges may take the policy back. So a job asks for it.
"""

import os

from rowcast.runtime.telemetry.logs import get_logger


def move_to_background() -> None:
    """This thread and all that it starts, processes as well. A warning where the system refuses."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError) as error:  # not Linux; a sandbox
        get_logger().warning("prefetcher.background has no effect here", reason=str(error))
