"""DLRM: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems.

arXiv 1906.00091. Other models build their stacks of linear layers with the same initial values.
"""

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowcast.job.models import BottomAndTop, DLRMSettings
from rowcast.job.schema import Job
from rowcast.trainer.kernels.choose import choose_interaction
from rowcast.trainer.kernels.interaction import Interaction
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
            return fused_interaction(bottom, embeddings, self._kernels)
        vectors = torch.stack([bottom, *embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat([bottom, products.gather(1, self.lower.expand(products.shape[0], -1))], dim=1)


def fused_interaction(bottom: Tensor, embeddings: Sequence[Tensor], kernels: str) -> Tensor:
    """f32 [B, D] and F of f32 [B, D] -> f32 [B, D + F * (F + 1) / 2], in fp32 under autocast too.

    `kernels`: the job's `trainer.kernels`."""
    chosen = choose_interaction(bottom.device, kernels, len(embeddings), bottom.shape[1])
    return cast(Tensor, cast(Any, FusedInteraction).apply(chosen, bottom.float(), *embeddings))


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
