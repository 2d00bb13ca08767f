"""Collectives of ranks in one process and one thread, under the names of torch.distributed.

A rank's calls are matched with the other ranks' calls by their order. Data moves from one rank to another once both
have made the call, each pair for itself, in two halves, whenever the seed says: before that, the output holds what it
held, and after the call the input is still read.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rowcast.trainer.models.exchanges import Sizes


@dataclass(slots=True, kw_only=True)
class Call:
    """One rank's part of a collective. Implements `streams.Work`."""

    name: str
    given: Sequence[Tensor]  # for each rank
    taken: Sequence[Tensor]  # from each rank
    left: int  # halves that have not been moved to or from this rank

    def is_completed(self) -> bool:
        return self.left == 0

    def wait(self) -> object:
        raise NotImplementedError("one thread runs all ranks, so none may wait")


class Network:
    """What connects `count` ranks; advance it like a stage."""

    def __init__(self, count: int, seed: int) -> None:
        self.calls: list[list[Call]] = [[] for _ in range(count)]
        self._chance = random.Random(seed)
        self._halves: list[Callable[[], None]] = []

    def advance(self) -> bool:
        """Moves half of what one rank sends to another."""
        if not self._halves:
            return False
        self._halves.pop(self._chance.randrange(len(self._halves)))()
        return True

    def call(self, rank: int, call: Call) -> Call:
        own = self.calls[rank]
        own.append(call)
        for other, calls in enumerate(self.calls):
            if len(calls) >= len(own):
                matching = calls[len(own) - 1]
                self._move(len(own) - 1, rank, call, other, matching)
                if other != rank:
                    self._move(len(own) - 1, other, matching, rank, call)
        return call

    def _move(self, index: int, sender: int, giving: Call, receiver: int, taking: Call) -> None:
        source, out = giving.given[receiver], taking.taken[sender]
        expected = (giving.name, source.dtype, source.shape)
        assert expected == (taking.name, out.dtype, out.shape), (
            f"call {index}: rank {sender} gives {expected}, rank {receiver} takes {(taking.name, out.dtype, out.shape)}"
        )
        half = len(source) // 2
        for rows in (slice(0, half), slice(half, len(source))):
            self._halves.append(lambda rows=rows: self._copy(sender, giving, receiver, taking, rows))  # type: ignore[misc]

    def _copy(self, sender: int, giving: Call, receiver: int, taking: Call, rows: slice) -> None:
        taking.taken[sender][rows].copy_(giving.given[receiver][rows])
        giving.left -= 1
        taking.left -= 1


@dataclass(slots=True)
class InProcessCollectives:
    """Implements `trainer.models.collectives.Collectives` for one rank."""

    network: Network
    rank: int
    count: int = field(init=False)
    doing: str = ""

    def __post_init__(self) -> None:
        self.count = len(self.network.calls)

    def all_to_all(self, output: Tensor, given: Tensor, receive: Sizes, send: Sizes) -> Call:
        return self._call("all_to_all", self._split(given, send), self._split(output, receive))

    def all_gather(self, output: Tensor, given: Tensor) -> Call:
        return self._call("all_gather", [given] * self.count, self._split(output, None))

    def watch(self) -> None:
        pass

    def _split(self, tensor: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        assert tensor.is_contiguous(), "torch.distributed takes contiguous tensors only"
        if sizes is None:
            assert len(tensor) % self.count == 0, f"{len(tensor)} rows for {self.count} ranks"
            sizes = [len(tensor) // self.count] * self.count
        assert sum(sizes) == len(tensor), f"sizes {sizes} for {len(tensor)} rows"
        pieces: Sequence[Tensor] = tensor.split(sizes)  # type: ignore[no-untyped-call]
        return pieces

    def _call(self, name: str, given: Sequence[Tensor], taken: Sequence[Tensor]) -> Call:
        return self.network.call(self.rank, Call(name=name, given=given, taken=taken, left=4 * self.count))
