"""What an embedding layer does on the device: pooled look-ups, and the row optimizer on the gradients of their rows.

On the CPU every implementation has the bits of `torch_ops`: look-ups of a bag, and look-ups of a row, are added one by one in look-up
order, starting from 0. Work may be split over columns, bags and rows, never over the look-ups of one of them. On a device a row that is
looked up very often would keep all others waiting. So there each piece of a long row is summed like that, and then the pieces' sums:

    look-ups of a long row    | 0 1 2 ... 127 | 128 ... 255 | 256 257 |      PIECE_LOOKUPS a piece
    row gradient              0 + (0 + 0 + 1 + ... + 127) + (0 + 128 + ... + 255) + (0 + 256 + 257)
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLookup:
    """One group's part of a step, on the device: N look-ups of U distinct rows in G bags; the plan's arrays, as they are.

    A feature has B bags, or, where its look-ups stay apart (S of the F features), a bag for each; G is F * B where S is 0.
    """

    batch_size: int  # B
    slots: Tensor  # i32 [N] slot of each look-up, feature-major
    unique_slots: Tensor  # i32 [U] slot of each distinct row
    segment_offsets: Tensor  # i32 [U + 1] where each distinct row's look-ups start in bag_order
    bag_order: Tensor  # i32 [N] the bag of each look-up, grouped by row, in look-up order within a row
    # i32 [K] positions in unique_slots of the rows with more than PIECE_LOOKUPS look-ups, which are cut in pieces
    long_rows: Tensor
    # i32 [K + 1] where each long row's pieces start among all P; all but a row's last one are whole
    piece_offsets: Tensor
    piece_rows: Tensor  # i32 [P] the long row that each piece belongs to, as a position in long_rows
    lookup_order: Tensor | None = None  # i32 [N] the look-up behind each entry of bag_order; only with weights
    offsets: Tensor | None = None  # i32 [G + 1] bag boundaries in slots, or None: every bag holds one look-up
    weights: Tensor | None = None  # f32 [N] per look-up, or None
    # of the S features; no kernel needs these
    sequence_offsets: Tensor | None = None  # i32 [S, B + 1] where each sample's look-ups start among its feature's
    sequence_lookups: tuple[int, ...] = ()  # [S] look-ups of each


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
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

    def lookup(self, rows: Rows, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        """Pooled rows f32 [G, D]; an empty bag is zero. divisors f32 [G, 1]: what each bag's sum is divided by, or None where
        all would be 1.
        """

    def reduce(self, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        """Row gradients f32 [U, D], in the order of `unique_slots`: the gradient of `lookup` for pooled_grad f32 [G, D].

        Uses the plan's grouping: no sort, no hash map, no atomics.
        """

    def apply(self, rows: Rows, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        """One train step of the rows in `unique_slots`, i32 [U] and distinct, in place; row_grads f32 [U, D], zero gradients included.

        Arithmetic is in fp32; weights of fewer bits are rounded to the nearest, ties to even, when they are written.
        """

    def update(self, rows: Rows, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule) -> None:
        """`reduce`, then `apply`, in as few passes over the rows as there can be; with the bits of the two."""
