"""Runs the fused interaction in autograd, without copies of embeddings that are neighbours in memory."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rowcast.trainer.kernels.choose import choose_interaction
from rowcast.trainer.kernels.interaction import Interaction
from rowcast.trainer.models.neighbours import joined


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
