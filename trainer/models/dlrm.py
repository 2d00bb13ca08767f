"""DLRM: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems.

arXiv 1906.00091. Other models build their stacks of linear layers with the same initial values.

DCNv2 with cross layers of low rank, as in MLPerf's DLRM-DCNv2: Wang et al., DCN V2 (arXiv 2008.13535).

dense -> bottom MLP -+
                     cat = x_0 -> cross layers -> top MLP -> logit
embeddings ----------+            x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l

Wide & Deep (Cheng et al., arXiv 1606.07792) and DeepFM (Guo et al., arXiv 1703.04247).

dense, embeddings -> MLP ------------------+
embeddings -> products of all pairs (FM) --+-> sum -> logit
linear weights, dense -> sum --------------+

Wide & Deep has no products. The wide part of a feature is the linear weight of its row, from the same look-up.

Two towers with an in-batch softmax: Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
Recommendations (RecSys 2019); the towers are those of DSSM (Huang et al., CIKM 2013).

    dense, the other features -> user MLP -> u, length 1
    item features             -> item MLP -> v, length 1

    score(i, j) = u_i v_j / temperature                  evaluation: the logit of sample i is score(i, i)
    loss = mean over i of label_i * -log softmax over j of (score(i, j) - log frequency of item j), at j = i

A label is the paper's reward: a sample with label 0 adds no loss, but its item is a negative of all others. An item
that occurs again in the batch is not a negative of itself.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from rowcast.job.models import BottomAndTop, DCNv2Settings, DLRMSettings, Top, TwoTowerSettings
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.kernels.choose import choose_interaction
from rowcast.trainer.kernels.torch_ops import Interaction
from rowcast.trainer.models.embedding import joined


def linear_layers(widths: list[int], generator: torch.Generator) -> nn.ModuleList:
    return nn.ModuleList(linear(width_in, width_out, generator) for width_in, width_out in itertools.pairwise(widths))


def linear(width_in: int, width_out: int, generator: torch.Generator) -> nn.Linear:
    """A layer with the published initial values: normal, deviation sqrt(2 / (in + out)), sqrt(1 / out) for biases.

    Without input (a job without dense features) it returns its biases, which are trained like any others."""
    layer = EmptyLinear(width_in, width_out, device="cpu")
    with torch.no_grad():
        layer.weight.normal_(0.0, (2 / (width_in + width_out)) ** 0.5, generator=generator)
        layer.bias.normal_(0.0, (1 / width_out) ** 0.5, generator=generator)
    return layer


class EmptyLinear(nn.Linear):
    """A layer without values, because nn.Linear draws them from the global random state."""

    def reset_parameters(self) -> None:
        pass


def relu_layers(layers: nn.ModuleList, features: Tensor) -> Tensor:
    for layer in layers:
        features = torch.relu(layer(features))
    return features


def logits_of(layers: nn.ModuleList, features: Tensor) -> Tensor:
    """Applies all layers, with a ReLU after each but the last, which has width 1; returns f32 [B]."""
    logits: Tensor = layers[-1](relu_layers(layers[:-1], features))
    return logits.squeeze(1)


class DLRM(nn.Module):
    """Bottom MLP, dot products of all pairs, top MLP.

    The interaction appends to the bottom output the dot products of vectors i > j of [bottom output, features in the
    job's order], in the order (1, 0), (2, 0), (2, 1), (3, 0), ... Parameters are `bottom_mlp.<n>.weight` and so on; n
    counts linear layers from 0."""

    lower: Tensor  # i64 [1, pairs]: the position of each pair in a flattened [F + 1, F + 1]

    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        assert isinstance(job.model, BottomAndTop)
        generator = torch.Generator().manual_seed(job.job.seed)
        num_vectors = len(job.features) + 1
        i, j = torch.tril_indices(num_vectors, num_vectors, offset=-1, device="cpu")
        self.register_buffer("lower", (i * num_vectors + j)[None], persistent=False)
        self._fused = isinstance(job.model, DLRMSettings) and job.model.interaction == "fused"
        self._kernels = job.trainer.kernels
        bottom_width = job.model.bottom_mlp[-1]
        self.bottom_mlp = linear_layers([num_dense, *job.model.bottom_mlp], generator)
        self.top_mlp = linear_layers([bottom_width + len(i), *job.model.top_mlp], generator)

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> Tensor:
        return logits_of(self.top_mlp, self.interact(relu_layers(self.bottom_mlp, dense), embeddings))

    def interact(self, bottom: Tensor, embeddings: list[Tensor]) -> Tensor:
        """f32 [B, D] and F of f32 [B, D] -> f32 [B, D + F * (F + 1) / 2]."""
        if self._fused:
            # in fp32 under autocast too
            chosen = choose_interaction(bottom.device, self._kernels, len(embeddings), bottom.shape[1])
            return cast(Tensor, cast(Any, FusedInteraction).apply(chosen, bottom.float(), *embeddings))
        vectors = torch.stack([bottom, *embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat([bottom, products.gather(1, self.lower.expand(products.shape[0], -1))], dim=1)


class FusedInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Interaction, bottom: Tensor, *embeddings: Tensor) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(bottom, *embeddings)
        return kernels.forward(bottom.contiguous(), features_of(embeddings))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bottom, *embeddings = ctx.saved_tensors
        bottom_grad, feature_grads = ctx.kernels.backward(
            bottom.contiguous(), features_of(embeddings), grad.contiguous()
        )
        return None, bottom_grad, *feature_grads.unbind(0)


def features_of(embeddings: Sequence[Tensor]) -> Tensor:
    """Returns f32 [F, B, D]."""
    return joined(embeddings).view(len(embeddings), *embeddings[0].shape)


class DCNv2(nn.Module):
    """Bottom MLP, cross network over the concatenation, top MLP. Embeddings may have any widths.

    Parameters are `bottom_mlp.<n>.weight` and so on as in DLRM, and for cross layer l `cross.<l>.v.weight`
    [rank, width], `cross.<l>.w.weight` [width, rank] and `cross.<l>.w.bias` [width]."""

    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(job.job.seed)
        assert isinstance(job.model, DCNv2Settings)
        width = job.model.bottom_mlp[-1] + sum(table.embedding_dim * len(table.features) for table in job.tables)
        self.bottom_mlp = linear_layers([num_dense, *job.model.bottom_mlp], generator)
        self.cross = nn.ModuleList(
            LowRankCross(width, job.model.cross_rank, generator) for _ in range(job.model.cross_layers)
        )
        self.top_mlp = linear_layers([width, *job.model.top_mlp], generator)

    def forward(self, dense: Tensor, embeddings: list[Tensor]) -> Tensor:
        first = crossed = torch.cat([relu_layers(self.bottom_mlp, dense), *embeddings], dim=1)
        for layer in self.cross:
            crossed = layer(first, crossed)
        return logits_of(self.top_mlp, crossed)


class LowRankCross(nn.Module):
    """One cross layer, initialised as TorchRec's LowRankCrossNet: Xavier normal matrices, a bias of zeros."""

    def __init__(self, width: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.v = EmptyLinear(width, rank, bias=False, device="cpu")
        self.w = EmptyLinear(rank, width, device="cpu")
        for matrix in (self.v.weight, self.w.weight):
            nn.init.xavier_normal_(matrix, generator=generator)
        nn.init.zeros_(self.w.bias)

    def forward(self, first: Tensor, crossed: Tensor) -> Tensor:
        """x_0 and x_l f32 [B, width] -> x_{l+1}."""
        product: Tensor = first * self.w(self.v(crossed))
        return product + crossed


class WideDeep(nn.Module):
    """Parameters are `wide.weight` [1, num_dense] and `wide.bias` [1], and `top_mlp.<n>.weight` and so on; n counts
    linear layers from 0. Embeddings may have any widths."""

    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        assert isinstance(job.model, Top)
        generator = torch.Generator().manual_seed(job.job.seed)
        width = num_dense + sum(table.embedding_dim * len(table.features) for table in job.tables)
        self.wide = linear(num_dense, 1, generator)
        self.top_mlp = linear_layers([width, *job.model.top_mlp], generator)

    def forward(self, dense: Tensor, embeddings: list[Tensor], linear_weights: list[Tensor]) -> Tensor:
        wide: Tensor = torch.cat([self.wide(dense), *linear_weights], dim=1).sum(1)
        return wide + logits_of(self.top_mlp, torch.cat([dense, *embeddings], dim=1))


class DeepFM(WideDeep):
    """Wide & Deep, and the dot products of all pairs of embeddings, which have one width."""

    def forward(self, dense: Tensor, embeddings: list[Tensor], linear_weights: list[Tensor]) -> Tensor:
        logits = super().forward(dense, embeddings, linear_weights)
        vectors = torch.stack(embeddings, dim=1)  # [B, F, D]; the sum of v_i * v_j over pairs i < j in time linear in F
        return logits + 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)


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
        diagonal = torch.arange(len(labels), device=labels.device)
        return (cross_entropy(scores, diagonal, reduction="none") * labels).mean()


def tower(layers: nn.ModuleList, features: Tensor) -> Tensor:
    """Applies all layers, with a ReLU after each but the last; returns f32 [B, E] of length 1."""
    return normalize(layers[-1](relu_layers(layers[:-1], features)).float(), dim=1)
