"""Cuts a tensor into tensors that are neighbours in memory, and joins such tensors again without a copy."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns the parts [n, D] one after the other: a view if they are neighbours in one memory, otherwise a copy."""
    first = parts[0]
    together = (sum(len(part) for part in parts), *first.shape[1:])
    if all(part.is_contiguous() for part in parts) and all(follows(*pair) for pair in pairwise(parts)):
        return first.as_strided(together, first.stride())
    return torch.cat(list(parts))


def follows(part: Tensor, following: Tensor) -> bool:
    return (
        part.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
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
