"""Keeps what each step of an optimizer over one table was, so that rows that were away can have it later.

An optimizer's step is its group's hyper-parameters (rate, betas, decay, flags) and the parameter's state before the
step: numbers (Adam's `step`), and tensors with a row for each row, which are the rows' own and not kept here. A
schedule changes one or two numbers a step. So the log keeps segments: what stays as it is once, and 8 bytes a step for
each number that has ever changed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

ROW_DIMS = 2  # a state tensor with this many dimensions has a row for each row of the table


class Step(NamedTuple):
    """One step of the optimizer, as it was given."""

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

    def at(self, step: int) -> Step:
        numbers, at = list(self.numbers), (step - self.first) * len(self.moving)
        for offset, place in enumerate(self.moving):
            numbers[place] = self.values[at + offset]
        given = iter(numbers)
        leaves = [alike(leaf, next(given)) if is_number(leaf) else leaf for leaf in self.leaves]
        found: Step = tree_unflatten(leaves, self.form[0])
        return found


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
        own = {name: value for name, value in state.items() if not has_rows(value)}
        leaves, structure = tree_flatten(Step(hyper, own, tuple(name for name in state if name not in own)))
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

    def at(self, step: int) -> Step:
        return self.segments[bisect_right(self.segments, step, key=lambda each: each.first) - 1].at(step)

    def parts(self, first: int) -> Iterator[tuple[int, int, Segment]]:
        """The segments from step `first` on, each with the steps of it: (first, end, segment)."""
        ends = [segment.first for segment in self.segments[1:]] + [self.steps]
        for segment, end in zip(self.segments, ends, strict=True):
            if end > first:
                yield max(first, segment.first), end, segment


def has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() >= ROW_DIMS


def rows_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """What an optimizer's state has of each row."""
    return {name: value for name, value in state.items() if has_rows(value)}


def hyper_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def kind_of(value: Any) -> Any:
    """All of a number but its value, or another value itself. Rules leave out the operations of a zero."""
    if not is_number(value):
        return value
    of_tensor = (value.dtype, value.device, value.shape) if isinstance(value, Tensor) else ()
    return (type(value), *of_tensor, bool(value == 0))


def alike(pattern: Any, number: float) -> Any:
    return torch.full_like(pattern, number) if isinstance(pattern, Tensor) else type(pattern)(number)
