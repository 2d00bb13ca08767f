"""Implements the kernels on a CPU, with the bits of `torch_ops` and in one pass over the rows.

    look-up    rows -> sum, divide -> result
    update     gradients -> sum -> `update` of the row optimizer -> weights and states

`torch_ops` does the rest: other row optimizers, clipped gradients, rows that are not fp32, and a separate `apply`.
"""

from functools import partial

import torch
from torch import Tensor

from rowcast.runtime.stages import ThreadPool
from rowcast.trainer.kernels import GroupLookup, RecordViews, Rule, row_optimizers, torch_ops
from rowcast.trainer.kernels import compiled_loops as loops
from rowcast.trainer.kernels.compiled_loops import (
    NO_FLOATS,
    NO_INTS,
    Gradients,
    RecordArray,
    flat,
    floats,
    ints,
    sum_rows,
)

MIN_FLOATS = 2**16  # the least work that is worth waking a thread for
UPDATES = {name: module.update for name, module in row_optimizers.having("update").items()}


class CompiledOps:
    """Implements `Kernels`. Its bits do not depend on the number of threads."""

    def __init__(self, num_threads: int = 1) -> None:
        """`num_threads`: for compiled loops; torch's operations use torch's threads."""
        self._pool = ThreadPool(num_threads, name="kernels", least=MIN_FLOATS)

    def lookup(self, rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        if rows.weight.dtype != torch.float32:
            return torch_ops.lookup(rows, group, divisors)
        dim, offsets = rows.weight.shape[1], group.offsets
        part = RecordArray(*rows.flat[0], ints(group.slots))
        if offsets is None:
            pooled = floats(len(group.slots), dim)
            work = partial(loops.gather, part, dim, flat(pooled))
            if group.weights is not None:
                work = partial(loops.pool_bags, part, dim, NO_INTS, flat(group.weights), NO_FLOATS, flat(pooled))
            self._pool.share(work, 0, len(pooled), dim)
        else:
            pooled = floats(len(offsets) - 1, dim)
            work = partial(loops.pool_bags, part, dim, ints(offsets), flat(group.weights), flat(divisors), flat(pooled))
            self._pool.share(work, 0, len(pooled), dim, ints(offsets))
        return pooled

    def reduce(self, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        return sum_rows(self._pool, gradients(pooled_grad, group, divisors), 0, len(group.unique_slots))

    def apply(self, rows: RecordViews, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        torch_ops.apply(rows, unique_slots, row_grads, rule)

    def update(
        self, rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule
    ) -> None:
        if (
            rule.kind not in UPDATES
            or rule.clip is not None
            or rows.master is not None
            or rows.weight.dtype != torch.float32
        ):
            self.apply(rows, group.unique_slots, self.reduce(pooled_grad, group, divisors), rule)
            return
        slots = ints(group.unique_slots)
        weights, *states = (RecordArray(*field, slots) for field in rows.flat)
        UPDATES[rule.kind](self._pool, gradients(pooled_grad, group, divisors), weights, states, rule)


def gradients(pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Gradients:
    return Gradients(
        flat=flat(pooled_grad.contiguous()),
        dim=pooled_grad.shape[1],
        bags=ints(group.bag_order),
        segments=ints(group.segment_offsets),
        lookups=NO_INTS if group.lookup_order is None else ints(group.lookup_order),
        weights=flat(group.weights),
        divisors=flat(divisors),
    )
