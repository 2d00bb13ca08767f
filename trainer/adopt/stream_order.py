"""Order between the streams of a training script, which may draw a batch on one, compute on others, and draw the next on the first again.

loader's stream     wait for the rows ... copy of the batch *          wait for all * -> the step's event
script's stream                      wait for the rows, look up *  update *

`*` is an event recorded on whatever stream is the current one then.
"""

from rowcast.trainer.execute.cache import ArrivedStep
from rowcast.trainer.execute.metrics import Phase
from rowcast.trainer.execute.streams import Event, Stream


class StreamOrder:
    """What was issued for the step in hand. `compute` is whatever stream is the current one when it is asked."""

    def __init__(self, compute: Stream) -> None:
        self._compute = compute
        self._issued: list[Event] = []

    def await_rows(self, step: ArrivedStep) -> None:
        """What the current stream does from now on finds the step's rows in their slots."""
        self._compute.wait(step.filled[-1], "filled")

    def record(self) -> None:
        """The current stream was given something to do with the step's rows or arrays."""
        self._issued.append(self._compute.record())

    def lap(self, phase: Phase) -> None:
        """Hears of the rows' update, in a backward pass, which runs on its forward's stream."""
        if phase == "update":
            self.record()

    def gather(self) -> None:
        """What the current stream records from now on comes after all of it."""
        issued, self._issued = self._issued, []
        for event in issued:
            self._compute.wait(event, "used")
