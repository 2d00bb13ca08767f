"""Issues the exchanges between ranks, in the same order on all. Collectives only copy; rowcast does every addition."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rowcast.protocol.parts import Rank
from rowcast.trainer.device.streams import Closure, Lap, RankWait, Streams, Work, copy
from rowcast.trainer.models.ordered import sum_in_order
from rowcast.trainer.models.shared_rows import Reused

Start = Callable[[], Work]


class Collectives(Protocol):
    """The two calls of `torch.distributed` that ranks use, with its names and arguments. Both only copy."""

    doing: str  # content of the next calls, for their error sentence: "the rows of step 12"

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        *,
        async_op: bool,
    ) -> Work:
        """Sends the first of the input's rows to rank 0, the next to rank 1, ...; the output is from rank 0, 1, ..."""

    def all_gather_into_tensor(self, output_tensor: Tensor, input_tensor: Tensor, *, async_op: bool) -> Work:
        """Concatenates the inputs of all ranks."""


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

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        async_op: bool,
    ) -> Work:
        output.copy_(input)
        return Complete()

    def all_gather_into_tensor(self, output_tensor: Tensor, input_tensor: Tensor, *, async_op: bool) -> Work:
        output_tensor.copy_(input_tensor)
        return Complete()


@dataclass(frozen=True, kw_only=True, slots=True)
class SumMemory:
    """Memory for a vector that ranks add up: each adds a slice of all ranks' vectors."""

    own: Tensor  # [n]
    slices: Tensor  # [n] this rank's slice of each rank's vector
    slice: Tensor  # [n / ranks] their sum
    total: Tensor  # [n]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherMemory:
    """Memory for one tensor of each rank, concatenated."""

    own: Tensor  # [n]
    all: Tensor  # [ranks * n]


class Exchanges:
    """The exchanges of one rank."""

    def __init__(self, rank: Rank, collectives: Collectives, device: torch.device, lap: Callable[[Lap], None]) -> None:
        """`lap`: called on the compute stream at the end of a phase."""
        self._rank = rank
        self._collectives = collectives
        self._device = device
        self._lap = lap
        self._kept: dict[tuple[str, torch.dtype], list[Reused]] = {}

    def name(self, what: str) -> None:
        """Names the content of the next exchanges, for their error sentence."""
        self._collectives.doing = what

    def all_to_all(
        self, output: Tensor, given: Tensor, receive: Sequence[int] | None = None, send: Sequence[int] | None = None
    ) -> Start:
        """Without sizes, each rank gets the same number."""
        splits = [None if sizes is None else list(sizes) for sizes in (receive, send)]
        return partial(self._collectives.all_to_all_single, output, given, *splits, async_op=True)

    def gather(self, memory: GatherMemory) -> Start:
        return partial(self._collectives.all_gather_into_tensor, memory.all, memory.own, async_op=True)

    def across(
        self,
        streams: Streams,
        packed: RankWait,
        exchanges: Sequence[Start],
        received: RankWait,
        meanwhile: Closure | None = None,
    ) -> None:
        """Sends the results of compute's issued work to other ranks; compute's later work waits for theirs."""
        streams.compute.run(lambda: self._lap("exchange"))
        streams.exchange.wait(streams.compute.record(), packed)
        for start in exchanges:
            streams.exchange.communicate(start)
        if meanwhile is not None:
            # if collectives run on the compute stream, they are complete here
            streams.compute.run(lambda: self._lap("ranks"))
            streams.compute.run(meanwhile)
        streams.compute.wait(streams.exchange.record(), received)
        streams.compute.run(lambda: self._lap("ranks"))

    def sum(
        self, streams: Streams, memory: SumMemory, with_it: Sequence[Start] = (), meanwhile: Closure | None = None
    ) -> None:
        """Adds up `memory.own` of all ranks; `meanwhile` runs during the transfer of slices."""
        slices = self.all_to_all(memory.slices, memory.own)
        self.across(streams, "parts_packed", [*with_it, slices], "parts_received")
        streams.compute.run(lambda: copy(sum_in_order(memory.slices.view(self._rank.count, -1).unbind()), memory.slice))
        gather = self.gather(GatherMemory(own=memory.slice, all=memory.total))
        self.across(streams, "slice_summed", [gather], "sum_gathered", meanwhile)

    # the next exchange of the same name reuses this memory

    def sum_memory(self, name: str, length: int, dtype: torch.dtype) -> SumMemory:
        """`length`: a multiple of the ranks."""
        sizes = (length, length, length // self._rank.count, length)
        own, slices, of_rank, total = self._memory(name, sizes, dtype)
        return SumMemory(own=own, slices=slices, slice=of_rank, total=total)

    def gather_memory(self, name: str, length: int, dtype: torch.dtype) -> GatherMemory:
        own, of_all = self._memory(name, (length, length * self._rank.count), dtype)
        return GatherMemory(own=own, all=of_all)

    def _memory(self, name: str, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        kept = self._kept.setdefault((name, dtype), [Reused(dtype, self._device) for _ in sizes])
        return [one.rows(size, 1).view(-1) for one, size in zip(kept, sizes, strict=True)]
