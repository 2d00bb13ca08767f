"""Orders the engine's work with the streams of a training script, which may change from batch to batch.

loader's stream     wait for the rows ... copy of the batch *          wait for all * -> the step's event
script's stream                      wait for the rows, look up *  update *

`*` is an event recorded on the stream that is torch's current one at that time.
"""

from rowcast.trainer.device.streams import Event, Lap, Stream
from rowcast.trainer.step.cache import Step


class StreamOrder:
    """Tracks the work issued for the current step. `compute` is torch's current stream at each call."""

    def __init__(self, compute: Stream) -> None:
        self._compute = compute
        self._issued: list[Event] = []

    def await_rows(self, step: Step) -> None:
        """Makes the current stream wait until the step's rows are in their slots."""
        self._compute.wait(step.filled[-1], "filled")

    def record(self) -> None:
        """Call after issuing work on the step's rows or arrays to the current stream."""
        self._issued.append(self._compute.record())

    def lap(self, lap: Lap) -> None:
        """Records the update of the rows, which runs in the backward pass, on the stream of its forward."""
        if lap == "update":
            self.record()

    def gather(self) -> None:
        """Makes the current stream wait for all recorded work."""
        issued, self._issued = self._issued, []
        for event in issued:
            self._compute.wait(event, "used")
