"""Implements the kernels on a CPU, with the bits of `torch_ops`, all groups in one call and in one pass over the rows.

    look-up    rows -> sum, divide -> result
    update     gradients -> sum -> `update` of the row optimizer -> weights and states

`torch_ops` does the rest: other row optimizers, clipped gradients, rows that are not fp32, and a separate `apply`.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rowcast.runtime.stages import ThreadPool
from rowcast.trainer.kernels import Group, GroupLookup, RecordViews, Rule, row_optimizers, torch_ops
from rowcast.trainer.kernels.compiled_loops import Step, floats, look_up, sum_rows

MIN_FLOATS = 2**16  # the least work that is worth waking a thread for
UPDATES = {name: module.update for name, module in row_optimizers.having("update").items()}


class CompiledOps:
    """Implements `Kernels` and `AllGroups`. Its bits do not depend on the number of threads."""

    def __init__(self, num_threads: int = 1) -> None:
        """`num_threads`: for compiled loops; torch's operations use torch's threads."""
        self._pool = ThreadPool(num_threads, name="kernels", least=MIN_FLOATS)

    def lookup(self, rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        return self.lookup_all([(rows, group, divisors)])[0]

    def lookup_all(self, groups: Sequence[Group]) -> list[Tensor]:
        shapes = [(num_bags(lookup), rows.weight.shape[1]) for rows, lookup, _ in groups]
        ends = list(accumulate((bags * dim for bags, dim in shapes), initial=0))
        memory = floats(ends[-1])
        pooled = [memory[first:end].view(shape) for first, end, shape in zip(ends[:-1], ends[1:], shapes, strict=True)]
        step = Step(self._pool, groups, pooled)
        are_served = [rows.weight.dtype == torch.float32 for rows, _, _ in groups]
        ranges = [(g, 0, len(own), 0, 0) for g, own in enumerate(pooled) if are_served[g]]
        step.share(partial(look_up, step.groups), ranges_of(ranges), "offsets")
        pairs = zip(groups, pooled, are_served, strict=True)
        return [own if is_served else torch_ops.lookup(*group) for group, own, is_served in pairs]

    def reduce(self, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        dim, size = pooled_grad.shape[1], len(group.unique_slots)
        absent = RecordViews(weight=floats(0, dim), master=None, states=())
        step = Step(self._pool, [(absent, group, divisors)], [pooled_grad := pooled_grad.contiguous()])
        return sum_rows(step, ranges_of([(0, 0, size, 0, 0)]), size * dim).view(size, dim)

    def apply(self, rows: RecordViews, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        torch_ops.apply(rows, unique_slots, row_grads, rule)

    def update(
        self, rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule
    ) -> None:
        self.update_all([(rows, group, divisors)], [pooled_grad], rule)

    def update_all(self, groups: Sequence[Group], pooled_grads: Sequence[Tensor], rule: Rule) -> None:
        has_loop = rule.kind in UPDATES and rule.clip is None
        served, grads = list[Group](), list[Tensor]()
        for group, grad in zip(groups, pooled_grads, strict=True):
            rows, lookup, divisors = group
            if has_loop and rows.master is None and rows.weight.dtype == torch.float32:
                served.append(group)
                grads.append(grad.contiguous())
            else:
                self.apply(rows, lookup.unique_slots, self.reduce(grad, lookup, divisors), rule)
        if served:
            UPDATES[rule.kind](Step(self._pool, served, grads), rule)


def num_bags(group: GroupLookup) -> int:
    return group.num_lookups if group.offsets is None else len(group.offsets) - 1


def ranges_of(rows: Sequence[tuple[int, ...]]) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    return np.array(rows, np.int64).reshape(-1, 5)
