"""Two towers with an in-batch softmax: Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
Recommendations (RecSys 2019); the towers are those of DSSM (Huang et al., CIKM 2013).

    dense, the other features -> user MLP -> u, length 1
    item features             -> item MLP -> v, length 1

    score(i, j) = u_i v_j / temperature                  evaluation: the logit of sample i is score(i, i)
    loss = mean over i of label_i * -log softmax over j of (score(i, j) - log frequency of item j), at j = i

A label is the paper's reward: a sample with label 0 asks for nothing, but its item is a negative of all others. An item
that occurs again in the batch is not a negative of itself.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from rowcast.job.models import TwoTowerSettings
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.dlrm import linear_layers, relu_layers


class Towers(NamedTuple):
    """What the model returns for a batch."""

    users: Tensor  # f32 [B, E], length 1
    items: Tensor  # f32 [B, E], length 1
    log_frequency: Tensor  # f32 [B], of the samples' items; 0 without `model.log_frequency`
    item_ids: Tensor  # i64 [B], equal for samples with the same item


class TwoTower(nn.Module):
    """Parameters: `user_mlp.<n>.*` and `item_mlp.<n>.*`; n counts linear layers from 0.

    A model sees vectors, not ids. Samples whose item features have the same bits have the same item: different rows of
    random first values differ. The job file refuses items whose tables all begin with one value."""

    multipliers: Tensor  # i64 [W], odd
    score_name = "score"  # no logit: the softmax compares a user's items only

    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        settings = job.model
        assert isinstance(settings, TwoTowerSettings)
        generator = torch.Generator().manual_seed(job.job.seed)
        widths = [table.embedding_dim for table in job.tables for _ in table.features]
        self.item_features = [job.features.index(feature) for feature in settings.item_features]
        self.user_features = [index for index in range(len(widths)) if index not in self.item_features]
        self.log_frequency, self.temperature = settings.log_frequency, settings.temperature
        if self.log_frequency is not None and self.log_frequency >= num_dense:
            raise ConfigError(
                f"model.log_frequency = {self.log_frequency}, but the data has {num_dense} dense features, counted "
                "from 0; name one of them, or remove the key"
            )
        self.user_dense = [index for index in range(num_dense) if index != self.log_frequency]
        user_width = len(self.user_dense) + sum(widths[index] for index in self.user_features)
        item_width = sum(widths[index] for index in self.item_features)
        if not user_width:
            raise ConfigError(
                "model.item_features names every feature, and the data has no dense features for the user; leave out "
                "those that describe the user"
            )
        self.user_mlp = linear_layers([user_width, *settings.user_mlp], generator)
        self.item_mlp = linear_layers([item_width, *settings.item_mlp], generator)
        odd = torch.randint(2**62, (item_width,), generator=generator, device="cpu") * 2 + 1
        self.register_buffer("multipliers", odd, persistent=False)

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> Towers:
        users = torch.cat([dense[:, self.user_dense], *(embeddings[index] for index in self.user_features)], dim=1)
        items = torch.cat([embeddings[index] for index in self.item_features], dim=1)
        frequency = dense.new_zeros(dense.shape[0]) if self.log_frequency is None else dense[:, self.log_frequency]
        return Towers(tower(self.user_mlp, users), tower(self.item_mlp, items), frequency, self.ids_of(items.detach()))

    def ids_of(self, items: Tensor) -> Tensor:
        """Returns a number for each row of f32 [B, W], the same for the same bits: integer sums have no order."""
        return (items.view(torch.int32).long() * self.multipliers).sum(1)

    def logits(self, outputs: Towers) -> Tensor:
        """Returns f32 [B], for evaluation: each user's score of the sample's item."""
        return (outputs.users * outputs.items).sum(1) / self.temperature

    def loss(self, outputs: Towers, labels: Tensor) -> Tensor:
        """Returns f32 [], over the samples of the batch or of a part. labels f32 [B]."""
        scores = outputs.users @ outputs.items.T / self.temperature - outputs.log_frequency
        again = outputs.item_ids[:, None] == outputs.item_ids
        scores = scores.masked_fill(again.fill_diagonal_(False), -torch.inf)
        own = torch.arange(len(labels), device=labels.device)
        return (cross_entropy(scores, own, reduction="none") * labels).mean()


def tower(layers: nn.ModuleList, features: Tensor) -> Tensor:
    """Applies all layers, with a ReLU after each but the last; returns f32 [B, E] of length 1."""
    return normalize(layers[-1](relu_layers(layers[:-1], features)).float(), dim=1)
