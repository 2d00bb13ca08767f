"""DIN: Zhou et al., Deep Interest Network for Click-Through Rate Prediction (arXiv 1706.06978).

    histories  k1 k2 ... kT            the last T entries; those at the same place, joined: item, shop, category
    targets    q  q  ... q             the candidate's, joined in the same order
    attention  a_t = MLP([q, k_t, q - k_t, q * k_t])            with softmax or, as in the paper, without
    interest   sum of a_t k_t
    top MLP    logit of [dense, pooled features, q, interest]

Hidden layers end in Dice or PReLU (section 5.3):

    y = p(s) s + (1 - p(s)) alpha s
    Dice   p(s) = sigmoid((s - mean) / sqrt(variance + eps))      mean and variance: the mini-batch's in training,
    PReLU  p(s) = 1 if s > 0, else 0                              moving averages in evaluation

 The paper gives the attention's MLP q, k and an "out product"; the four vectors here
are those of the authors' program (github.com/zhougr1993/DeepInterestNetwork), without its scaling before the softmax.

TBSM: Ishkhanov et al., Time-based Sequence Model for Personalization and Recommendation Systems (arXiv 2008.11922).

    time step       0    1   ...  T-1  |   T = the target
    sequences      e0   e1        eT-1 |   eT               the last T + 1 entries; with fewer, a sample begins later
    other features same at every step  |
    DLRM           h0   h1   ...  hT-1 |   w                one network for all steps; vectors of length 1
    attention       a = H A'A w, c = MLP(a) H               the context c: the history, weighted
    final MLP      logit of [c, w]

As in the authors' program (github.com/facebookresearch/tbsm, with their defaults: one time series layer, inner product
"def", mechanism "mlp"). A step before a sample's first entry is a zero vector there and here. Bottom and top MLP end in
a ReLU, the attention's MLP in a sigmoid.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from rowcast.job.models import DINSettings, TBSMSettings
from rowcast.job.schema import Job
from rowcast.trainer.models.dlrm import DLRM, linear_layers, logits_of, relu_layers
from rowcast.trainer.models.embedding import Embedded, Sequences


class TBSM(nn.Module):
    """A DLRM per time step, attention over the history, and a final MLP.

    Parameters: `dlrm.*` as in DLRM, `inner` (A), `attention_mlp.<n>.*` and `final_mlp.<n>.*`; n counts linear layers
    from 0. Sequences of one sample that differ in length end together. A sample without entries has a target of zeros.
    """

    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        settings = job.model
        assert isinstance(settings, TBSMSettings)
        width = settings.top_mlp[-1]
        generator = torch.Generator().manual_seed(job.job.seed + 1)  # DLRM draws from job.seed
        self.num_steps = settings.history + 1
        self.dlrm = DLRM(job, num_dense)
        self.inner = nn.Parameter(
            torch.empty(width, width, device="cpu").normal_(0.0, width**-0.5, generator=generator)
        )
        self.attention_mlp = linear_layers([settings.history, *settings.attention_mlp, settings.history], generator)
        self.final_mlp = linear_layers([2 * width, *settings.final_mlp], generator)

    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
        history, target = self.steps(dense, embeddings)
        return logits_of(self.final_mlp, torch.cat([self.context(history, target), target], dim=1))

    def steps(self, dense: Tensor, embeddings: list[Embedded]) -> tuple[Tensor, Tensor]:
        """Vectors f32 [B, T, W] of the history's steps, zero before the first entry, and f32 [B, W] of the target."""
        bottom = relu_layers(self.dlrm.bottom_mlp, dense)
        padded = [embedding.padded(self.num_steps) for embedding in embeddings if isinstance(embedding, Sequences)]
        present = torch.stack([mask for _, mask in padded]).any(0)
        sequences = iter([values for values, _ in padded])
        features = [
            next(sequences) if isinstance(feature, Sequences) else feature[:, None].expand(-1, self.num_steps, -1)
            for feature in (bottom, *embeddings)
        ]
        first, *others = (feature.flatten(0, 1) for feature in features)
        vectors = relu_layers(self.dlrm.top_mlp, self.dlrm.interact(first, others))
        vectors = normalize(vectors, dim=1).view(dense.shape[0], self.num_steps, -1)
        return vectors[:, :-1] * present[:, :-1, None], vectors[:, -1]

    def context(self, history: Tensor, target: Tensor) -> Tensor:
        """f32 [B, T, W] and [B, W] -> [B, W]: the sum of the history's vectors times their coefficients."""
        query = (target @ self.inner.T) @ self.inner
        products = torch.bmm(history, query[:, :, None]).squeeze(2)
        coefficients = torch.sigmoid(self.attention_mlp[-1](relu_layers(self.attention_mlp[:-1], products)))
        return torch.bmm(coefficients[:, None], history).squeeze(1)


EPSILON, MOMENTUM = 1e-8, 0.1  # the paper's; torch.nn.BatchNorm1d's


class Dice(nn.Module):
    """Parameter `alpha` [width], from 0; buffers `running_mean` and `running_var` [width], which training changes."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(width, device="cpu"))
        self.register_buffer("running_mean", torch.zeros(width, device="cpu"))
        self.register_buffer("running_var", torch.ones(width, device="cpu"))

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """features f32 [n, width], present f32 [n, 1]: 1 for a row that counts in mean and variance, and 0 for padding.

        Variances divide by the number of rows. A batch without rows does not change the moving averages."""
        mean, variance = self.statistics(features, present) if self.training else (self.running_mean, self.running_var)
        gate = torch.sigmoid((features - mean) / torch.sqrt(variance + EPSILON))
        return features * (gate + (1 - gate) * self.alpha)

    def statistics(self, features: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        count = present.sum().clamp(min=1)
        mean = (features * present).sum(0) / count
        variance = ((features - mean).square() * present).sum(0) / count
        share = MOMENTUM * present.amax()
        self.running_mean.lerp_(mean.detach(), share)
        self.running_var.lerp_(variance.detach(), share)
        return mean, variance


class PReLU(nn.Module):
    """Parameter `alpha` [width], from 0.25 as in torch.nn.PReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((width,), 0.25, device="cpu"))

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """features f32 [n, width]. Ignores `present`, an argument of `Dice`."""
        return torch.where(features > 0, features, self.alpha * features)


def activations(kind: Literal["dice", "prelu"], widths: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(Dice(width) if kind == "dice" else PReLU(width) for width in widths)


def activated(layers: nn.ModuleList, between: nn.ModuleList, features: Tensor, present: Tensor) -> Tensor:
    """Applies all layers, with an activation after each but the last, which has width 1; returns f32 [n]."""
    for layer, activation in zip(layers[:-1], between, strict=True):
        features = activation(layer(features).float(), present)
    last: Tensor = layers[-1](features)
    return last.squeeze(1)


class DIN(nn.Module):
    """Attention over histories by `model.targets`, and a top MLP.

    Parameters: `attention_mlp.<n>.*`, `top_mlp.<n>.*`, n counting linear layers from 0, and `attention_activations.<n>`
    and `top_activations.<n>` with what `Dice` or `PReLU` has. Histories of one sample that differ in length end
    together. A target is the last entry of its feature. Without an entry it is zeros, as is an empty history's
    interest."""

    def __init__(self, job: Job, num_dense: int) -> None:
        super().__init__()
        settings = job.model
        assert isinstance(settings, DINSettings)
        generator = torch.Generator().manual_seed(job.job.seed)
        widths = [table.embedding_dim for table in job.tables for _ in table.features]
        self.history, self.softmax = settings.history, settings.softmax
        self.histories = [job.features.index(feature) for feature in settings.targets]
        self.targets = [job.features.index(feature) for feature in settings.targets.values()]
        self.pooled = [index for index in range(len(widths)) if index not in {*self.histories, *self.targets}]
        width = sum(widths[index] for index in self.histories)
        joined = num_dense + sum(widths[index] for index in self.pooled) + 2 * width
        self.attention_mlp = linear_layers([4 * width, *settings.attention_mlp, 1], generator)
        self.attention_activations = activations(settings.activation, settings.attention_mlp)
        self.top_mlp = linear_layers([joined, *settings.top_mlp], generator)
        self.top_activations = activations(settings.activation, settings.top_mlp[:-1])

    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
        target, _ = joined_entries([embeddings[index] for index in self.targets], 1)
        history, present = joined_entries([embeddings[index] for index in self.histories], self.history)
        pooled = [rows for index in self.pooled if isinstance(rows := embeddings[index], Tensor)]
        features = torch.cat([dense, *pooled, target.squeeze(1), self.interest(target, history, present)], dim=1)
        return activated(self.top_mlp, self.top_activations, features, torch.ones_like(features[:, :1]))

    def interest(self, target: Tensor, history: Tensor, present: Tensor) -> Tensor:
        """target f32 [B, 1, W], history f32 [B, T, W], present bool [B, T] -> f32 [B, W]."""
        query = target.expand_as(history)
        inputs = torch.cat([query, history, query - history, query * history], dim=2).flatten(0, 1)
        counts = present.view(-1, 1).to(inputs.dtype)
        coefficients = activated(self.attention_mlp, self.attention_activations, inputs, counts).view_as(present)
        if self.softmax:
            lowest = torch.finfo(coefficients.dtype).min  # not -inf, which is NaN for an empty history
            coefficients = coefficients.masked_fill(~present, lowest).softmax(1)
        return torch.bmm((coefficients * present)[:, None], history).squeeze(1)


def joined_entries(features: list[Embedded], length: int) -> tuple[Tensor, Tensor]:
    """Returns the last `length` entries, joined: f32 [B, length, W], and bool [B, length], True where any feature has
    one."""
    padded = [feature.padded(length) for feature in features if isinstance(feature, Sequences)]
    values, masks = zip(*padded, strict=True)
    return torch.cat(values, dim=2), torch.stack(masks).any(0)
