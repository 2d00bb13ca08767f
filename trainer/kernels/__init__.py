"""What an embedding layer does on the device: pooled look-ups, and the row optimizer on the gradients of their rows.

Every implementation has the bits of `torch_ops`: look-ups of a bag, and look-ups of a row, are added one by one in look-up order,
starting from 0. Work may be split over columns, bags and rows, never over the look-ups of one of them.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

RowOptimizerKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLookup:
    """One group's part of a step, on the device: N look-ups of U distinct rows in F * B bags; the plan's arrays, as they are."""

    batch_size: int  # B
    slots: Tensor  # i32 [N] slot of each look-up, feature-major
    unique_slots: Tensor  # i32 [U] slot of each distinct row
    segment_offsets: Tensor  # i32 [U + 1] where each distinct row's look-ups start in bag_order
    bag_order: Tensor  # i32 [N] the bag of each look-up, grouped by row, in look-up order within a row
    lookup_order: Tensor | None = None  # i32 [N] the look-up behind each entry of bag_order; only with weights
    offsets: Tensor | None = None  # i32 [F * B + 1] bag boundaries in slots, or None: every bag holds one look-up
    weights: Tensor | None = None  # f32 [N] per look-up, or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The records of a group by their parts: views of one memory, with any row stride."""

    weight: Tensor  # f32, f16 or bf16 [num_slots, D]: what a look-up reads
    master: Tensor | None  # f32 [num_slots, D]: the weights before rounding; None where `weight` itself is what is trained
    states: tuple[Tensor, ...]  # f32 [num_slots, D], or [num_slots, 1] of rowwise_adagrad; in the order of the record


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The row optimizer at one train step."""

    kind: RowOptimizerKind
    lr: float
    eps: float
    betas: tuple[float, float]  # adam
    step: int  # train steps, this one included: from 1


class Kernels(Protocol):
    """Implemented by modules. Called on the compute stream, without autograd; nothing here waits for the device."""

    def lookup(self, rows: Rows, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        """Pooled rows f32 [F * B, D]; an empty bag is zero. divisors f32 [F * B, 1]: what each bag's sum is divided by, or None where
        all would be 1.
        """

    def reduce(self, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        """Row gradients f32 [U, D], in the order of `unique_slots`: the gradient of `lookup` for pooled_grad f32 [F * B, D].

        Uses the plan's grouping: no sort, no hash map, no atomics.
        """

    def apply(self, rows: Rows, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        """One train step of the rows in `unique_slots`, i32 [U] and distinct, in place; row_grads f32 [U, D], zero gradients included.

        Arithmetic is in fp32; weights of fewer bits are rounded to the nearest, ties to even, when they are written.
        """

    def update(self, rows: Rows, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule) -> None:
        """`reduce`, then `apply`, in as few passes over the rows as there can be; with the bits of the two."""
