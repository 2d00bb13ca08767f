"""Issues the exchanges between ranks, in the same order on all, and adds their results in one order.

Collectives only copy, usually over torch.distributed's default group: gloo for a CPU, NCCL for a GPU. rowcast does
every addition, and its order is the same for any number of ranks. Neighbours are added in pairs, then the sums in
pairs, and so on; a value without a neighbour passes unchanged. So the parts of a rank are a branch of the tree over all
parts, and the ranks' sums are added like parts.

On a CPU the main thread polls a collective, because an error of a different thread must end the wait. On a GPU the
stream waits, not the host: the main thread only looks at the oldest collective between other work (`watch`). Both have
one time-out, earlier than that of gloo and NCCL.

A process that gives up in an exchange must end with `runtime.stops.leave_at_once`: gloo's threads keep waiting for it
until the group's time-out, even after an abort, and an orderly exit waits for them.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError, PeerLost
from rowcast.trainer.device.streams import Closure, Lap, RankWait, Streams, Work, ignore

Start = Callable[[], Work]
Sizes = list[int] | None  # rows to or from each rank; None if all are equal


class Collectives(Protocol):
    """The part of `torch.distributed` that ranks use. Both calls only copy, and return at once."""

    doing: str  # content of the next calls, for their error sentence: "the rows of step 12"

    def all_to_all(self, output: Tensor, given: Tensor, receive: Sizes, send: Sizes) -> Work:
        """Sends the first of the given rows to rank 0, the next to rank 1, ...; the output is from rank 0, 1, ..."""

    def all_gather(self, output: Tensor, given: Tensor) -> Work:
        """Concatenates what all ranks give."""

    def watch(self) -> None:
        """Raises PeerLost if the oldest collective on a device takes too long. Call it often: no host waits for one."""


class CompletedWork:
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
        return CompletedWork()

    def all_gather(self, output: Tensor, given: Tensor) -> Work:
        output.copy_(given)
        return CompletedWork()

    def watch(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class SumMemory:
    """Memory for a vector that ranks sum: each sums one slice of all ranks' vectors."""

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
        """Sends the results of work issued on compute to other ranks; later work on compute waits for theirs."""
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


SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 0.002

# torch 2.13 renames it, and warns of this name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCollectives:
    """Implements `Collectives`. The process has joined the group already."""

    group: dist.ProcessGroup | None = None  # the default one
    spin_s = 0.001  # at first the wait only yields to other threads, because most exchanges take no longer
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
        """Exchanges a number with every rank, so that connections are made here and not within the first step.
        Waits."""
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
        """Returns how long the oldest collective has taken."""
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
            if self._refuse_late() < self.spin_s:
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


def sum_in_order(values: Tensor) -> Tensor:
    """Adds values [n, ...] in their own memory. Returns the sum, which is the first."""
    distance = 1
    while distance < len(values):
        others = values[distance :: 2 * distance]
        values[:: 2 * distance][: len(others)].add_(others)
        distance *= 2
    return values[0]


def padded(length: int, ranks: int) -> int:
    return -(-length // ranks) * ranks


class PartVector:
    """A rank's results besides row gradients, and those of each of its parts, for some weights: one vector.

    | gradient of weight 0 | of weight 1 | ... | loss | 1 for each weight with a gradient | scalars | zeros for slices |
      of each part, added in order              | of the rank                                         of equal length"""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], parts: int, ranks: int, device: torch.device, scalars: int = 0
    ) -> None:
        """`weights`: by name. `parts`: of this rank. `scalars`: the number of additional sums."""
        self._names, self._weights = list(weights), list(weights.values())
        sizes = [weight.numel() for weight in self._weights]
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)
        self._places = list(pairwise(ends))
        self._loss, self._flags = ends[-1], ends[-1] + 1
        self._scalars = self._flags + len(sizes)
        self._end = self._scalars + scalars
        self._of_parts = torch.zeros(parts, padded(self._end, ranks), dtype=torch.float32, device=device)
        self.own = self._of_parts[0]
        self.scalars = self.own[self._scalars : self._end]
        self._no_gradient = torch.zeros(max(sizes, default=0), dtype=torch.float32, device=device)
        self._given, self._told = [False] * len(sizes), [False] * len(sizes)
        self._gradients: list[Tensor | None] = []  # of the weights, once all agree on which have one

    def take(self, part: int, loss: Tensor | None) -> None:
        """Takes a part's weighted loss and the gradients of its backward pass, and clears them. `loss`: None if the
        part has no samples."""
        of_part = self._of_parts[part, : self._flags]
        if loss is None:
            of_part.zero_()
            return
        pieces = []
        for index, (weight, (first, end)) in enumerate(zip(self._weights, self._places, strict=True)):
            gradient, weight.grad = weight.grad, None
            self._given[index] |= gradient is not None
            pieces.append(self._no_gradient[: end - first] if gradient is None else gradient.reshape(-1))
        torch.cat([*pieces, loss.view(1)], out=of_part)

    def add_up(self) -> None:
        """Sums the parts. From here on, `own` is this rank's vector, whose `scalars` the caller sets."""
        sum_in_order(self._of_parts[:, : self._flags])
        for index, (given, told) in enumerate(zip(self._given, self._told, strict=True)):
            if given != told:  # almost never: the vector's memory is kept
                self.own[self._flags + index : self._flags + index + 1].fill_(given)
        self._told, self._given = self._given, [False] * len(self._given)

    def give(self, total: Tensor) -> None:
        """Sets the gradients of the weights that have one: views of `total`, which is the same memory in each step.

        In the first call ranks agree on which have one, and wait for the device. No optimizer is applied to the
        others."""
        if not self._gradients:
            are_given = total[self._flags : self._scalars].tolist()
            self._gradients = [
                total[first:end].view_as(weight) if given else None
                for weight, (first, end), given in zip(self._weights, self._places, are_given, strict=True)
            ]
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient

    def told(self, total: Tensor) -> Tensor:
        """f32, a view: what `read` takes."""
        return total[self._loss : self._end]

    def read(self, told: Tensor, train_step: int) -> tuple[float, list[float]]:
        """Returns loss and scalars, from the host's copy of `told`. Raises ConfigError, the same on all ranks, if other
        weights have a gradient than was agreed."""
        loss, *others = told.tolist()
        for name, given, gradient in zip(self._names, others, self._gradients, strict=False):
            if bool(given) != (gradient is not None):
                now, before = ("a", "none") if given else ("no", "one")
                raise ConfigError(
                    f"train step {train_step} gives the weight {name} {now} gradient, and the first step gave it "
                    f"{before}; with several parts or ranks let every loss depend on the same weights, for example "
                    "by adding 0 times their sum"
                )
        return loss, others[len(self._weights) :]
