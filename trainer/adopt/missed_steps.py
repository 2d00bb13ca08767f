"""Keeps a log of an optimizer's steps over one table, so that rows that were away can have them later.

An optimizer's step is its group's hyper-parameters (rate, betas, decay, flags) and the parameter's state before the
step: numbers (Adam's `step`), and tensors with a row for each row, which stay with the rows. A schedule changes one or
two numbers a step. So the log keeps segments: once what does not change, and 8 bytes a step for each number that has
ever changed.

Compiled loops replay missed steps: Adam, AdamW and SGD of torch.optim with a gradient of zero, on a CPU. Each row takes
its own missed steps, k steps after its first one. Rows are sorted by their last step, so those that still miss a step
are the first ones. Each operation of torch is one rounding here, in torch's order (`multiply_add`: torch rounds once).
torch's square root may differ from the processor's by one unit, so torch computes it, between the halves of a step.
`catch_up.chosen` tests whether these are the bits of the installed torch.

A weight of Adam without coupled decay comes to rest: in calm steps (`is_calm`) it does not move again, as
docs/log/catch-up.md proves. Then only `decay` is left to do: a few operations a step, and no root.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from rowcast.runtime.arrays import F32, I64
from rowcast.runtime.compiled import compiled_arithmetic, multiply_add
from rowcast.trainer.adopt.records import Records

U = np.uint64
ROWS = 32  # at a time in `decay_moments`: they stay in the first cache
LOOK = 32  # full steps between two looks for weights at rest
FEW, ALL = 256, 2**62  # the most steps of `decay` between two looks, if weights decay too, and if not
NONE = np.zeros(0, np.float32)
TAKEN, BETA2, NEW, RATE, ROOT, EPS, DECAY, KEPT, ZERO = range(9)  # the numbers of a step of Adam
# What the proof of rest needs; ROUNDINGS: of one step, together; LOST: of a weight, an update that is rounded away
LEAST_WEIGHT, LOST = np.float32(2.0**-47), np.float32(2.0**-26)
LEAST_EPS, LEAST_ROOT, LEAST_KEPT, LEAST_RATE, MOST_RATE = 2.0**-40, 2.0**-10, 0.98, 2.0**-100, 16.0
ROUNDINGS = 1 + 2.0**-19
ROW_DIMS = 2  # a state tensor with this many dimensions has a row for each row of the table


class LoggedStep(NamedTuple):
    """One step of the optimizer."""

    hyper: dict[str, Any]  # the group without its parameters
    state: dict[str, Any]  # before the step, without what has a row for each row
    row_states: tuple[str, ...]


@dataclass(slots=True)
class Segment:
    """Successive steps that differ in numbers only."""

    first: int  # its first step
    form: tuple[TreeSpec, list[Any]]  # of each step: its structure, and the kinds of its leaves
    leaves: list[Any]  # of the first step; a number's is a pattern for the others'
    numbers: list[float]  # of the first step
    moving: list[int]  # those that each step gives anew
    values: array[float] = field(default_factory=lambda: array("d"))  # [steps * len(moving)]

    def at(self, step: int) -> LoggedStep:
        numbers, at = list(self.numbers), (step - self.first) * len(self.moving)
        for offset, place in enumerate(self.moving):
            numbers[place] = self.values[at + offset]
        given = iter(numbers)
        leaves = [alike(leaf, next(given)) if is_number(leaf) else leaf for leaf in self.leaves]
        step_given: LoggedStep = tree_unflatten(leaves, self.form[0])
        return step_given


class StepLog:
    """The steps of one optimizer over one table, from its first: `append` before each step that the table takes."""

    def __init__(self, rule: type[Optimizer]) -> None:
        self.rule = rule
        self.steps = 0
        self.segments: list[Segment] = []
        self.loops: dict[int, Any] = {}  # what `catch_up` has chosen for the segments, by first step

    def append(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Keeps a step that is about to be taken.

        `group`: the parameter's group; `state`: optimizer.state of the parameter before the step, {} before its first.
        A number on a device is read from there, which waits for it."""
        hyper = hyper_of(group)
        numbers_kept = {name: value for name, value in state.items() if not has_rows(value)}
        leaves, structure = tree_flatten(
            LoggedStep(hyper, numbers_kept, tuple(name for name in state if name not in numbers_kept))
        )
        form = structure, [kind_of(leaf) for leaf in leaves]
        numbers = [float(leaf) for leaf in leaves if is_number(leaf)]
        last, moving = self.segments[-1] if self.segments else None, []
        if last is not None and last.form == form:
            changed = [value != before for value, before in zip(numbers, last.numbers, strict=True)]
            moving = [place for place in range(len(numbers)) if changed[place] or place in last.moving]
        if last is None or last.form != form or last.moving != moving:
            last = Segment(self.steps, form, leaves, numbers, moving)
            self.segments.append(last)
        last.values.extend(numbers[place] for place in last.moving)
        self.steps += 1

    def at(self, step: int) -> LoggedStep:
        return self.segments[bisect_right(self.segments, step, key=lambda each: each.first) - 1].at(step)

    def parts(self, first: int) -> Iterator[tuple[int, int, Segment]]:
        """Yields the segments from step `first` on, each with its steps: (first, end, segment)."""
        ends = [segment.first for segment in self.segments[1:]] + [self.steps]
        for segment, end in zip(self.segments, ends, strict=True):
            if end > first:
                yield max(first, segment.first), end, segment


def has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() >= ROW_DIMS


def rows_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns what an optimizer's state has for each row."""
    return {name: value for name, value in state.items() if has_rows(value)}


def hyper_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def kind_of(value: Any) -> Any:
    """Returns the kind of a number, or any other value itself. Zero is a kind: rules leave out its operations."""
    if not is_number(value):
        return value
    of_tensor = (value.dtype, value.device, value.shape) if isinstance(value, Tensor) else ()
    return (type(value), *of_tensor, bool(value == 0))


def alike(pattern: Any, number: float) -> Any:
    return torch.full_like(pattern, number) if isinstance(pattern, Tensor) else type(pattern)(number)


# compiled loops


class Numbers:
    """The numbers of steps in f32, as torch rounds them; computed once a step."""

    def __init__(self, width: int) -> None:
        self.table, self.count = np.zeros((64, width), np.float32), 0

    def add(self, *numbers: float) -> None:
        if self.count == len(self.table):
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
        self.table[self.count] = numbers
        self.count += 1


class SGDLoops:
    """torch.optim.SGD, with or without momentum. Steps count from the first one that was added."""

    def __init__(self, hyper: dict[str, Any]) -> None:
        self.needs = ("momentum_buffer",) if hyper["momentum"] else ()  # the states that it moves
        self.numbers = Numbers(6)

    def add(self, step: LoggedStep) -> None:
        """Keeps the numbers of one more step."""
        rate, momentum, fresh = float(-step.hyper["lr"]), step.hyper["momentum"], 1 - step.hyper["dampening"]
        zero = -0.0 if step.hyper["maximize"] else 0.0
        self.numbers.add(rate, momentum, fresh, step.hyper["weight_decay"], zero, step.hyper["nesterov"])

    def replay(self, block: Records, at: I64, end: int) -> None:
        """Gives rows their steps before `end`. `at`: i64 [n] each row's next step, ascending."""
        weights, *buffer = flat(block, *self.needs)
        at, starts = groups_of(at, block.weights.shape[1])
        sgd_steps(weights, buffer[0] if buffer else NONE, self.numbers.table, at, end, starts)


class AdamLoops:
    """torch.optim.Adam and AdamW, with or without amsgrad. Steps count from the first one that was added."""

    def __init__(self, hyper: dict[str, Any]) -> None:
        self.needs = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if hyper["amsgrad"] else []))
        self.numbers = Numbers(9)
        self.unrest = array("q")  # the steps that are not calm
        self.longest = FEW if hyper["decoupled_weight_decay"] and hyper["weight_decay"] else ALL

    def add(self, step: LoggedStep) -> None:
        hyper, (beta1, beta2), count = step.hyper, step.hyper["betas"], float(step.state["step"]) + 1
        rate, root = float(-(hyper["lr"] / (1 - beta1**count))), (1 - beta2**count) ** 0.5
        decay, kept = hyper["weight_decay"], 1.0
        if hyper["decoupled_weight_decay"]:
            decay, kept = 0.0, float(1 - hyper["lr"] * decay)
        zero = -0.0 if hyper["maximize"] else 0.0
        self.numbers.add(1 - beta1, beta2, 1 - beta2, rate, root, hyper["eps"], decay, kept, zero)
        at = self.numbers.count - 1
        if at and not is_calm(*self.numbers.table[at - 1 : at + 1].tolist()):
            self.unrest.append(at)

    def replay(self, block: Records, at: I64, end: int) -> None:
        """Gives rows their steps before `end`. `at`: i64 [n] each row's next step, ascending; moved on."""
        rows = np.flatnonzero(at < end)
        while len(rows):
            part, steps, chosen = block.take(torch.from_numpy(rows)), at[rows], torch.from_numpy(rows)
            self.until_some_rest(part, steps, end)
            block.put(chosen, part)
            order = np.argsort(steps, kind="stable")[: np.count_nonzero(steps < end)]
            at[rows] = steps
            rows = rows[order]

    def until_some_rest(self, block: Records, at: I64, end: int) -> None:
        """Takes full steps until all are done or a quarter of the rows rest; those decay as long as steps are calm.

        `at`: i64 [n] each row's next step, ascending; moved on."""
        while True:
            self.in_full(block, at, min(LOOK, end - int(at[0])), end)
            np.minimum(at + LOOK, end, out=at)
            moving = int(np.searchsorted(at, end))
            until = self.calm_until(at[:moving], end)
            resting = np.flatnonzero(self.at_rest(block, at[:moving]) & (until > at[:moving]))
            if 4 * len(resting) >= moving:
                return self.decay(block, resting, at, until[resting])

    def in_full(self, block: Records, at: I64, steps: int, end: int) -> None:
        """Gives each row the next `steps` steps, or those before `end`."""
        weights, average, square, largest = flat(block, "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        table, (at, starts) = self.numbers.table, groups_of(at, block.weights.shape[1])
        roots = torch.empty(block.weights.numel(), dtype=torch.float32, device="cpu")
        root = roots.numpy()
        for k, groups in enumerate(np.searchsorted(at, end - np.arange(steps)).tolist()):
            adam_moments(weights, average, square, largest, root, table, at[:groups], k, starts)
            roots[: starts[groups]].sqrt_()
            adam_weights(weights, average, root, table, at[:groups], k, starts)

    def calm_until(self, at: I64, end: int) -> I64:
        """Returns the first step from `at` on that is not calm, or `end`; i64 [n]."""
        borders = np.append(np.array(self.unrest, np.int64), end)
        until: I64 = np.minimum(borders[np.searchsorted(borders[:-1], at)], np.minimum(end, at + self.longest))
        return until

    def at_rest(self, block: Records, at: I64) -> NDArray[np.bool_]:
        """Whether the weights of the first rows rest after their full step before `at`."""
        weights, average = flat(block, "exp_avg")
        roots, rests = block.states[self.needs[-1]][: len(at)].sqrt(), np.zeros(len(at), np.bool_)
        look_for_rest(weights, average, roots.view(-1).numpy(), self.numbers.table, at, block.weights.shape[1], rests)
        return rests

    def decay(self, block: Records, rows: I64, at: I64, until: I64) -> None:
        """Gives rows at rest their steps before `until`; moves `at` on."""
        order = np.argsort(at[rows] - until, kind="stable")
        rows, until = rows[order], until[order]
        part = block.take(torch.from_numpy(rows))
        weights, average, square = flat(part, "exp_avg", "exp_avg_sq")
        table, weights_too, dim = self.numbers.table, self.longest == FEW, block.weights.shape[1]
        decay_moments(weights, average, square, table, weights_too, at[rows], until, dim)
        block.put(torch.from_numpy(rows), part)
        at[rows] = until


def flat(rows: Records, *states: str) -> list[F32]:
    """The weights [n * D] and these states; nothing for a state that the rows do not have."""
    arrays = (rows.states[name].view(-1).numpy() if name in rows.states else NONE for name in states)
    return [rows.weights.view(-1).numpy(), *arrays]


def groups_of(at: I64, dim: int) -> tuple[I64, I64]:
    """Groups rows with the same next step, whose floats are one run. Returns each run's step, and where runs start."""
    first = np.flatnonzero(np.diff(at, prepend=-1))
    return at[first], np.append(first, len(at)) * dim


def is_calm(before: list[float], now: list[float]) -> bool:
    """Whether Adam's update cannot grow relative to its weight between two steps. Takes lists of a step's numbers."""
    rate, rate_before = -now[RATE], -before[RATE]
    if not (
        now[DECAY] == 0
        and now[EPS] == before[EPS] >= LEAST_EPS
        and now[ROOT] >= before[ROOT] >= LEAST_ROOT
        and LEAST_KEPT <= now[KEPT] <= 1
        and LEAST_RATE <= min(rate, rate_before) <= max(rate, rate_before) <= MOST_RATE
    ):
        return False
    growth = rate * now[ROOT] / (rate_before * before[ROOT]) * (1 - now[TAKEN]) / math.sqrt(now[BETA2])
    return growth * ROUNDINGS <= now[KEPT]


@compiled_arithmetic
def sgd_steps(weights: F32, buffer: F32, table: F32, at: I64, end: int, starts: I64) -> None:
    """For the floats starts[g] to starts[g + 1] - 1 of each group of rows."""
    for g in range(len(at)):
        for step in range(at[g], end):
            rate, momentum, fresh, decay = table[step, 0], table[step, 1], table[step, 2], table[step, 3]
            zero, looks_ahead = table[step, 4], table[step, 5] != 0
            for c in range(starts[g], starts[g + 1]):
                i = U(c)
                grad = multiply_add(decay, weights[i], zero) if decay != 0 else zero
                if len(buffer):
                    buffer[i] = multiply_add(fresh, grad, buffer[i] * momentum)
                    grad = multiply_add(momentum, buffer[i], grad) if looks_ahead else buffer[i]
                weights[i] = multiply_add(rate, grad, weights[i])


@compiled_arithmetic
def adam_moments(
    weights: F32, average: F32, square: F32, largest: F32, root: F32, table: F32, at: I64, k: int, starts: I64
) -> None:
    """The first half of the k-th step of each group of rows; root: what torch takes the square root of."""
    for g in range(len(at)):
        step = at[g] + k
        taken, beta2, new = table[step, TAKEN], table[step, BETA2], table[step, NEW]
        decay, zero = table[step, DECAY], table[step, ZERO]
        for c in range(starts[g], starts[g + 1]):
            i = U(c)
            grad = multiply_add(decay, weights[i], zero) if decay != 0 else zero
            average[i] = mixed(average[i], grad, taken)
            square[i] = multiply_add(new * grad, grad, square[i] * beta2)
            if len(largest):
                largest[i] = largest[i] if largest[i] > square[i] or largest[i] != largest[i] else square[i]
                root[i] = largest[i]
            else:
                root[i] = square[i]


@compiled_arithmetic
def adam_weights(weights: F32, average: F32, root: F32, table: F32, at: I64, k: int, starts: I64) -> None:
    """The second half of the k-th step of each group of rows; root: the square roots."""
    for g in range(len(at)):
        step = at[g] + k
        rate, corrected, eps, kept = table[step, RATE], table[step, ROOT], table[step, EPS], table[step, KEPT]
        for c in range(starts[g], starts[g + 1]):
            i = U(c)
            weights[i] = weights[i] * kept + rate * average[i] / (root[i] / corrected + eps)


@compiled_arithmetic
def mixed(average: np.float32, grad: np.float32, taken: np.float32) -> np.float32:
    """torch.lerp."""
    is_small = taken < np.float32(0.5)
    return multiply_add(  # type: ignore[no-any-return]
        taken if is_small else taken - np.float32(1), grad - average, average if is_small else grad
    )


@compiled_arithmetic
def look_for_rest(
    weights: F32, average: F32, root: F32, table: F32, at: I64, dim: int, rests: NDArray[np.bool_]
) -> None:
    """found[row]: whether its weights stay, or only decay, in calm steps after the full one before at[row]."""
    for row in range(len(rests)):
        step, moving = at[row] - 1, 0
        rate, corrected, eps = table[step, RATE], table[step, ROOT], table[step, EPS]
        for c in range(row * dim, (row + 1) * dim):
            i = U(c)
            size, update = abs(weights[i]), abs(rate * average[i] / (root[i] / corrected + eps))
            is_lost = update <= size * LOST and LEAST_WEIGHT <= size < np.inf
            is_none = average[i] == 0 and not np.signbit(average[i]) and root[i] >= 0
            moving += not (is_lost or is_none)
        rests[row] = moving == 0


@compiled_arithmetic
def decay_moments(
    weights: F32, average: F32, square: F32, table: F32, weights_too: bool, at: I64, until: I64, dim: int
) -> None:
    """Steps that move no weight, but for their decoupled decay; rows with many such steps first."""
    for first in range(0, len(at), ROWS):
        end = min(first + ROWS, len(at))
        for k in range(until[first] - at[first]):
            while until[end - 1] - at[end - 1] <= k:
                end -= 1
            for row in range(first, end):
                step = at[row] + k
                taken, beta2, zero, kept = table[step, TAKEN], table[step, BETA2], table[step, ZERO], table[step, KEPT]
                for c in range(row * dim, (row + 1) * dim):
                    i = U(c)
                    average[i] = mixed(average[i], zero, taken)
                    square[i] = square[i] * beta2 + np.float32(0)
                    if weights_too:
                        weights[i] *= kept
