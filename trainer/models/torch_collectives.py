"""Exchanges tensors between ranks over torch.distributed, mostly its default group: gloo for a CPU, NCCL for a GPU.

On a CPU the main thread polls a collective, because an error of a different thread must end the wait. On a GPU the
stream waits, not the host: the main thread only looks at the oldest collective between other work (`watch`). Both have
one time-out, earlier than that of gloo and NCCL.

A process that gives up in an exchange must end with `runtime.stops.leave_at_once`: gloo's threads keep waiting for it
until the group's time-out, even after an abort, and an orderly exit waits for them.
"""

import re
import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import PeerLost
from rowcast.trainer.device.streams import Work
from rowcast.trainer.models.exchanges import Sizes

SPIN_S = 0.001  # at first the wait only yields to other threads, because most exchanges take no longer
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 0.002

# torch 2.13 renames it, and warns of this name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCollectives:
    """Implements `Collectives`. The process has joined the group already."""

    group: dist.ProcessGroup | None = None  # the default one
    advice = "look for one that was stopped or is slow, or raise ranks.timeout"  # after a time-out

    def __init__(self, rank: Rank, timeout_s: float, check: Callable[[], object] = lambda: None) -> None:
        """`timeout_s`: the longest time of one collective. `check`: ends the wait for one by raising an error."""
        self.doing = "a collective"
        self._rank = rank
        self._timeout_s = timeout_s
        self._check = check
        self._begun: deque[tuple[Work, str]] = deque()  # and what they exchange; complete ones leave
        self._since_s = 0.0  # when the oldest began, or the one before it was seen complete

    def open(self, device: torch.device) -> None:
        """Exchanges a number with every rank: connections are made here, and not within the first step. Waits."""
        self.doing = "a first number"
        given, taken = (torch.zeros(self._rank.count, device=device) for _ in range(2))
        self._until(self.all_to_all(taken, given, None, None))
        self._until(self.all_gather(taken, given[:1]))

    def watch(self) -> None:
        self._forget_complete()
        self._refuse_late()

    def _forget_complete(self) -> None:
        while self._begun and self._begun[0][0].is_completed():
            self._begun.popleft()
            self._since_s = time.monotonic()

    def all_to_all(self, output: Tensor, given: Tensor, receive: Sizes, send: Sizes) -> Work:
        return self._start(
            output, lambda: dist.all_to_all_single(output, given, receive, send, self.group, async_op=True)
        )

    def all_gather(self, output: Tensor, given: Tensor) -> Work:
        return self._start(output, lambda: all_gather(output, given, self.group, async_op=True))

    def _start(self, output: Tensor, start: Callable[[], Work | None]) -> Work:
        self.watch()
        try:
            work = start()
        except RuntimeError as error:
            raise self._broken(error) from error
        assert work is not None, "a collective that is waited for in the call hears of no error"
        if not self._begun:
            self._since_s = time.monotonic()
        self._begun.append((work, self.doing))
        return work if output.is_cuda else PolledWork(work, self._until)

    def _refuse_late(self) -> float:
        """Returns how long the oldest collective takes."""
        waited_s = time.monotonic() - self._since_s
        if self._begun and waited_s > self._timeout_s:
            raise PeerLost(
                f"{self._own} waited {waited_s:.0f} s for {self._awaited()} to exchange {self._begun[0][1]}; "
                f"{self.advice}"
            )
        return waited_s

    def _awaited(self) -> str:
        return "the other ranks"

    def _until(self, work: Work) -> None:
        pause_s = SHORTEST_PAUSE_S
        while not work.is_completed():
            self._check()
            if self._refuse_late() < SPIN_S:
                time.sleep(0)
                continue
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
        self._begun.clear()  # earlier ones are complete too
        try:
            work.wait()
        except RuntimeError as error:
            raise self._broken(error) from error

    @property
    def _own(self) -> str:
        return f"rank {self._rank.number} of {self._rank.count}"

    def _broken(self, error: RuntimeError) -> PeerLost:
        return PeerLost(
            f"{self._own} lost another rank while they exchanged {self.doing} ({first_sentence(error)}); that rank's "
            "log says why"
        )


def first_sentence(error: BaseException) -> str:
    """Returns the first sentence of torch's or gloo's message, without the source line before it and the advice after
    it."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(". ")[0]


class PolledWork:
    """A collective on the host."""

    def __init__(self, work: Work, until: Callable[[Work], None]) -> None:
        """`until` returns once its argument is complete."""
        self._work = work
        self._until = until

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> bool:
        self._until(self._work)
        return True
