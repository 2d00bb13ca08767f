"""Cuts a tensor into tensors that are neighbours in memory, and joins such tensors again without a copy."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns the parts [n, D] one after the other: a view if they are neighbours in one memory, otherwise a copy."""
    if all(part.is_contiguous() for part in parts) and all(follows(*pair) for pair in pairwise(parts)):
        # the strides of a part say nothing: a dimension of 0 or 1 may have any
        flat = parts[0].as_strided((sum(part.numel() for part in parts),), (1,))
        return flat.view(sum(len(part) for part in parts), *parts[0].shape[1:])
    return torch.cat(list(parts))


def follows(part: Tensor, following: Tensor) -> bool:
    own, others = part.untyped_storage(), following.untyped_storage()
    return (
        own.data_ptr() == others.data_ptr()
        and own.nbytes() == others.nbytes()
        and part.dtype == following.dtype
        and part.shape[1:] == following.shape[1:]
        and part.storage_offset() + part.numel() == following.storage_offset()
    )


class Cut(torch.autograd.Function):
    """`split_with_sizes`, whose backward pass copies nothing if the gradients are neighbours."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        return whole.split_with_sizes(sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return joined(grads), None


def cut(whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Returns views [size, D] of each size. Only this call of `Function.apply` is typed."""
    return list(cast(Any, Cut).apply(whole, sizes))
