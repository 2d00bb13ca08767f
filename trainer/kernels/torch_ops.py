"""The kernels in plain torch operations, for every device.

`torch.embedding_bag` is used as a segmented sum: it adds the rows of a bag one by one, in order, starting from 0, on the CPU and on
CUDA, and has the bits of `index_add_` and of `nn.Embedding`'s dense gradient. (On the CPU it is five to ten times as fast as those two
or `torch.segment_reduce`. It copies a whole table that is not contiguous, so it never sees the records themselves.)
"""

import torch
from torch import Tensor

from trainer.kernels import GroupLookup


def lookup(rows: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
    found = rows.index_select(0, group.slots)
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
    assert group.lookup_order is not None, "a weighted plan without lookup_order"
    grads = grads.index_select(0, group.bag_order)
    grads *= group.weights.index_select(0, group.lookup_order)[:, None]
    return segment_sum(grads, torch.arange(len(grads), dtype=torch.int32, device=grads.device), group.segment_offsets)


def segment_sum(source: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
    """f32 [S, D]: out[s] = 0 + source[index[i]] + ... for i from offsets[s] to offsets[s + 1] - 1, in this order.

    source f32 [M, D]; index i32 [N]; offsets i32 [S + 1], from 0 to N.
    """
    if len(index) == 0:
        return source.new_zeros(len(offsets) - 1, source.shape[1])
    summed: Tensor = torch.embedding_bag(source.contiguous(), index, offsets, mode=0, include_last_offset=True)[0]
    return summed
