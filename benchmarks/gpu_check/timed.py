"""Times the steps of a contestant that computes them on the default stream."""

import time
from typing import Any, Protocol

from torch import Tensor

from benchmarks.training.resident import wait_for

WARM = 1 / 4  # of the steps, before timing begins
MOST_S = 6.0


class Contestant(Protocol):
    def step(self, number: int) -> Tensor:
        """Issues step `number`, counted from 0; returns its loss."""


def timed(contestant: Contestant, steps: int) -> dict[str, Any]:
    """Milliseconds per step, after the warm-up; ends after `steps` steps, or after MOST_S seconds of timed ones."""
    warm, done = int(steps * WARM), 0
    for number in range(warm):
        wait_for(contestant.step(number))
    began_s = time.perf_counter()
    for number in range(warm, steps):
        loss = contestant.step(number)
        done += 1
        if time.perf_counter() - began_s > MOST_S:
            break
    wait_for(loss)
    return {"ms": 1e3 * (time.perf_counter() - began_s) / done, "steps": done}
