"""Defines the dot products of all pairs of a sample's vectors, in one pass: `model.interaction = "fused"`.

    vectors     v0 = bottom output, v1 = feature 0, v2 = feature 1, ...         f32 [B, D] each
    result      | v0 | v1.v0 | v2.v0 | v2.v1 | v3.v0 | ...                      f32 [B, D + F * (F + 1) / 2]

Both implementations have the same bits. Each product and each sum is rounded. A dot product adds the D products by
neighbours: the first two, the next two and so on, then these sums, with zeros up to a power of two. The gradient of a
vector starts from 0.0, or from the direct gradient of v0, and adds the other vectors' shares, v0's first.
"""

from typing import Protocol

from torch import Tensor


class Interaction(Protocol):
    """Implemented by modules. Called on the compute stream, without autograd or waits for the device."""

    def forward(self, bottom: Tensor, features: Tensor) -> Tensor:
        """Returns the result. bottom f32 [B, D]; features f32 [F, B, D]; both contiguous."""

    def backward(self, bottom: Tensor, features: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of bottom and features. grad f32 [B, D + F * (F + 1) / 2], contiguous."""
