"""Lets a test kill a process at a named point, to show that a run survives a crash at each point.

    ROWCAST_CRASH="plan made"               SIGKILL when the process first passes this point
    ROWCAST_CRASH="plan made:3"             the third time
    ROWCAST_CRASH="plan made:3:SIGSTOP"     another signal
    ROWCAST_CRASH="plan made:3:SIGKILL:/tmp/x/once"     only if it can make this file: once, in one of several processes

Only tests set the variable. Each name occurs once in the code.
"""

import os
import signal
import threading

VARIABLE = "ROWCAST_CRASH"

CRASH_POINTS = (
    # prefetcher: a step
    "plan made",  # only the planner knows it
    "PlanReady not sent",  # its rows are in the ring
    "PlanReady sent",
    "rows not written",  # they are in the ring
    "rows written",  # to the store
    # prefetcher: a barrier and its checkpoint
    "Flush sent",  # none of its rows has arrived
    "dense piece taken",
    "dense file synced",
    "rows not collected",  # the barrier is over, and training overwrites them
    "row file written",
    "rows collected",  # the last ones are not in a file
    "merging",  # layers are merged; some of the new base is gathered
    "shard not renamed",  # a rank's shard; its files are on disk
    "shard file written",  # rank 0 may see it
    "shards agree",  # of all ranks, and there is no manifest
    "manifest seen",  # by a rank above 0
    "manifest not renamed",  # all files are on disk, but there is no checkpoint
    "manifest renamed",  # its folder is not synced
    "manifest durable",  # no old file is removed
    "old manifest removed",  # its files are still there
    "garbage removed",  # one file or folder of several
    "EndOfData not sent",
    "run not marked complete",  # the trainer has ended
    # prefetcher: a memory tier
    "rows loaded",  # from the cold tier, and not yet in their slots
    "rows spilled",  # to the cold tier, and still in their slots
    # prefetcher: a start
    "file restored",  # the first of several
    "layer restored",
    "changed rows restored",  # one group's, after the trainer was lost
    "tables restored",
    "Welcome sent",
    # publisher
    "version rows written",  # of one table
    "version not described",  # all its other files are on disk
    "version not renamed",  # it is whole, under another name
    "version renamed",  # CURRENT names the one before
    "version named",  # no old version is removed
    "old version removed",
    # trainer: a start
    "Hello sent",
    "model built",
    "model restored",  # losses and evaluation are not
    # trainer: a step
    "step not begun",
    "step computed",  # the prefetcher does not know it
    "RowsBack not sent",  # its rows are in the ring
    "RowsBack sent",  # before its PlanDone
    "loss not written",
    "loss written",
    # trainer: a barrier and the end
    "dense side not packed",  # all rows are with the sender
    "Saved not sent",
    "Saved sent",
    "report not written",
    "Bye not sent",  # losses and the report are written
    "Bye sent",  # or about to be
)


class Armed:
    """The point at which this process sends itself a signal. Raises ValueError for an unknown point or signal."""

    def __init__(self, value: str) -> None:
        name, times, number, once, *_ = [*value.split(":"), "", "", ""]
        if name and name not in CRASH_POINTS:
            raise ValueError(f"{VARIABLE} = {value!r} does not name a crash point")
        self.name = name
        self._left = int(times or 1)
        self._signal = signal.Signals[number or "SIGKILL"]
        self._once = once
        self._lock = threading.Lock()  # several threads may pass the point

    def passed(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0 and (not self._once or made(self._once)):
                os.kill(os.getpid(), self._signal)


def made(path: str) -> bool:
    """Returns False if it exists already."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


ARMED = Armed(os.environ.get(VARIABLE, ""))


def crash_point(name: str) -> None:
    """Sends this process its signal, by default SIGKILL, if it is armed for this point."""
    if name == ARMED.name:
        ARMED.passed()
