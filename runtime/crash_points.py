"""Instants at which a process can be made to kill itself, so that tests can show that none of them matters.

    ROWCAST_CRASH="plan made"               SIGKILL the first time that this instant is passed
    ROWCAST_CRASH="plan made:3"             the third time
    ROWCAST_CRASH="plan made:3:SIGSTOP"     another signal to itself

Without the variable, which only tests set, passing one costs a comparison. Each name is called at one place of the tree.
"""

import os
import signal
import threading

VARIABLE = "ROWCAST_CRASH"

CRASH_POINTS = (
    # prefetcher: a step
    "plan made",  # and nobody else knows of it
    "StepReady not sent",  # its rows are in the ring
    "StepReady sent",
    "rows not written",  # they came home and lie in the ring
    "rows written",  # to the store
    # prefetcher: a barrier and its checkpoint
    "Flush sent",  # none of its rows has come
    "rows not collected",  # all are in the store
    "rows collected",  # into the writer's queue; the dense side is to come
    "dense piece taken",
    "row file written",
    "dense file synced",
    "merging",  # layers into one, with a part of the new base gathered
    "manifest not renamed",  # everything is on disk, but there is no checkpoint
    "manifest renamed",  # its folder is not synced
    "manifest durable",  # nothing old was removed
    "old manifest removed",  # its files are still there
    "garbage removed",  # one file or folder of it
    "EndOfData not sent",
    "run not marked complete",  # the trainer has ended
    # prefetcher: a start
    "file restored",  # the first of several
    "layer restored",
    "changed rows restored",  # of one group, after the trainer was lost
    "tables restored",
    "Welcome sent",
    # trainer: a start
    "Hello sent",
    "model built",
    "model restored",  # losses and evaluation are not
    # trainer: a step
    "step not begun",
    "step computed",  # nobody heard of it
    "RowsBack not sent",  # its rows are in the ring
    "RowsBack sent",  # before its StepDone
    "loss not written",
    "loss written",
    # trainer: a barrier and the end
    "dense side not packed",  # all rows were handed to the sender
    "Saved not sent",
    "Saved sent",
    "report not written",
    "Bye not sent",  # losses and the report are written
    "Bye sent",  # or about to be
)


class Armed:
    """The one instant at which this process gets a signal. Raises ValueError where there is no such instant or signal."""

    def __init__(self, value: str) -> None:
        name, times, number, *_ = [*value.split(":"), "", ""]
        if name and name not in CRASH_POINTS:
            raise ValueError(f"{VARIABLE} = {value!r} names no crash point")
        self.name = name
        self._left = int(times or 1)
        self._signal = signal.Signals[number or "SIGKILL"]
        self._lock = threading.Lock()  # several threads may pass it

    def passed(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), self._signal)


ARMED = Armed(os.environ.get(VARIABLE, ""))


def crash_point(name: str) -> None:
    """Where this process is armed for this point, its signal, which by default ends it."""
    if name == ARMED.name:
        ARMED.passed()
