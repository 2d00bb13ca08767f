"""Times work under the cache conditions of a step.

rows    in no cache of a CPU: other rows were touched since. A sweep over more memory than they hold comes before
layers  in the last cache: weights and gradients were used a step ago. The sweep is over the caches of a core

CPU, one thread     processor time, so that other programs do not count
CPU, more threads   wall time: the processor time of threads that work at once would be added up
CUDA                marks on the stream; the sweep before all work lets the host run ahead, so no launch waits
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Literal

import torch

from rowcast.trainer.device.cuda import make_streams

SWEPT_BYTES = {"cpu": 48 * 2**20, "cuda": 512 * 2**20}  # more than the last-level caches hold
CORE_BYTES = 4 * 2**20  # more than the caches of one core hold
REPEATS, MOST_REPEATS = 1, 4
LEAST_S = 1e-3  # spent on one shape at a time
Clock = Literal["cpu", "wall", "device"]


def nothing() -> None:
    pass


class Stopwatch:
    def __init__(self, device: torch.device, threads: int, *, cold: bool = True) -> None:
        """`cold`: the work's data is in no cache of a CPU; otherwise it is in the last one."""
        self.device = device
        self.streams = make_streams(device)
        self.clock: Clock = "device" if device.type == "cuda" else "cpu" if threads == 1 else "wall"
        self.now = time.process_time if self.clock == "cpu" else time.perf_counter
        swept_bytes = SWEPT_BYTES[device.type] if cold or device.type == "cuda" else CORE_BYTES
        self._swept = torch.zeros(swept_bytes // 4, device=device)

    def seconds(self, work: Callable[[], object], prepare: Callable[[], object] = nothing) -> float:
        """The median of a few times, of more where they are short, after one that is not counted. `prepare` runs before
        each and is not timed."""
        found = list[float]()
        while len(found) <= REPEATS or (len(found) < MOST_REPEATS and sum(found) < LEAST_S):
            prepare()
            found.append(self._once(work))
        return median(found[1:])

    def _once(self, work: Callable[[], object]) -> float:
        if self.clock != "device":
            self._swept.add_(1.0)
            began_s = self.now()
            work()
            return self.now() - began_s
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
