"""Defines the collectives between ranks: copies only, under the names of torch.distributed."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from rowcast.trainer.device.streams import Work


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
