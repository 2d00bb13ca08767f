"""Implements the kernels on a CPU, with the bits of `torch_ops`, all groups in one call and in one pass over the rows.

    look-up    rows -> sum, divide -> result
    update     gradients -> sum -> `update` of the row optimizer -> weights and states

`torch_ops` does the rest: other row optimizers, clipped gradients, rows that are not fp32, and a separate `apply`.

Compiled loops over rows, for `compiled_ops`; the loops of the row optimizers are in `row_optimizers/`.

Rows and gradients are flat arrays; a field of the records has a start and a stride:

    flat    | weight  | sum     | weight  | sum     | ...        slot s of a field: flat[s * stride + column]
            <----- stride ------>

Each loop over items processes those from `first` to `end` - 1 and writes only these, so threads may divide the items.
One thread adds the look-ups of one bag or row in their order, starting from 0. Each product and sum is rounded, except
in `multiply_add`, where torch rounds once. Indices are unsigned: a signed index might count from the end, and a loop
with that test is not vectorized.

A loop over `ranges` does this for ranges of several groups in one call. A range has a row of the group's number, the
first item, the one after the last, and what to add to item * D, and to the item, for its place in memory that the
ranges share.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rowcast.runtime.arrays import F32, I32, I64
from rowcast.runtime.compiled import arrays_of, compiled_arithmetic, prefetch
from rowcast.runtime.stages import ThreadPool, cuts
from rowcast.trainer.kernels import ADDRESSED, Group, GroupLookup, RecordViews, Rule, row_optimizers, torch_ops

AHEAD = 8  # look-ups between prefetching data and using it
ROWS_AHEAD = 4  # the same in distinct rows, with several look-ups each
LINE = 16  # floats per cache line
U = np.uint64
ZERO, ONE = np.float32(0), np.float32(1)
BLOCK_FLOATS = 2**18  # row gradients per block of an update; smaller blocks cost too many calls
NUMBERS = ("dim", "num_bags", "num_lookups", "num_rows")
FIELDS = ("weight", "weight_length", "weight_stride", "state", "state_length", "state_stride")
# of each group: numbers, addresses of arrays (0: absent), and its fields; `pooled`: of the bags or their gradients
GROUP = np.dtype([(name, np.int64) for name in (*NUMBERS, *ADDRESSED, "divisors", "pooled", *FIELDS)])
Groups = np.ndarray[tuple[int], np.dtype[np.void]]
f32_at, i32_at = arrays_of(np.float32), arrays_of(np.int32)


class RecordArray(NamedTuple):
    """One field of some rows' records."""

    flat: F32
    stride: int
    slots: I32  # [U] of rows, or [N] of look-ups


class Gradients(NamedTuple):
    """The inputs of the sums of row gradients."""

    flat: F32  # [G * D] gradients of the pooled bags
    dim: int  # D
    bags: I32  # [N] the bags of each row's look-ups, row by row
    segments: I32  # [U + 1] start of each row's look-ups in `bags`
    lookups: I32  # [N] the look-up of each entry of `bags`; empty without weights
    weights: F32  # [N] by look-up; empty: all are 1
    divisors: F32  # [G] of the bags; empty: all are 1


class CompiledStep:
    """The work of several groups in one step."""

    def __init__(self, pool: ThreadPool, groups: Sequence[Group], pooled: Sequence[Tensor]) -> None:
        """`pooled`: of each group's bags, or their gradients. The arguments' memory must stay while this is used."""
        self._pool = pool
        self.lookups = [lookup for _, lookup, _ in groups]
        self.dims = [rows.shape[1] for rows in pooled]
        self.groups = np.array([group_of(*group, rows) for group, rows in zip(groups, pooled, strict=True)], GROUP)

    def share(self, work: Callable[[I64], None], ranges: I64, starts: str) -> None:
        """Calls work(ranges), which threads divide. `starts`: the array that says where each group's items begin; it
        may be absent if they have one size."""
        if self._pool.num_threads == 1:
            work(ranges)
            return
        offsets = [getattr(lookup, starts) for lookup in self.lookups]
        sizes = [None if array is None else array.numpy() for array in offsets]
        units = [
            self.dims[g] * (end - first if sizes[g] is None else int(sizes[g][end] - sizes[g][first]))
            for g, first, end, *_ in ranges.tolist()
        ]
        parts = self._pool.num_shares(sum(units))
        divided = np.repeat(ranges[None], parts, 0)
        for k, (g, first, end, *_) in enumerate(ranges.tolist()):
            bounds = cuts(first, end, parts, sizes[g])
            divided[:, k, 1], divided[:, k, 2] = bounds[:-1], bounds[1:]
        self._pool.over(list(divided), work)

    def blocks(self) -> Iterator[tuple[I64, int, int]]:
        """Yields ranges of the groups' rows, their floats, and how many rows they are."""
        ranges, num_floats, num_rows = list[tuple[int, ...]](), 0, 0
        for g, dim in enumerate(self.dims):
            first, last = 0, self.lookups[g].num_unique
            while first < last:
                count = min(last - first, max(1, (BLOCK_FLOATS - num_floats) // dim))
                ranges.append((g, first, first + count, num_floats - first * dim, num_rows - first))
                first, num_floats, num_rows = first + count, num_floats + count * dim, num_rows + count
                if num_floats + dim > BLOCK_FLOATS:
                    yield np.array(ranges), num_floats, num_rows
                    ranges, num_floats, num_rows = [], 0, 0
        if ranges:
            yield np.array(ranges), num_floats, num_rows


def group_of(rows: RecordViews, group: GroupLookup, divisors: Tensor | None, pooled: Tensor) -> tuple[int, ...]:
    """Returns a row of GROUP. Fields that are not fp32 are not to be used."""
    weight, state = (*rows.places, rows.places[0])[:2]
    num_bags, dim = pooled.shape
    return (
        dim,
        num_bags,
        group.num_lookups,
        group.num_unique,
        *group.addresses(),
        0 if divisors is None else divisors.data_ptr(),
        pooled.data_ptr(),
        *weight,
        *state,
    )


def floats(*shape: int) -> Tensor:
    """Returns uninitialised fp32, independent of torch's default dtype and device."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def flat(tensor: Tensor) -> F32:
    array: F32 = tensor.view(-1).numpy()
    return array


def sum_rows(step: CompiledStep, ranges: I64, num_floats: int) -> Tensor:
    """Returns the gradients f32 [num_floats] of the ranges' rows."""
    row_grads = floats(num_floats)
    step.share(partial(sum_each, step.groups, row_grads.numpy()), ranges, "segment_offsets")
    return row_grads


@compiled_arithmetic
def present(address: int, size: int) -> int:
    """Returns the size of an array that may be absent."""
    return size if address else 0


@compiled_arithmetic
def gradients_of(group: np.void) -> Gradients:
    dim, bags, lookups = group["dim"], group["num_bags"], group["num_lookups"]
    return Gradients(
        f32_at(group["pooled"], bags * dim),
        dim,
        i32_at(group["bag_order"], lookups),
        i32_at(group["segment_offsets"], group["num_rows"] + 1),
        i32_at(group["lookup_order"], present(group["lookup_order"], lookups)),
        f32_at(group["weights"], present(group["weights"], lookups)),
        f32_at(group["divisors"], present(group["divisors"], bags)),
    )


@compiled_arithmetic
def weights_of(group: np.void) -> RecordArray:
    slots = i32_at(group["unique_slots"], group["num_rows"])
    return RecordArray(f32_at(group["weight"], group["weight_length"]), group["weight_stride"], slots)


@compiled_arithmetic
def states_of(group: np.void) -> RecordArray:
    slots = i32_at(group["unique_slots"], group["num_rows"])
    return RecordArray(f32_at(group["state"], group["state_length"]), group["state_stride"], slots)


@compiled_arithmetic
def look_up(groups: Any, ranges: I64) -> None:
    """Fills the pooled rows of the ranges' bags."""
    for k in range(len(ranges)):
        group, first, end = groups[ranges[k, 0]], ranges[k, 1], ranges[k, 2]
        dim, bags, lookups = group["dim"], group["num_bags"], group["num_lookups"]
        slots = i32_at(group["slots"], lookups)
        rows = RecordArray(f32_at(group["weight"], group["weight_length"]), group["weight_stride"], slots)
        pooled = f32_at(group["pooled"], bags * dim)
        if group["offsets"] == 0 and group["weights"] == 0:
            gather(rows, dim, pooled, first, end)
        else:
            offsets = i32_at(group["offsets"], present(group["offsets"], bags + 1))
            weights = f32_at(group["weights"], present(group["weights"], lookups))
            divisors = f32_at(group["divisors"], present(group["divisors"], bags))
            pool_bags(rows, dim, offsets, weights, divisors, pooled, first, end)


@compiled_arithmetic
def gather(rows: RecordArray, dim: int, out: F32, first: int, end: int) -> None:
    """out[i] = 0 + row of look-up i, for bags of one look-up."""
    for i in range(first, end):
        if i + AHEAD < end:
            ask_for(rows, i + AHEAD, dim)
        row, at = start_of(rows, i), U(i) * U(dim)
        for c in range(dim):
            out[at + U(c)] = rows.flat[row + U(c)] + ZERO


@compiled_arithmetic
def pool_bags(
    rows: RecordArray, dim: int, offsets: I32, weights: F32, divisors: F32, out: F32, first: int, end: int
) -> None:
    """out[bag] = sum of weight * row over the bag's look-ups, divided by its divisor.

    Empty `offsets`: bags of one look-up. Empty `weights` or `divisors`: all are 1.
    """
    for bag in range(first, end):
        at = U(bag) * U(dim)
        start, stop = (offsets[bag], offsets[bag + 1]) if len(offsets) else (bag, bag + 1)
        for c in range(dim):
            out[at + U(c)] = ZERO
        for i in range(start, stop):
            if i + AHEAD < len(rows.slots):
                ask_for(rows, i + AHEAD, dim)
            row = start_of(rows, i)
            weight = weights[i] if len(weights) else ONE
            for c in range(dim):
                out[at + U(c)] += rows.flat[row + U(c)] * weight
        if len(divisors):
            for c in range(dim):
                out[at + U(c)] /= divisors[bag]


@compiled_arithmetic
def sum_each(groups: Any, out: F32, ranges: I64) -> None:
    """Fills `out` with the gradients of the ranges' rows."""
    for k in range(len(ranges)):
        grads = gradients_of(groups[ranges[k, 0]])
        for u in range(ranges[k, 1], ranges[k, 2]):
            add_up(grads, u, out, U(ranges[k, 3] + u * grads.dim))


@compiled_arithmetic
def add_up(grads: Gradients, u: int, out: F32, at: np.uint64) -> None:
    """out[at:at + D] = sum of row u's gradients; each is its bag's gradient / bag's divisor * look-up's weight."""
    dim, bags = grads.dim, grads.bags
    for c in range(dim):
        out[at + U(c)] = ZERO
    for i in range(grads.segments[u], grads.segments[u + 1]):
        if i + AHEAD < len(bags):
            for c in range(0, dim, LINE):
                prefetch(grads.flat, bags[i + AHEAD] * dim + c)
        grad = U(bags[i]) * U(dim)
        if len(grads.weights) or len(grads.divisors):
            divisor = grads.divisors[bags[i]] if len(grads.divisors) else ONE
            weight = grads.weights[grads.lookups[i]] if len(grads.weights) else ONE
            for c in range(dim):
                out[at + U(c)] += grads.flat[grad + U(c)] / divisor * weight
        else:
            for c in range(dim):
                out[at + U(c)] += grads.flat[grad + U(c)]


@compiled_arithmetic
def start_of(part: RecordArray, i: int) -> np.uint64:
    return U(part.slots[i]) * U(part.stride)


@compiled_arithmetic
def ask_for(part: RecordArray, i: int, width: int) -> None:
    """Prefetches the row of slots[i]."""
    row = part.slots[i] * part.stride
    for c in range(0, width, LINE):
        prefetch(part.flat, row + c)


MIN_FLOATS = 2**16  # the least work that is worth waking a thread for


@cache  # when it is first needed: the files of the row optimizers import this one
def updates() -> dict[str, Callable[[CompiledStep, Rule], None]]:
    """The compiled updates, by the row optimizer's name."""
    return {name: file.update for name, file in row_optimizers.having("update").items()}


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
        step = CompiledStep(self._pool, groups, pooled)
        are_served = [rows.weight.dtype == torch.float32 for rows, _, _ in groups]
        ranges = [(g, 0, len(rows), 0, 0) for g, rows in enumerate(pooled) if are_served[g]]
        step.share(partial(look_up, step.groups), ranges_of(ranges), "offsets")
        pairs = zip(groups, pooled, are_served, strict=True)
        return [rows if is_served else torch_ops.lookup(*group) for group, rows, is_served in pairs]

    def reduce(self, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        dim, size = pooled_grad.shape[1], len(group.unique_slots)
        absent = RecordViews(weight=floats(0, dim), master=None, states=())
        step = CompiledStep(self._pool, [(absent, group, divisors)], [pooled_grad := pooled_grad.contiguous()])
        return sum_rows(step, ranges_of([(0, 0, size, 0, 0)]), size * dim).view(size, dim)

    def apply(self, rows: RecordViews, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        torch_ops.apply(rows, unique_slots, row_grads, rule)

    def update(
        self, rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule
    ) -> None:
        self.update_all([(rows, group, divisors)], [pooled_grad], rule)

    def update_all(self, groups: Sequence[Group], pooled_grads: Sequence[Tensor], rule: Rule) -> None:
        has_loop = rule.kind in updates() and rule.clip is None
        served, grads = list[Group](), list[Tensor]()
        for group, grad in zip(groups, pooled_grads, strict=True):
            rows, lookup, divisors = group
            if has_loop and rows.master is None and rows.weight.dtype == torch.float32:
                served.append(group)
                grads.append(grad.contiguous())
            else:
                self.apply(rows, lookup.unique_slots, self.reduce(grad, lookup, divisors), rule)
        if served:
            updates()[rule.kind](CompiledStep(self._pool, served, grads), rule)


def num_bags(group: GroupLookup) -> int:
    return group.num_lookups if group.offsets is None else len(group.offsets) - 1


def ranges_of(rows: Sequence[tuple[int, ...]]) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    return np.array(rows, np.int64).reshape(-1, 5)
