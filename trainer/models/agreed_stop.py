"""Agrees on the last step of several ranks, which must all have their last barrier after the same step.

step p       each rank tells the others, with what they exchange anyway, whether it was asked to stop
complete     all see the same flags of step p; from the first step with one, all name the same last step
p + 2 depth + 3   no prefetcher can have planned it: plans go to 2 depth + 2 steps beyond the last StepDone that it
             has, and the StopRequest of step p is sent before the StepDone of step p
"""

from collections.abc import Callable, Sequence

from rowcast.protocol.messages import StopRequest
from rowcast.protocol.parts import Rank


class AgreedStop:
    """The main thread calls `seen`, any thread `ask`, and the compute stream reads `asked`."""

    def __init__(self, rank: Rank, depth: int, send: Callable[[StopRequest], None]) -> None:
        """`depth`: of the look-ahead. `send`: to this rank's prefetcher."""
        self._is_only_rank = rank.count == 1
        self._ahead = 2 * depth + 3
        self._send = send
        self._reason: str | None = None
        self._is_agreed = False

    @property
    def asked(self) -> bool:
        return self._reason is not None

    def ask(self, reason: str) -> None:
        """Stops a single rank at once, several ranks soon. Only the first call counts."""
        if self._reason is not None:
            return
        self._reason = reason
        if self._is_only_rank:
            self._send(StopRequest(reason=reason))

    def seen(self, step: int, asked: Sequence[bool]) -> None:
        """`asked`: for each rank, whether it had a stop request when it sent its values of `step`. The same on all
        ranks."""
        if self._is_only_rank or self._is_agreed or True not in asked:
            return
        self._is_agreed = True
        reason = self._reason or f"rank {asked.index(True)} was asked to stop"
        self._send(StopRequest(reason=reason, after_step=step + self._ahead))
