"""The kernels on a CPU, with the bits of `torch_ops`, in one pass over the rows where torch makes several.

    look-up            rows -> sum, divide -> result
    update    sgd      gradients -> sum -> weights
              adagrad  gradients -> sum, states -> | torch.sqrt | -> weights          block of rows by block of rows

Square roots and the means of row-wise Adagrad are torch's own, over a contiguous block: no loop here would have their bits. What has no
loop goes to `torch_ops`: Adam, clipped gradients, rows that are not fp32, and `apply` by itself.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rowcast.runtime.arrays import F32, I32
from rowcast.trainer.kernels import GroupLookup, Rows, Rule, torch_ops
from rowcast.trainer.kernels import compiled_loops as loops
from rowcast.trainer.kernels.compiled_loops import Gradients, Part, Rate
from rowcast.trainer.kernels.thread_pool import ThreadPool

BLOCK_FLOATS = 2**18  # of row gradients that an update has in hand; smaller blocks are called too often
NO_FLOATS, NO_INTS = np.zeros(0, np.float32), np.zeros(0, np.int32)


class CompiledOps:
    """Implements `Kernels`. Its bits do not depend on the number of threads."""

    def __init__(self, num_threads: int = 1) -> None:
        """`num_threads`: of its own loops; torch's operations have torch's."""
        self._pool = ThreadPool(num_threads)

    def lookup(self, rows: Rows, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        if rows.weight.dtype != torch.float32:
            return torch_ops.lookup(rows, group, divisors)
        dim, offsets = rows.weight.shape[1], group.offsets
        part = part_of(rows.weight, group.slots)
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

    def apply(self, rows: Rows, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        torch_ops.apply(rows, unique_slots, row_grads, rule)

    def update(self, rows: Rows, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule) -> None:
        if (
            rule.kind not in UPDATES
            or rule.clip is not None
            or rows.master is not None
            or rows.weight.dtype != torch.float32
        ):
            self.apply(rows, group.unique_slots, self.reduce(pooled_grad, group, divisors), rule)
            return
        weights = part_of(rows.weight, group.unique_slots)
        states = [part_of(state, group.unique_slots) for state in rows.states]
        rate = Rate(np.float32(rule.lr), np.float32(rule.eps))
        UPDATES[rule.kind](self._pool, gradients(pooled_grad, group, divisors), weights, states, rate)


def sgd(pool: ThreadPool, grads: Gradients, weights: Part, states: list[Part], rate: Rate) -> None:
    def work(first: int, end: int) -> None:
        loops.sum_and_descend(grads, weights, rate, np.empty(grads.dim, np.float32), first, end)

    pool.share(work, 0, len(weights.slots), grads.dim, grads.segments)


def adagrad(pool: ThreadPool, grads: Gradients, weights: Part, states: list[Part], rate: Rate) -> None:
    (state,) = states
    for first, end in blocks(len(weights.slots), grads.dim):
        row_grads, roots = floats(end - first, grads.dim), floats(end - first, grads.dim)
        work = partial(loops.sum_and_accumulate, grads, state, flat(row_grads), flat(roots), first)
        pool.share(work, first, end, grads.dim, grads.segments)
        descend = partial(loops.descend_by_roots, weights, grads.dim, flat(row_grads), flat(roots.sqrt_()), rate, first)
        pool.share(descend, first, end, grads.dim)


def rowwise_adagrad(pool: ThreadPool, grads: Gradients, weights: Part, states: list[Part], rate: Rate) -> None:
    (state,) = states
    for first, end in blocks(len(weights.slots), grads.dim):
        row_grads, roots = sum_rows(pool, grads, first, end), floats(end - first)
        means = (row_grads * row_grads).mean(1)
        loops.accumulate_means(state, flat(means), flat(roots), first, first, end)
        descend = partial(
            loops.descend_by_row_roots, weights, grads.dim, flat(row_grads), flat(roots.sqrt_()), rate, first
        )
        pool.share(descend, first, end, grads.dim)


# in place on the rows' weights and states
UPDATES: dict[str, Callable[[ThreadPool, Gradients, Part, list[Part], Rate], None]] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
}


def sum_rows(pool: ThreadPool, grads: Gradients, first: int, end: int) -> Tensor:
    """Gradients f32 [end - first, D] of the rows from `first` to `end`."""
    row_grads = floats(end - first, grads.dim)
    pool.share(partial(loops.sum_rows, grads, flat(row_grads), first), first, end, grads.dim, grads.segments)
    return row_grads


def blocks(num_rows: int, dim: int) -> Iterator[tuple[int, int]]:
    rows = max(1, BLOCK_FLOATS // dim)
    for first in range(0, num_rows, rows):
        yield first, min(first + rows, num_rows)


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


def part_of(part: Tensor, slots: Tensor) -> Part:
    """A part of the records f32 [num_slots, width], as its memory from its first element to its last."""
    num_slots, width = part.shape
    stride = part.stride(0)
    assert part.stride(1) == 1 or width == 1, f"columns {part.stride(1)} elements apart, instead of 1"
    length = (num_slots - 1) * stride + width if num_slots else 0
    return Part(part.as_strided((length,), (1,)).numpy(), stride, ints(slots))


def floats(*shape: int) -> Tensor:
    """Uninitialised, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def flat(tensor: Tensor | None) -> F32:
    array: F32 = NO_FLOATS if tensor is None else tensor.view(-1).numpy()
    return array


def ints(tensor: Tensor) -> I32:
    array: I32 = tensor.numpy()
    return array
