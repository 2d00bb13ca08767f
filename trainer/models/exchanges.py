"""Issues the exchanges between ranks, in the same order on all. Collectives only copy; rowcast does every addition."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rowcast.trainer.device.streams import Closure, Lap, RankWait, Streams, Work, ignore
from rowcast.trainer.models.ordered import sum_in_order

Start = Callable[[], Work]
Sizes = list[int] | None  # rows to or from each rank; None: the same number


class Collectives(Protocol):
    """What ranks use of `torch.distributed`. Both calls only copy, and return at once."""

    doing: str  # content of the next calls, for their error sentence: "the rows of step 12"

    def all_to_all(self, output: Tensor, given: Tensor, receive: Sizes, send: Sizes) -> Work:
        """Sends the first of the given rows to rank 0, the next to rank 1, ...; the output is from rank 0, 1, ..."""

    def all_gather(self, output: Tensor, given: Tensor) -> Work:
        """Concatenates what all ranks give."""

    def watch(self) -> None:
        """Raises PeerLost if the oldest collective on a device takes too long. Call it often: no host waits for one."""


class Complete:
    """The work of a collective that was complete when issued."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


class LocalCollectives:
    """Implements `Collectives` for a trainer that computes all parts: it receives what it sends."""

    def __init__(self) -> None:
        self.doing = ""

    def all_to_all(self, output: Tensor, given: Tensor, receive: Sizes, send: Sizes) -> Work:
        output.copy_(given)
        return Complete()

    def all_gather(self, output: Tensor, given: Tensor) -> Work:
        output.copy_(given)
        return Complete()

    def watch(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class SumMemory:
    """Memory for a vector that ranks add up: each adds a slice of all ranks' vectors."""

    own: Tensor  # [n]
    slices: Tensor  # [ranks, n / ranks]: this rank's slice of each rank's vector; the first becomes their sum
    total: Tensor  # [n]

    @classmethod
    def of(cls, own: Tensor, ranks: int) -> "SumMemory":
        """`own`: n is a multiple of the ranks."""
        return cls(own=own, slices=torch.empty_like(own).view(ranks, -1), total=torch.empty_like(own))


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherMemory:
    """Memory for one tensor of each rank, concatenated."""

    own: Tensor  # [n]
    all: Tensor  # [ranks * n]

    @classmethod
    def of(cls, own: Tensor, ranks: int) -> "GatherMemory":
        return cls(own=own, all=own.new_empty(ranks * len(own)))


class Exchanges:
    """The exchanges of one rank."""

    def __init__(self, collectives: Collectives, lap: Callable[[Lap], None]) -> None:
        """`lap`: called on the compute stream at the end of a phase."""
        self._collectives = collectives
        self.lap = lap

    def name(self, what: str) -> None:
        """Names the content of the next exchanges, for their error sentence."""
        self._collectives.doing = what

    def all_to_all(self, output: Tensor, given: Tensor, receive: Sizes = None, send: Sizes = None) -> Start:
        return partial(self._collectives.all_to_all, output, given, receive, send)

    def gather(self, memory: GatherMemory) -> Start:
        return partial(self._collectives.all_gather, memory.all, memory.own)

    def across(
        self,
        streams: Streams,
        packed: RankWait,
        exchanges: Sequence[Start],
        received: RankWait,
        meanwhile: Closure | None = None,
    ) -> None:
        """Sends the results of compute's issued work to other ranks; compute's later work waits for theirs."""
        streams.compute.run(lambda: self.lap("exchange"))
        streams.exchange.wait(streams.compute.record(), packed)
        for start in exchanges:
            streams.exchange.communicate(start)
        if meanwhile is not None:
            # if collectives run on the compute stream, they are complete here
            streams.compute.run(lambda: self.lap("ranks"))
            streams.compute.run(meanwhile)
        streams.compute.wait(streams.exchange.record(), received)
        streams.compute.run(lambda: self.lap("ranks"))

    def sum(
        self, streams: Streams, memory: SumMemory, with_it: Sequence[Start] = (), meanwhile: Closure | None = None
    ) -> None:
        """Adds up `memory.own` of all ranks; `meanwhile` runs during the transfer of slices."""
        slices = self.all_to_all(memory.slices.view(-1), memory.own)
        self.across(streams, "parts_packed", [*with_it, slices], "parts_received")
        streams.compute.run(lambda: ignore(sum_in_order(memory.slices)))
        gather = self.gather(GatherMemory(own=memory.slices[0], all=memory.total))
        self.across(streams, "slice_summed", [gather], "sum_gathered", meanwhile)
