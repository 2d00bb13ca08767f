"""Times a piece of work whose data is in no cache, as in a step, where other rows were touched since.

CPU, one thread     processor time, so that other programs do not count
CPU, more threads   wall time: the processor time of threads that work at once would be added up
CUDA                marks on the stream; the sweep before the work lets the host run ahead, so no launch is waited for
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Literal

import torch

from rowcast.trainer.execute.streams import make_streams

SWEPT_BYTES = {"cpu": 48 * 2**20, "cuda": 512 * 2**20}  # more than the last-level caches hold
REPEATS = 3
Clock = Literal["cpu", "wall", "device"]


def nothing() -> None:
    pass


class Stopwatch:
    def __init__(self, device: torch.device, threads: int) -> None:
        self.device = device
        self.streams = make_streams(device)
        self.clock: Clock = "device" if device.type == "cuda" else "cpu" if threads == 1 else "wall"
        self._swept = torch.zeros(SWEPT_BYTES[device.type] // 4, device=device)

    def seconds(self, work: Callable[[], object], prepare: Callable[[], object] = nothing) -> float:
        """The median of a few times, after one that is not counted. `prepare` runs before each and is not timed."""
        found = []
        for _ in range(REPEATS + 1):
            prepare()
            found.append(self._once(work))
        return median(found[1:])

    def _once(self, work: Callable[[], object]) -> float:
        if self.clock != "device":
            self._swept.add_(1.0)
            now = time.process_time if self.clock == "cpu" else time.perf_counter
            began_s = now()
            work()
            return now() - began_s
        stream = self.streams.compute
        found: list[float] = []

        def marked() -> None:
            self._swept.add_(1.0)
            began = stream.mark()
            work()
            ended = stream.mark()
            self.streams.settle()
            found.append(ended.seconds_since(began))

        stream.run(marked)
        return found[0]


def probe_seconds(watch: Stopwatch) -> float:
    """Of one fixed matrix product. The fastest of several: what the machine can do now."""
    left, right = torch.ones(1024, 512, device=watch.device), torch.ones(512, 512, device=watch.device)
    return min(watch.seconds(lambda: left @ right) for _ in range(3))
