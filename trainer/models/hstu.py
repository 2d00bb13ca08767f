"""HSTU: Zhai et al., Actions Speak Louder than Words (ICML 2024, arXiv 2402.17152), without actions.

    each layer: U, V, Q, K = silu(W1 norm(x))
                a = silu(Q K' + bias by distance + bias by time between) / L      causal, items only; no softmax
                x = x + W2 (norm(a V) * U)                                          dropout before W2
    v = x

The time between two items is counted in 64 classes by its binary logarithm, exactly: 0 and 1 s are class 0, 2 and 3 s
class 1, 4 to 7 s class 2.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, layer_norm, silu

from rowcast.job.models import NextItemSettings
from rowcast.trainer.models.dlrm import linear
from rowcast.trainer.models.next_item import History, NextItemModel
from rowcast.trainer.models.sasrec import causal, in_heads

TIME_CLASSES = 64


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, length: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.into, self.out = linear(width, 4 * width, generator), linear(width, width, generator)
        self.distance = nn.Parameter(torch.zeros(length, device="cpu"))
        self.time = nn.Parameter(torch.zeros(TIME_CLASSES, device="cpu"))

    def forward(self, x: Tensor, visible: Tensor, distances: Tensor, classes: Tensor, rate: float) -> Tensor:
        """x f32 [B, L, D]; visible bool [B, 1, L, L]; distances i64 [L, L]; classes i64 [B, L, L]."""
        width = x.shape[-1:]
        gate, values, queries, keys = silu(self.into(layer_norm(x, width))).chunk(4, dim=-1)
        values, queries, keys = (in_heads(own, self.heads) for own in (values, queries, keys))
        bias = (self.distance[distances] + self.time[classes])[:, None]
        weights = silu(queries @ keys.transpose(2, 3) + bias) / x.shape[1]
        attended = (weights.masked_fill(~visible, 0.0) @ values).transpose(1, 2).flatten(2)
        outcome: Tensor = self.out(dropout(layer_norm(attended, width) * gate, rate, self.training))
        return x + outcome


class HSTU(NextItemModel):
    """Parameters: `layers.<n>.*`."""

    uses_times = True

    def build(self, settings: NextItemSettings, width: int, generator: torch.Generator) -> None:
        self.layers = nn.ModuleList(
            Layer(width, settings.heads, self.length, generator) for _ in range(settings.blocks)
        )

    def encode(self, history: History) -> Tensor:
        place = torch.arange(self.length, device=history.items.device)
        distances = (place[:, None] - place).clamp(min=0)
        classes = time_classes(history.times[:, :, None] - history.times[:, None, :])
        visible, x = causal(history.mask), history.items
        for layer in self.layers:
            x = layer(x, visible, distances, classes, self.rate)
        return x


def time_classes(between: Tensor) -> Tensor:
    """Returns the floor of the binary logarithm, i64, of i64 differences below 2**53; 0 for those below 1."""
    _, exponent = torch.frexp(between.clamp(min=1).double())
    return (exponent.long() - 1).clamp(max=TIME_CLASSES - 1)
