"""Rounds row gradients as `ranks.gradients` says, for any kernels."""

from torch import Tensor

from rowcast.job.embedding_tables import RowType
from rowcast.trainer.kernels import DTYPES, GroupLookup, Kernels, RecordViews, Rule


def taken(looked_up: Tensor, dtype: RowType) -> Tensor:
    """Returns what a model takes of a table, f32 [n, width], of pooled rows or of rows without pooling. `dtype`:
    `ranks.gradients`. The gradient is rounded on its way back too. `Snapshot.taken` is the same without torch."""
    return looked_up.to(DTYPES[dtype]).float()


def with_gradients(kernels: Kernels, dtype: RowType) -> Kernels:
    return kernels if dtype == "fp32" else RoundedGradients(kernels)


class RoundedGradients:
    """Implements `Kernels`. What a look-up gives, and its gradient, have values of bf16, wherever they were pooled.
    Between `reduce` and `apply` gradients are bf16, and so are sums of them."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def lookup(self, rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        return taken(self._kernels.lookup(rows, group, divisors), "bf16")

    def reduce(self, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        """Returns bf16 [U, D]. -0.0, to which the smallest are rounded, becomes 0.0 as in a sum: a part without the row
        adds 0.0."""
        return self._kernels.reduce(pooled_grad.bfloat16().float(), group, divisors).bfloat16().add_(0.0)

    def apply(self, rows: RecordViews, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        """`row_grads`: bf16 [U, D]."""
        self._kernels.apply(rows, unique_slots, row_grads.float(), rule)

    def update(
        self, rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule
    ) -> None:
        self.apply(rows, group.unique_slots, self.reduce(pooled_grad, group, divisors), rule)
