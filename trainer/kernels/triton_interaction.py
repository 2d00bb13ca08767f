"""Implements the interaction in Triton: a program has one sample, whose vectors it reads once.

forward     v[0], ..., v[i - 1] times v[i], for each i; only the pairs i > j, in tiles of 2, 4, 8, ... vectors
backward    all gradients together, one vector's share after the other
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from rowcast.trainer.kernels.triton_code import device, kernel, row_sums
from rowcast.trainer.kernels.triton_ops import rounded

WARP_FLOATS = 2**10  # of a tile of all vectors, for a warp
MOST_WARPS = 8


def forward(bottom: Tensor, features: Tensor) -> Tensor:
    num_features, (batch_size, dim) = len(features), bottom.shape
    result = bottom.new_empty(batch_size, dim + num_features * (num_features + 1) // 2)
    if batch_size:
        interact_kernel[(batch_size,)](bottom, features, result, batch_size, **options(num_features, dim))
    return result


def backward(bottom: Tensor, features: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    bottom_grad, feature_grads = torch.empty_like(bottom), torch.empty_like(features)
    if len(bottom):
        interact_backward_kernel[(len(bottom),)](
            bottom, features, grad, bottom_grad, feature_grads, len(bottom), **options(*features.shape[::2])
        )
    return bottom_grad, feature_grads


def options(num_features: int, dim: int) -> dict[str, Any]:
    tile, columns = 1 << num_features.bit_length(), 1 << (dim - 1).bit_length()
    warps = min(MOST_WARPS, max(1, tile * columns // WARP_FLOATS))
    return {"N": num_features + 1, "TILE": tile, "D": dim, "BLOCK": columns, "num_warps": warps, **rounded()}


@kernel("batch_size")
def interact_kernel(
    bottom: tl.tensor,
    features: tl.tensor,
    result: tl.tensor,
    batch_size: tl.tensor,
    N: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sample = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    out = result + sample * (D + N * (N - 1) // 2)
    tl.store(out + columns, tl.load(bottom + sample * D + columns, mask=columns < D), mask=columns < D)
    for k in tl.static_range(10):
        if (2 << k) <= TILE:  # vectors 2^k to 2^(k+1) - 1 have pairs with fewer vectors than the tile
            other = tl.arange(0, 2 << k)
            others = vectors_at(bottom, features, other, sample, batch_size, N, D, BLOCK)
            for i in range(1 << k, tl.minimum(2 << k, N)):
                own = vectors_at(bottom, features, i + tl.arange(0, 1), sample, batch_size, N, D, BLOCK)
                sums = tl.reshape(row_sums(others * own), [2 << k])
                tl.store(out + D + i * (i - 1) // 2 + other, sums, mask=other < i)


@kernel("batch_size")
def interact_backward_kernel(
    bottom: tl.tensor,
    features: tl.tensor,
    grad: tl.tensor,
    bottom_grad: tl.tensor,
    feature_grads: tl.tensor,
    batch_size: tl.tensor,
    N: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sample = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    own = tl.arange(0, TILE)
    grad += sample * (D + N * (N - 1) // 2)
    total = tl.load(grad + columns, mask=(own == 0)[:, None] & (columns < D), other=0.0)
    for j in range(N):
        other = vectors_at(bottom, features, j + tl.arange(0, 1), sample, batch_size, N, D, BLOCK)
        more, fewer = tl.maximum(own, j), tl.minimum(own, j)
        is_pair = (own != j) & (own < N)
        pair = tl.load(grad + D + more * (more - 1) // 2 + fewer, mask=is_pair, other=0.0)
        total = tl.where(is_pair[:, None], total + pair[:, None] * other, total)
    row = (own[:, None] - 1) * batch_size.to(tl.int64) + sample
    tl.store(bottom_grad + sample * D + columns + own[:, None] * 0, total, mask=(own == 0)[:, None] & (columns < D))
    tl.store(feature_grads + row * D + columns, total, mask=((own > 0) & (own < N))[:, None] & (columns < D))


@device
def vectors_at(
    bottom: tl.tensor,
    features: tl.tensor,
    number: tl.tensor,
    sample: tl.tensor,
    batch_size: tl.tensor,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Returns f32 [numbers, BLOCK]: vectors of the sample; 0.0 in other columns and for numbers from N on."""
    columns = tl.arange(0, BLOCK)[None, :]
    row = (number[:, None] - 1) * batch_size.to(tl.int64) + sample
    of_bottom = tl.load(bottom + sample * D + columns, mask=(number == 0)[:, None] & (columns < D), other=0.0)
    is_feature = ((number > 0) & (number < N))[:, None]
    of_features = tl.load(features + row * D + columns, mask=is_feature & (columns < D), other=0.0)
    return tl.where((number == 0)[:, None], of_bottom, of_features)
