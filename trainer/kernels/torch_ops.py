"""Implements the kernels in plain torch operations, for every device, as the reference for the other implementations.

`torch.embedding_bag` is used as a segmented sum: it adds the rows of a bag one by one, in order, starting from 0, on
the CPU and on CUDA, and has the bits of `index_add_` and of `nn.Embedding`'s dense gradient. (On the CPU it is five to
ten times as fast as those two or `torch.segment_reduce`. It copies a whole table that is not contiguous, so it never
gets the records themselves.)

The row optimizers (`row_optimizers/`) do the operations of torch.optim on whole tables, in the same order, on
contiguous blocks [U, width] of a batch's rows. Their bits do not depend on how rows are cut into blocks, so gathered
rows and whole tables agree.

The fused interaction (`model.interaction = "fused"`) is the dot products of all pairs of a sample's vectors:

    vectors     v0 = bottom output, v1 = feature 0, v2 = feature 1, ...         f32 [B, D] each
    result      | v0 | v1.v0 | v2.v0 | v2.v1 | v3.v0 | ...                      f32 [B, D + F * (F + 1) / 2]

Each product and each sum is rounded. A dot product adds the D products by neighbours: the first two, the next two and
so on, then these sums, with zeros up to a power of two. The gradient of a vector starts from 0.0, or from the direct
gradient of v0, and adds the other vectors' shares, v0's first.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from rowcast.job.embedding_tables import RowType
from rowcast.trainer.kernels import DTYPES, GroupLookup, Kernels, RecordViews, Rule, row_optimizers

# (weight, states, row_grads, rule): in place on blocks f32 [U, width] of the weight and of each state
RULES = {name: module.train for name, module in row_optimizers.having("train").items()}


def lookup(rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
    looked_up = rows.weight.index_select(0, group.slots).float()
    if group.weights is not None:
        looked_up *= group.weights[:, None]
    if group.offsets is None:
        return looked_up.add_(0.0)  # the sum of one row, starting from 0: -0.0 becomes 0.0
    pooled = segment_sum(
        looked_up, torch.arange(len(looked_up), dtype=torch.int32, device=looked_up.device), group.offsets
    )
    return pooled if divisors is None else pooled.div_(divisors)


def reduce(pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
    grads = pooled_grad if divisors is None else pooled_grad / divisors
    if group.weights is None:
        return segment_sum(grads, group.bag_order, group.segment_offsets)
    assert group.lookup_order is not None, "a plan with weights has lookup_order"
    grads = grads.index_select(0, group.bag_order)
    grads *= group.weights.index_select(0, group.lookup_order)[:, None]
    return segment_sum(grads, torch.arange(len(grads), dtype=torch.int32, device=grads.device), group.segment_offsets)


def apply(rows: RecordViews, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
    slots = unique_slots.long()
    trained = rows.weight if rows.master is None else rows.master
    weight = trained.index_select(0, slots).float()
    states = [state.index_select(0, slots) for state in rows.states]
    RULES[rule.kind](weight, states, row_grads if rule.clip is None else clip_rows(row_grads, rule.clip), rule)
    rows.weight.index_copy_(0, slots, weight.to(rows.weight.dtype))
    if rows.master is not None:
        rows.master.index_copy_(0, slots, weight)
    for state, block in zip(rows.states, states, strict=True):
        state.index_copy_(0, slots, block)


def update(rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule) -> None:
    apply(rows, group.unique_slots, reduce(pooled_grad, group, divisors), rule)


def clip_rows(row_grads: Tensor, clip: float) -> Tensor:
    """Returns f32 [U, D]: scales each row to a norm of at most `clip`, by the factor of clip_grad_norm_."""
    norms = (row_grads * row_grads).sum(1, keepdim=True).sqrt()
    return row_grads * (clip / (norms + 1e-6)).clamp(max=1.0)


def segment_sum(source: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
    """Returns f32 [S, D]: out[s] = 0 + source[index[i]] + ... for i from offsets[s] to offsets[s + 1] - 1, in this
    order.

    source f32 [M, D]; index i32 [N]; offsets i32 [S + 1], from 0 to N.
    """
    if len(index) == 0:
        return source.new_zeros(len(offsets) - 1, source.shape[1])
    summed: Tensor = torch.embedding_bag(source.contiguous(), index, offsets, mode=0, include_last_offset=True)[0]
    return summed


def taken(looked_up: Tensor, dtype: RowType) -> Tensor:
    """Returns a table's input to the model, f32 [n, width], from pooled rows or rows without pooling. `dtype`:
    `ranks.gradients`. The gradient is rounded on its way back too. `Snapshot.taken` is the same without torch."""
    return looked_up.to(DTYPES[dtype]).float()


def with_gradients(kernels: Kernels, dtype: RowType) -> Kernels:
    return kernels if dtype == "fp32" else RoundedGradients(kernels)


class RoundedGradients:
    """Implements `Kernels`. A look-up's result and its gradient have values of bf16, wherever they were pooled.
    Between `reduce` and `apply` gradients are bf16, and so are sums of them."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def lookup(self, rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        return taken(self._kernels.lookup(rows, group, divisors), "bf16")

    def reduce(self, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        """Returns bf16 [U, D]. -0.0, to which the smallest are rounded, becomes 0.0 as in a sum: a part without the row
        adds 0.0."""
        return self._kernels.reduce(pooled_grad.bfloat16().float(), group, divisors).bfloat16().add_(0.0)

    def apply(self, rows: RecordViews, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        """`row_grads`: bf16 [U, D]."""
        self._kernels.apply(rows, unique_slots, row_grads.float(), rule)

    def update(
        self, rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule
    ) -> None:
        self.apply(rows, group.unique_slots, self.reduce(pooled_grad, group, divisors), rule)


BLOCK_FLOATS = 2**22  # of a temporary; samples are independent, so blocks of them change no bits


class Interaction(Protocol):
    """Implemented by modules. Called on the compute stream, without autograd or waits for the device."""

    def forward(self, bottom: Tensor, features: Tensor) -> Tensor:
        """Returns the result. bottom f32 [B, D]; features f32 [F, B, D]; both contiguous."""

    def backward(self, bottom: Tensor, features: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of bottom and features. grad f32 [B, D + F * (F + 1) / 2], contiguous."""


def forward(bottom: Tensor, features: Tensor) -> Tensor:
    num_features, (batch_size, dim) = len(features), bottom.shape
    result = bottom.new_empty(batch_size, dim + num_features * (num_features + 1) // 2)
    result[:, :dim] = bottom
    for first, end in blocks(features):
        vectors = torch.cat([bottom[None, first:end], features[:, first:end]])
        at = dim
        for i in range(1, len(vectors)):
            result[first:end, at : at + i] = neighbour_sums(vectors[:i] * vectors[i]).T
            at += i
    return result


def backward(bottom: Tensor, features: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    dim = bottom.shape[1]
    bottom_grad, feature_grads = torch.empty_like(bottom), torch.empty_like(features)
    for first, end in blocks(features):
        vectors = torch.cat([bottom[None, first:end], features[:, first:end]])
        grads = torch.zeros_like(vectors)
        grads[0] = grad[first:end, :dim]
        for j in range(len(vectors)):
            below = grad[first:end, dim + j * (j - 1) // 2 : dim + j * (j + 1) // 2].T
            above = [grad[first:end, dim + i * (i - 1) // 2 + j] for i in range(j + 1, len(vectors))]
            grads[:j] += below[:, :, None] * vectors[j]
            if above:
                grads[j + 1 :] += torch.stack(above)[:, :, None] * vectors[j]
        bottom_grad[first:end], feature_grads[:, first:end] = grads[0], grads[1:]
    return bottom_grad, feature_grads


def blocks(features: Tensor) -> Iterator[tuple[int, int]]:
    num_features, batch_size, dim = features.shape
    samples = max(1, BLOCK_FLOATS // max(1, num_features * dim))
    for first in range(0, batch_size, samples):
        yield first, min(first + samples, batch_size)


def neighbour_sums(products: Tensor) -> Tensor:
    """f32 [..., D] -> [...]."""
    width = 1 << (products.shape[-1] - 1).bit_length()
    sums = torch.nn.functional.pad(products, (0, width - products.shape[-1]))
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    return sums[..., 0]
