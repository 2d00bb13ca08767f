"""Implements the kernels in plain torch operations, for every device, as the reference for the other implementations.

`torch.embedding_bag` is used as a segmented sum: it adds the rows of a bag one by one, in order, starting from 0, on
the CPU and on CUDA, and has the bits of `index_add_` and of `nn.Embedding`'s dense gradient. (On the CPU it is five to
ten times as fast as those two or `torch.segment_reduce`. It copies a whole table that is not contiguous, so it never
gets the records themselves.)

The row optimizers (`row_optimizers/`) do the operations of torch.optim on whole tables, in the same order, on
contiguous blocks [U, width] of a batch's rows. Their bits do not depend on how rows are cut into blocks, so gathered
rows and whole tables agree.
"""

import torch
from torch import Tensor

from rowcast.trainer.kernels import GroupLookup, RecordViews, Rule, row_optimizers

# (weight, states, row_grads, rule): in place on blocks f32 [U, width] of the weight and of each state
RULES = {name: module.train for name, module in row_optimizers.having("train").items()}


def lookup(rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
    found = rows.weight.index_select(0, group.slots).float()
    if group.weights is not None:
        found *= group.weights[:, None]
    if group.offsets is None:
        return found.add_(0.0)  # the sum of one row, starting from 0: -0.0 becomes 0.0
    pooled = segment_sum(found, torch.arange(len(found), dtype=torch.int32, device=found.device), group.offsets)
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
