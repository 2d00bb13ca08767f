"""Scores next items: what `sasrec` and `hstu` share. A model gives a vector for each place of a history.

    history      i0  i1  i2  i3             the newest item at the right
    vectors      v0  v1  v2  v3             v2 has seen i0, i1, i2
    positives            p2  p3             aligned at the right: p2 came after i2

    score of item j at place t              v_t . e_j
    loss = mean over samples of the mean over a sample's positives of

        -log( exp(s_p) / (exp(s_p) + sum over candidates j of exp(s_j) / (C q_j)) )

C candidates, drawn with probability q, estimate the sum over all items (Bengio and Senécal 2008). Without q the
candidates are all items themselves. A candidate that is the positive is left out. Since a sample's loss depends on no
other sample, parts of a batch change roundings and nothing else.

SASRec: Kang and McAuley, Self-Attentive Sequential Recommendation (ICDM 2018, arXiv 1808.09781).

    x = sqrt(D) e + place                               dropout
    each block: x = x + attention(norm(x), x, x)        causal, items only
                x = x + W2 relu(W1 norm(x))             dropout after each layer
    v = norm(x)

Trained with the sampled softmax of `next_item.py` in place of the paper's binary loss with one negative.

HSTU: Zhai et al., Actions Speak Louder than Words (ICML 2024, arXiv 2402.17152), without actions.

    each layer: U, V, Q, K = silu(W1 norm(x))
                a = silu(Q K' + bias by distance + bias by time between) / L      causal, items only; no softmax
                x = x + W2 (norm(a V) * U)                                          dropout before W2
    v = x

The time between two items is counted in 64 classes by its binary logarithm, exactly: 0 and 1 s are class 0, 2 and 3 s
class 1, 4 to 7 s class 2.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, layer_norm, silu

from rowcast.job.models import NextItemSettings
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.dlrm import linear, linear_layers
from rowcast.trainer.models.embedding import Embedded, Sequences
from rowcast.trainer.models.evaluate import ranks_among

Inputs = Mapping[str, Embedded]
NO_INPUTS: Inputs = MappingProxyType({})


class Scores(NamedTuple):
    """Scores of the P positives of a batch's B samples, each among C candidates."""

    positives: Tensor  # f32 [P]
    least: Tensor  # f32 [P]: `positives` less the roundings of a product
    candidates: Tensor  # f32 [P, C]
    log_counts: Tensor  # f32 [C]: log(C q), or [] with 0 if the candidates are all items
    is_positive: Tensor  # bool [P, C]: the candidate is the positive
    weights: Tensor  # f32 [P]: of each loss in the mean; 0 for a positive that is older than the history


class History(NamedTuple):
    """The last L items of each sample's history, padded at the left."""

    items: Tensor  # f32 [B, L, D]
    mask: Tensor  # bool [B, L]: True at an item
    times: Tensor  # i64 [B, L], 0 in the padding; zeros if the model uses no times


class NextItemModel(nn.Module):
    """Subclasses implement `build` and `encode`. Outputs are `Scores`."""

    uses_times = False

    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        settings = job.model
        assert isinstance(settings, NextItemSettings)
        self.length, self.time, self.rate = settings.history, settings.time, settings.dropout
        self.names = settings.history_feature, settings.positive_feature, settings.candidate_feature
        self.places = [job.features.index(name) for name in self.names]
        [width] = [table.embedding_dim for table in job.tables if settings.history_feature in table.features]
        self.build(settings, width, torch.Generator().manual_seed(job.job.seed))

    def build(self, settings: NextItemSettings, width: int, generator: torch.Generator) -> None:
        """Makes the parameters, with values from `generator`, for items of `width`."""
        raise NotImplementedError

    def encode(self, history: History) -> Tensor:
        """Returns a vector for each place, f32 [B, L, D]. Those of the padding are never read."""
        raise NotImplementedError

    def forward(self, dense: Tensor, embeddings: list[Embedded], inputs: Inputs = NO_INPUTS) -> Scores:
        """Raises ConfigError if the data lacks an array that the model needs."""
        history, positives, candidates = (embeddings[place] for place in self.places)
        assert isinstance(history, Sequences), "the job file refuses histories that are pooled"
        assert isinstance(positives, Sequences), "and positives"
        assert isinstance(candidates, Tensor), "candidates are the batch's"
        _, positive, candidate = self.names
        items, mask = history.padded(self.length)
        times = torch.zeros_like(mask, dtype=torch.int64)
        if self.uses_times:
            times, _ = sequences_in(inputs, self.time, self.names[0]).padded(self.length)
        vectors = self.encode(History(items, mask, times))
        ids = sequences_in(inputs, f"{positive}.id", positive).values
        candidate_ids = found_in(inputs, f"{candidate}.id")
        log_q = inputs.get(f"{candidate}.log_q", candidates.new_tensor(-math.log(len(candidates))))
        assert isinstance(candidate_ids, Tensor), "of the batch"
        assert isinstance(log_q, Tensor), "of the batch"
        place, weights = places_of(positives, self.length)
        chosen = vectors.flatten(0, 1)[place]
        scores = (chosen * positives.values).sum(-1)
        return Scores(
            positives=scores,
            least=scores - rounding_of(chosen, positives.values),
            candidates=chosen @ candidates.T,
            log_counts=log_q + math.log(len(candidates)),
            is_positive=ids[:, None] == candidate_ids,
            weights=weights,
        )

    def loss(self, outputs: Scores, labels: Tensor) -> Tensor:
        """Returns f32 []. A sample without positives has loss 0."""
        others = (outputs.candidates - outputs.log_counts).masked_fill(outputs.is_positive, -torch.inf)
        scores = torch.cat([outputs.positives[:, None], others], dim=1)
        losses = scores.logsumexp(1) - outputs.positives
        return (losses * outputs.weights).sum()

    def ranks(self, outputs: Scores) -> Tensor:
        return ranks_among(outputs.least, outputs.candidates, outputs.is_positive)[outputs.weights > 0]


def rounding_of(vectors: Tensor, items: Tensor) -> Tensor:
    """Returns how far apart two products of the same vectors may be, f32 [P]; both f32 [P, D].

    A positive and its candidates are multiplied by different kernels. Without this, equal items would not always tie.
    """
    product: Tensor = torch.linalg.vector_norm(vectors, dim=1) * torch.linalg.vector_norm(items, dim=1)
    return product * 2.0**-18


def places_of(positives: Sequences, length: int) -> tuple[Tensor, Tensor]:
    """Returns each positive's place among the B * length vectors, i64 [P], and its weight in the loss, f32 [P].

    A sample's positives have one weight together. Those older than the history have place 0 and weight 0."""
    ends, counts = positives.offsets[1:].long(), positives.offsets.diff()
    lookup = torch.arange(len(positives.values), device=ends.device)
    sample = torch.searchsorted(ends, lookup, right=True)
    column = lookup - ends[sample] + length
    weights = 1 / (counts.clamp(min=1, max=length)[sample] * len(counts))
    return torch.where(column < 0, 0, sample * length + column), weights.masked_fill(column < 0, 0.0)


def found_in(inputs: Inputs, name: str) -> Embedded:
    if name not in inputs:
        raise ConfigError(
            f"the data has no array {name}, which the model needs; it has {', '.join(inputs) or 'none'}: see "
            "data.columns.inputs and data.negatives"
        )
    return inputs[name]


def sequences_in(inputs: Inputs, name: str, feature: str) -> Sequences:
    array = found_in(inputs, name)
    if not isinstance(array, Sequences):
        raise ConfigError(f'the array {name} belongs to samples; set data.of.{name} = "{feature}"')
    return array


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
            in_heads(layer(vectors), self.heads)
            for layer, vectors in ((self.query, query), (self.key, x), (self.value, x))
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
        values, queries, keys = (in_heads(projected, self.heads) for projected in (values, queries, keys))
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
