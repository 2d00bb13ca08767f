"""Builds models and their dense optimizers.

Every model is called as `model(dense, embeddings) -> logits`: dense f32 [B, num_dense]; embeddings, a list of
f32 [B, D_f], one per feature in the job's feature order, or `Sequences` for a feature that is not pooled; logits
f32 [B], or the input of its `loss`. If a table has linear weights, it is called as `model(dense, embeddings, linear)`:
a list of f32 [B, 1], one per feature of such a table. If the data has arrays, they come as the keyword `inputs`.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module

import torch
from torch import Tensor, nn

from rowcast.job.models import BUILT_IN_MODELS, BuiltInModel
from rowcast.job.schema import Job
from rowcast.trainer.models.custom import build_custom
from rowcast.trainer.models.loss import mean_loss
from rowcast.trainer.models.sequences import Embedded, Sequences

__all__ = ["Embedded", "Sequences", "build_dense_optimizer", "build_model", "mean_loss"]

MATRIX_ALIGNMENT = 64  # bytes


def build_model(job: Job, num_dense: int) -> nn.Module:
    """Builds the job's model on the CPU, as a function of only the job file.

    Its random numbers come from job.seed; the global random state does not change. Raises ConfigError if the factory
    named by `model.kind` returns no model."""
    built_in = BUILT_IN_MODELS.get(job.model.kind)
    model = build_custom(job, num_dense) if built_in is None else built_in_factory(built_in)(job, num_dense)
    model.register_forward_pre_hook(align_inputs)
    return model


def built_in_factory(model: BuiltInModel) -> Callable[[Job, int], nn.Module]:
    module, _, name = model.factory.partition(":")
    factory: Callable[[Job, int], nn.Module] = getattr(import_module(module), name)
    return factory


Inputs = tuple[Tensor, *tuple[Sequence[Embedded], ...]]  # dense, embeddings, and linear weights if there are any


def align_inputs(model: nn.Module, inputs: Inputs) -> Inputs:
    """Aligns a model's inputs: on the CPU, the bits of a matrix product depend on alignment and strides."""
    if torch.compiler.is_compiling():
        return inputs  # `JobModel` has aligned them
    dense, *lists = inputs
    return aligned(dense), *([aligned_embedding(embedding) for embedding in own] for own in lists)


def aligned_embedding(embedding: Embedded) -> Embedded:
    if isinstance(embedding, Sequences):
        return Sequences(values=aligned(embedding.values), offsets=embedding.offsets)
    return aligned(embedding)


def aligned(tensor: Tensor) -> Tensor:
    # a dimension of 1 may have any stride, and products read it
    if tensor.is_contiguous() and 1 not in tensor.shape and tensor.data_ptr() % MATRIX_ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def build_dense_optimizer(job: Job, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Builds an optimizer of torch.optim. On a device, torch updates all tensors in a few launches (`foreach`)."""
    settings = job.optimizer.dense
    parameters = list(parameters)
    if settings.kind == "sgd":
        return torch.optim.SGD(
            parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
    if settings.kind == "adagrad":
        return torch.optim.Adagrad(
            parameters,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            initial_accumulator_value=settings.initial_accumulator,
            eps=1e-10 if settings.eps is None else settings.eps,
        )
    kind = torch.optim.AdamW if settings.kind == "adamw" else torch.optim.Adam
    return kind(
        parameters,
        lr=settings.lr,
        betas=settings.betas,
        eps=1e-8 if settings.eps is None else settings.eps,
        weight_decay=settings.weight_decay,
    )
