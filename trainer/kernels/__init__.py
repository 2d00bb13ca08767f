"""What an embedding layer does on the device: pooled look-ups, and the row optimizer on the gradients of their rows.

On the CPU every implementation has the bits of `torch_ops`: look-ups of a bag, and look-ups of a row, are added one by one in look-up
order, starting from 0. Work may be split over columns, bags and rows, never over the look-ups of one of them. On a device a row that is
looked up very often would keep all others waiting. So there each chunk of a long row is summed like that, and then the chunks' sums:

    look-ups of a long row    | 0 1 2 ... 127 | 128 ... 255 | 256 257 |      CHUNK_LOOKUPS a chunk
    row gradient              0 + (0 + 0 + 1 + ... + 127) + (0 + 128 + ... + 255) + (0 + 256 + 257)
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rowcast.protocol.plan_layout import LookupArrays
from rowcast.trainer.kernels.chunks import Chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLookup(LookupArrays[Tensor]):
    """One group's part of a step, on the device: the plan's arrays, and what follows from them."""

    batch_size: int
    sequence_lookups: tuple[int, ...] = ()  # look-ups of each feature whose look-ups stay apart
    chunks: Chunks[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordViews:
    """The records of a group by their parts: views of one memory, with any row stride."""

    weight: Tensor  # f32, f16 or bf16 [num_slots, D]: what a look-up reads
    # f32 [num_slots, D]: the weights before rounding; None where `weight` itself is what is trained
    master: Tensor | None
    states: tuple[
        Tensor, ...
    ]  # f32 [num_slots, D], or [num_slots, 1] of a state with one element a row; in the order of the record


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The row optimizer at one train step."""

    kind: str  # in job.row_optimizers.ROW_OPTIMIZERS
    lr: float
    eps: float
    betas: tuple[float, float]  # adam
    step: int  # train steps, this one included: from 1
    # each row's gradient g becomes g * min(1, clip / (||g||2 + 1e-6)) before anything else; None: as it is
    clip: float | None = None


class Kernels(Protocol):
    """Implemented by modules. Called on the compute stream, without autograd; nothing here waits for the device."""

    def lookup(self, rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        """Pooled rows f32 [G, D]; an empty bag is zero. divisors f32 [G, 1]: what each bag's sum is divided by, or None where
        all would be 1.
        """

    def reduce(self, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        """Row gradients f32 [U, D], in the order of `unique_slots`: the gradient of `lookup` for pooled_grad f32 [G, D].

        Uses the plan's grouping: no sort, no hash map, no atomics.
        """

    def apply(self, rows: RecordViews, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        """One train step of the rows in `unique_slots`, i32 [U] and distinct, in place; row_grads f32 [U, D], zero gradients included.

        Arithmetic is in fp32; weights of fewer bits are rounded to the nearest, ties to even, when they are written.
        """

    def update(
        self, rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule
    ) -> None:
        """`reduce`, then `apply`, in as few passes over the rows as there can be; with the bits of the two."""
