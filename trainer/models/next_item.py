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
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rowcast.job.models import NextItemSettings
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
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
    found = found_in(inputs, name)
    if not isinstance(found, Sequences):
        raise ConfigError(f'the array {name} belongs to samples; set data.of.{name} = "{feature}"')
    return found
