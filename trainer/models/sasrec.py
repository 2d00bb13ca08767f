"""SASRec: Kang and McAuley, Self-Attentive Sequential Recommendation (ICDM 2018, arXiv 1808.09781).

    x = sqrt(D) e + place                               dropout
    each block: x = x + attention(norm(x), x, x)        causal, items only
                x = x + W2 relu(W1 norm(x))             dropout after each layer
    v = norm(x)

Trained with the sampled softmax of `next_item.py` in place of the paper's binary loss with one negative.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, layer_norm

from rowcast.job.models import NextItemSettings
from rowcast.trainer.models.dlrm import linear_layers
from rowcast.trainer.models.next_item import History, NextItemModel


class Block(nn.Module):
    def __init__(self, width: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = linear_layers([width] * 5, generator)
        self.ffn = linear_layers([width] * 3, generator)
        self.norms = nn.ParameterList([new_norm(width), new_norm(width)])

    def forward(self, x: Tensor, visible: Tensor, rate: float) -> Tensor:
        """x f32 [B, L, D]; visible bool [B, 1, L, L]."""
        query = normed(x, self.norms[0])
        queries, keys, values = (
            in_heads(layer(own), self.heads) for layer, own in ((self.query, query), (self.key, x), (self.value, x))
        )
        scores = queries @ keys.transpose(2, 3) / queries.shape[-1] ** 0.5
        weights = dropout(scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0), rate, self.training)
        x = x + self.out((weights @ values).transpose(1, 2).flatten(2))
        inner = dropout(torch.relu(self.ffn[0](normed(x, self.norms[1]))), rate, self.training)
        return x + dropout(self.ffn[1](inner), rate, self.training)


class SASRec(NextItemModel):
    """Parameters: `place`, `blocks.<n>.*` and `norm`."""

    def build(self, settings: NextItemSettings, width: int, generator: torch.Generator) -> None:
        self.place = nn.Parameter(
            torch.empty(self.length, width, device="cpu").normal_(0.0, width**-0.5, generator=generator)
        )
        self.blocks = nn.ModuleList(Block(width, settings.heads, generator) for _ in range(settings.blocks))
        self.norm = new_norm(width)

    def encode(self, history: History) -> Tensor:
        x = dropout(history.items * history.items.shape[-1] ** 0.5 + self.place, self.rate, self.training)
        visible = causal(history.mask)
        for block in self.blocks:
            x = block(x, visible, self.rate)
        return normed(x, self.norm)


def in_heads(x: Tensor, heads: int) -> Tensor:
    """f32 [B, L, D] -> [B, heads, L, D / heads]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def causal(mask: Tensor) -> Tensor:
    """Returns which places each place sees, bool [B, 1, L, L]: the items up to its own. mask bool [B, L]."""
    length = mask.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return (mask[:, None, :] & before)[:, None]


def new_norm(width: int) -> nn.Parameter:
    """The scale and the bias of a layer norm, f32 [2, width]."""
    return nn.Parameter(torch.stack([torch.ones(width, device="cpu"), torch.zeros(width, device="cpu")]))


def normed(x: Tensor, scale_and_bias: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], scale_and_bias[0], scale_and_bias[1])
