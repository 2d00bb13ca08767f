"""Defines the dot products of all pairs of a sample's vectors, in one pass: `model.interaction = "fused"`.

    vectors     v0 = bottom output, v1 = feature 0, v2 = feature 1, ...         f32 [B, D] each
    result      | v0 | v1.v0 | v2.v0 | v2.v1 | v3.v0 | ...                      f32 [B, D + F * (F + 1) / 2]

The functions here are plain torch operations, for every device; those of `triton_interaction` have the same bits. Each
product and each sum is rounded. A dot product adds the D products by neighbours: the first two, the next two and so on,
then these sums, with zeros up to a power of two. The gradient of a vector starts from 0.0, or from the direct gradient
of v0, and adds the other vectors' shares, v0's first.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

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
