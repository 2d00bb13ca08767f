"""Gives rows that were away the steps that they missed, with the bits of torch.optim over a whole table.

A dense rule moves every row at every step, also without a gradient: moments decay, momentum and decay move weights.
Each operation of an elementwise rule has the same bits at any place of an array of any length, so a row may have its
missed steps later: a gradient of zero, and the hyper-parameters of each step from the log. Two ways have these bits:

    the rule itself     any elementwise rule: an optimizer of the script's class steps over the rows that miss a step
    compiled loops      Adam, AdamW and SGD on a CPU, if random rows show that they have torch's bits here

Rows are taken in the order of the last step that they have had: those that miss a step are the first ones. On a device
the rule itself runs there; the host loops over steps, never over rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.adopt.missed_steps import AdamLoops, SGDLoops
from rowcast.trainer.adopt.rows import Records
from rowcast.trainer.adopt.step_log import Segment, Step, StepLog, has_rows, hyper_of

Loops = AdamLoops | SGDLoops
LOOPS: dict[type[Optimizer], Callable[[dict[str, Any]], Loops]] = {Adam: AdamLoops, AdamW: AdamLoops, SGD: SGDLoops}
BLOCK_FLOATS = 2**14  # of weights and of each state: for the loops, a block stays in a core's second cache
BIG_BLOCK_FLOATS = 2**22  # where each operation is a call
UNLIKE = ("capturable", "differentiable", "fused")  # of a group: torch computes in another way than the loops
TRIED_ROWS, TRIED_STEPS = (67, 33), 4  # of [n, D]; odd numbers: ends of arrays are tried too


def catch_up(rows: Records, log: StepLog) -> int:
    """Gives each row the steps of the log that it has not had, with a zero gradient. Returns the steps replayed.

    `rows` are changed in place, `rows.lasts` to log.steps; states have whatever value before the rule's first step,
    which makes them. Raises ConfigError if the rule cannot be made anew."""
    lasts = rows.lasts.cpu()  # the host decides by them: a device is waited for once
    missed = log.steps - lasts
    assert not bool((missed < 0).any()), "rows and log are of one run"
    order = torch.argsort(lasts, stable=True)[: int((missed > 0).sum())]
    on_host = rows.weights.device.type == "cpu"
    size = (BLOCK_FLOATS if on_host and log.rule in LOOPS else BIG_BLOCK_FLOATS) // rows.weights.shape[1] or 1
    with torch.no_grad():
        for at in range(0, len(order), size):
            own = order[at : at + size]
            index = own.to(rows.weights.device)
            block = rows.take(index)
            for first, end, segment in log.parts(int(lasts[own[0]])):
                replay(block, lasts[own].numpy(), first, end, segment, log)
            rows.put(index, block)
    rows.lasts.fill_(log.steps)
    return int(missed.sum())


def replay(block: Records, lasts: I64, first: int, end: int, segment: Segment, log: StepLog) -> None:
    """Gives a block's rows the steps from `first` to `end` - 1, all of one segment. `lasts`: ascending."""
    loops = loops_of(segment, end, log) if block.weights.device.type == "cpu" else None
    if loops is None:
        by_the_rule(block, lasts, first, end, log)
    else:
        loops.replay(block, np.maximum(lasts, first) - segment.first, end - segment.first)


def by_the_rule(block: Records, lasts: I64, first: int, end: int, log: StepLog) -> None:
    """An optimizer of the script's class steps over the rows. No hook of a step is called."""
    twin = made_anew(log.rule, log.at(first).hyper, nn.Parameter(torch.zeros(1, 1, device="cpu")))
    grads = torch.zeros_like(block.weights)
    for step, rows in enumerate(np.searchsorted(lasts, np.arange(first, end), side="right").tolist(), first):
        given, own = log.at(step), nn.Parameter(block.weights[:rows])
        own.grad = grads[:rows].zero_()
        step_twin(
            twin, own, given.hyper, {**{name: block.states[name][:rows] for name in given.row_states}, **given.state}
        )
        for name, state in twin.state[own].items():
            if has_rows(state) and state.data_ptr() != block.states[name].data_ptr():
                block.states[name][:rows] = state


def step_twin(twin: Optimizer, own: nn.Parameter, hyper: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Steps rows with these hyper-parameters. `state`: of the rows, before the step; {} before the first."""
    twin.param_groups = [{**hyper, "params": [own]}]
    twin.state.clear()
    if state:
        twin.state[own] = state
    step_without_hooks(twin)


def step_without_hooks(optimizer: Optimizer) -> None:
    take = inspect.unwrap(type(optimizer).step, stop=lambda each: not getattr(each, "hooked", False))
    take(optimizer)


def made_anew(rule: type[Optimizer], hyper: Mapping[str, Any], parameter: nn.Parameter) -> Optimizer:
    """An optimizer of the class with these settings, for one parameter."""
    wanted = inspect.signature(rule.__init__).parameters
    settings = {name: value for name, value in hyper_of(hyper).items() if name in wanted}
    try:
        return rule([parameter], **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"rows catch up with an optimizer of their own, but {rule.__name__} cannot be made from its group's "
            f"settings ({error}); give it an __init__ that takes what it keeps in its param_groups"
        ) from None


def loops_of(segment: Segment, end: int, log: StepLog) -> Loops | None:
    """The segment's compiled loops with the numbers of its steps up to `end`; None if the rule itself has to step."""
    if segment.first not in log.loops:
        log.loops[segment.first] = chosen(log.at(segment.first), log.rule)
    loops: Loops | None = log.loops[segment.first]
    if loops is not None:
        for step in range(segment.first + loops.numbers.count, end):
            loops.add(log.at(step))
    return loops


def chosen(step: Step, rule: type[Optimizer]) -> Loops | None:
    """Fresh loops for such steps, if there are any for the rule and they have torch's bits of random rows here."""
    has_tensors = any(isinstance(own, Tensor) for own in step.hyper.get("betas", ()))
    if rule not in LOOPS or has_tensors or any(step.hyper.get(name) for name in UNLIKE):
        return None
    loops = LOOPS[rule](step.hyper)
    if not set(loops.needs) <= set(step.row_states):
        return None  # the rule's first step, which makes them
    if have_bits_of_torch(LOOPS[rule](step.hyper), step, rule):
        return loops
    say_once(rule.__name__)
    return None


def try_loops() -> None:
    """Compiles all of them."""
    for rule in LOOPS:
        [group] = made_anew(rule, {"lr": 0.1}, nn.Parameter(torch.zeros(1, 1, device="cpu"))).param_groups
        hyper = hyper_of(group)
        chosen(Step(hyper, {"step": torch.tensor(1.0, device="cpu")}, LOOPS[rule](hyper).needs), rule)


def have_bits_of_torch(loops: Loops, step: Step, rule: type[Optimizer]) -> bool:
    """Gives random rows the same step some times in both ways."""
    own = random_rows(step.row_states)
    expected, lasts, trial = own.take(torch.arange(len(own.lasts), device="cpu")), own.lasts.numpy(), StepLog(rule)
    for _ in range(TRIED_STEPS):
        trial.append(step.hyper, {**expected.states, **step.state})
        loops.add(step)
    by_the_rule(expected, lasts, 0, TRIED_STEPS, trial)
    loops.replay(own, lasts, TRIED_STEPS)
    return own.has_bits_of(expected)


def random_rows(states: tuple[str, ...]) -> Records:
    """Values of all sizes, zeros of both signs and denormal ones; at least 0 where a rule takes their root."""
    generator = torch.Generator().manual_seed(1)

    def values() -> Tensor:
        sizes = 10 ** (torch.rand(TRIED_ROWS, generator=generator, device="cpu") * 44 - 42)
        sizes[torch.rand(TRIED_ROWS, generator=generator, device="cpu") < 0.1] = 0
        return (torch.randn(TRIED_ROWS, generator=generator, device="cpu") * sizes).float()

    lasts = torch.sort(torch.arange(TRIED_ROWS[0], device="cpu") % TRIED_STEPS).values
    return Records(values(), {name: values().abs() if "sq" in name else values() for name in states}, lasts)


@cache
def say_once(rule: str) -> None:
    get_logger().warning("rows catch up by the rule itself, which is slower: its loops have other bits here", rule=rule)
