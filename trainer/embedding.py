"""The embedding layer over the device cache: rows are found by slot, and its backward pass updates them in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from protocol.job import SparseOptimizer
from protocol.tables import GroupSpec
from trainer.kernels import GroupLookup, Kernels, torch_ops
from trainer.optim import rows_of, rule_at

__all__ = ["Embeddings", "GroupLookup"]


class Embeddings:
    """All embedding tables of a model, as far as the device holds them. It shares the records with the device cache and owns no state."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        settings: SparseOptimizer,
        records: Sequence[Tensor],
        kernels: Kernels = torch_ops,
    ) -> None:
        """`records`: f32 [num_slots, record_floats] of each group."""
        self._groups = [GroupRows(group, own, settings, kernels) for group, own in zip(groups, records, strict=True)]
        self._positions = [position for group in groups for position in group.feature_positions]
        self._trigger = torch.zeros((), device=records[0].device, requires_grad=True)
        self._awaits_backward: PendingUpdate | None = None

    def __call__(self, lookups: Sequence[GroupLookup], train_step: int) -> list[Tensor]:
        """Pooled embeddings f32 [B, D] of every feature, in the job's feature order.

        `lookups` holds one entry a group; `train_step` counts the training batches before this one (Adam needs it). With gradients
        enabled, the backward pass applies the row optimizer to the records of the batch, so each forward needs exactly one backward:
        a second forward before it, or a second backward, raises RuntimeError. Under `torch.no_grad()` this only looks up.
        """
        pooled = [group.lookup(lookup) for group, lookup in zip(self._groups, lookups, strict=True)]
        if torch.is_grad_enabled():
            if self._awaits_backward:
                raise RuntimeError(
                    f"embeddings of train step {train_step} were asked for before the backward pass of an earlier forward updated their "
                    "rows; call backward() once a forward, or look up under torch.no_grad()"
                )
            self._awaits_backward = PendingUpdate(self, lookups, train_step)
            pooled = update_in_backward(self._trigger, pooled, self._awaits_backward)
        by_group = [
            feature
            for group, group_pooled, lookup in zip(self._groups, pooled, lookups, strict=True)
            for feature in group_pooled.view(group.num_features, lookup.batch_size, group.dim).unbind(0)
        ]
        features = dict(zip(self._positions, by_group, strict=True))
        return [features[position] for position in range(len(features))]

    def finish_step(self) -> None:
        """After a backward pass: where the loss did not depend on any embedding, its gradient is zero, and the rows are updated by that."""
        pending = self._awaits_backward
        if pending is not None:
            zeros = [group.zeros(lookup) for group, lookup in zip(self._groups, pending.lookups, strict=True)]
            self.update(zeros, pending.lookups, pending.train_step)

    def update(self, pooled_grads: Sequence[Tensor], lookups: Sequence[GroupLookup], train_step: int) -> None:
        """Reduces and applies the gradients f32 [F * B, D] of one forward's pooled embeddings, group by group."""
        if not self._awaits_backward:
            raise RuntimeError(f"the rows of train step {train_step} were already updated; call backward() once a forward")
        self._awaits_backward = None
        for group, grad, lookup in zip(self._groups, pooled_grads, lookups, strict=True):
            group.update(grad, lookup, train_step)


class GroupRows:
    """The records of one group, and what is done to them."""

    def __init__(self, group: GroupSpec, records: Tensor, settings: SparseOptimizer, kernels: Kernels) -> None:
        self.dim = group.embedding_dim
        self.num_features = group.num_features
        self._rows = rows_of(records, group)
        self._settings = settings
        self._kernels = kernels
        means = [table.pooling == "mean" for table in group.feature_tables()]
        self._means = torch.tensor(means, device=records.device)[:, None] if any(means) else None  # bool [F, 1]

    def lookup(self, lookup: GroupLookup) -> Tensor:
        return self._kernels.lookup(self._rows, lookup, self._divisors(lookup))

    def zeros(self, lookup: GroupLookup) -> Tensor:
        return torch.zeros(self.num_features * lookup.batch_size, self.dim, device=self._rows.weight.device)

    def update(self, pooled_grad: Tensor, lookup: GroupLookup, train_step: int) -> None:
        self._kernels.update(self._rows, pooled_grad, lookup, self._divisors(lookup), rule_at(self._settings, train_step))

    def _divisors(self, lookup: GroupLookup) -> Tensor | None:
        """Look-ups of each bag pooled by mean, at least 1; 1 for other bags. None where all are 1."""
        if self._means is None or lookup.offsets is None:
            return None
        counts = lookup.offsets.diff().view(self.num_features, lookup.batch_size)
        return torch.where(self._means, counts.clamp(min=1), 1).float().view(-1, 1)


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """What the backward pass of one forward will do."""

    embeddings: Embeddings
    lookups: Sequence[GroupLookup]
    train_step: int


class UpdateInBackward(torch.autograd.Function):
    """Identity whose backward pass updates rows instead of handing gradients on; `trigger` makes autograd call it."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, pending: PendingUpdate, *pooled: Tensor) -> tuple[Tensor, ...]:
        ctx.pending = pending
        return tuple(tensor.view_as(tensor) for tensor in pooled)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        pending = ctx.pending
        pending.embeddings.update(grads, pending.lookups, pending.train_step)
        return (None,) * (2 + len(grads))


def update_in_backward(trigger: Tensor, pooled: list[Tensor], pending: PendingUpdate) -> list[Tensor]:
    """`pooled` as results of autograd. The one typed door to `Function.apply`."""
    return list(cast(Any, UpdateInBackward).apply(trigger, pending, *pooled))
