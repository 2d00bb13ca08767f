"""Replays the steps that rows missed while they were away, with the bits of torch.optim over a whole table.

A dense rule moves every row at every step, also without a gradient: moments decay, momentum and decay move weights.
Each operation of an elementwise rule has the same bits at any place of an array of any length, so a row may have its
missed steps later: a gradient of zero, and the hyper-parameters of each step from the log. Two ways have these bits:

    the rule itself     any elementwise rule: an optimizer of the script's class steps over the rows that miss a step
    compiled loops      Adam, AdamW and SGD on a CPU, if random rows show that they have torch's bits here

Rows are taken in the order of the last step that they have had: those that miss a step are the first ones. On a device
the rule itself runs there; the host loops over steps, never over rows.

Trials show whether an optimizer trains the rows of a table apart from each other. One that does not is refused by name.

    before the first step   a small table is trained twice: whole, and as adopted tables are, some rows a step
    at steps 2, 4, 8, ...   some rows of the step are trained alone as well, from copies
"""

from __future__ import annotations

import copy
import inspect
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import _disable_current_modes as unrecorded
from torch.utils._pytree import tree_leaves

from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError, listed
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.adopt.missed_steps import (
    AdamLoops,
    LoggedStep,
    Segment,
    SGDLoops,
    StepLog,
    has_rows,
    hyper_of,
    is_number,
    rows_of,
)
from rowcast.trainer.adopt.read_ahead import is_same
from rowcast.trainer.adopt.records import Records

Loops = AdamLoops | SGDLoops
LOOPS: dict[type[Optimizer], Callable[[dict[str, Any]], Loops]] = {Adam: AdamLoops, AdamW: AdamLoops, SGD: SGDLoops}
BLOCK_FLOATS = 2**14  # of weights and of each state: for the loops, a block stays in a core's second cache
BIG_BLOCK_FLOATS = 2**22  # where each operation is a call
UNLIKE = ("capturable", "differentiable", "fused")  # of a group: torch computes in another way than the loops
TRIED_ROWS, TRIED_STEPS = (67, 33), 4  # of [n, D]; odd numbers: ends of arrays are tried too


def catch_up(rows: Records, log: StepLog) -> int:
    """Replays for each row the steps of the log that it missed, with a zero gradient. Returns the steps replayed.

    Changes `rows` in place, and `rows.lasts` to log.steps. States may have any value before the rule's first step,
    which makes them. Raises ConfigError if the rule cannot be made anew."""
    if not log.steps:
        return 0
    lasts = rows.lasts.cpu()  # the host decides by them, so it waits for a device once
    missed = log.steps - lasts
    assert not bool((missed < 0).any()), "rows and log are of one run"
    order = torch.argsort(lasts, stable=True)[: int((missed > 0).sum())]
    on_host = rows.weights.device.type == "cpu"
    size = (BLOCK_FLOATS if on_host and log.rule in LOOPS else BIG_BLOCK_FLOATS) // rows.weights.shape[1] or 1
    with torch.no_grad():
        for at in range(0, len(order), size):
            part = order[at : at + size]
            index = part.to(rows.weights.device)
            block = rows.take(index)
            for first, end, segment in log.parts(int(lasts[part[0]])):
                replay(block, lasts[part].numpy(), first, end, segment, log)
            rows.put(index, block)
    rows.lasts.fill_(log.steps)
    return int(missed.sum())


def replay(block: Records, lasts: I64, first: int, end: int, segment: Segment, log: StepLog) -> None:
    """Replays for a block's rows the steps from `first` to `end` - 1, all of one segment. `lasts`: ascending."""
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
        given, parameter = log.at(step), nn.Parameter(block.weights[:rows])
        parameter.grad = grads[:rows].zero_()
        step_twin(
            twin,
            parameter,
            given.hyper,
            {**{name: block.states[name][:rows] for name in given.row_states}, **given.state},
        )
        for name, state in twin.state[parameter].items():
            if has_rows(state) and state.data_ptr() != block.states[name].data_ptr():
                block.states[name][:rows] = state


def step_twin(twin: Optimizer, rows: nn.Parameter, hyper: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Steps rows with these hyper-parameters. `state`: of the rows, before the step; {} before the first."""
    twin.param_groups = [{**hyper, "params": [rows]}]
    twin.state.clear()
    if state:
        twin.state[rows] = state
    step_without_hooks(twin)


def step_without_hooks(optimizer: Optimizer) -> None:
    take = inspect.unwrap(type(optimizer).step, stop=lambda each: not getattr(each, "hooked", False))
    take(optimizer)


@cache
def arguments(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def made_anew(rule: type[Optimizer], hyper: Mapping[str, Any], parameter: nn.Parameter) -> Optimizer:
    """An optimizer of the class with these settings, for one parameter."""
    wanted = arguments(rule.__init__)
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


def chosen(step: LoggedStep, rule: type[Optimizer]) -> Loops | None:
    """Returns fresh loops for such steps if the rule has any and they reproduce torch's bits on random rows here."""
    has_tensors = any(isinstance(beta, Tensor) for beta in step.hyper.get("betas", ()))
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
        chosen(LoggedStep(hyper, {"step": torch.tensor(1.0, device="cpu")}, LOOPS[rule](hyper).needs), rule)


def have_bits_of_torch(loops: Loops, step: LoggedStep, rule: type[Optimizer]) -> bool:
    """Whether both ways give random rows the same bits, over several steps."""
    rows = random_rows(step.row_states)
    expected, lasts, trial = rows.take(torch.arange(len(rows.lasts), device="cpu")), rows.lasts.numpy(), StepLog(rule)
    for _ in range(TRIED_STEPS):
        trial.append(step.hyper, {**expected.states, **step.state})
        loops.add(step)
    by_the_rule(expected, lasts, 0, TRIED_STEPS, trial)
    loops.replay(rows, lasts, TRIED_STEPS)
    return rows.has_bits_of(expected)


def random_rows(states: tuple[str, ...]) -> Records:
    """Returns values of all magnitudes, zeros of both signs and denormals; at least 0 where a rule takes their root."""
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


# trials


ROWS, STEPS = 150, 32  # rules factor what has 128 rows and columns, and count to 5, 6 and 10 steps
MOST_COLUMNS = 256
SMALL = (3, 4)  # of a table that shows the shapes of states
SPOT_ROWS = 4
SIMPLE = (bool, int, float, str, tuple, torch.dtype, type(None))
DRAWS = "draws random numbers, which are others for some rows than for the table"
MIXES = "does not train each row for itself: a step of one row depends on others"


class Kept(NamedTuple):
    """What an optimizer does to rows."""

    first: dict[str, float]  # the states of a row, with their values before the first step
    moves: bool  # also rows without a gradient
    is_shown: bool  # the trial has the same bits on the table's device


class TriedRule(NamedTuple):
    """What makes another optimizer like the script's."""

    kind: type[Optimizer]
    settings: dict[str, Any]  # of the group, and arguments that the optimizer keeps itself
    is_sparse: bool  # gradients are

    def anew(self, weights: Tensor) -> tuple[Optimizer, nn.Parameter]:
        parameter = nn.Parameter(weights.clone())
        return made_anew(self.kind, self.settings, parameter), parameter

    def refuse(self, why: str) -> ConfigError:
        return ConfigError(f"{self.kind.__name__} {why}")


def settings_of(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    names = arguments(type(optimizer).__init__)
    kept = {name: value for name, value in vars(optimizer).items() if name in names and isinstance(value, SIMPLE)}
    return {**kept, **hyper_of(group)}


_kept: dict[tuple[Any, ...], Kept] = {}


def try_rule(rule: TriedRule, table: str, dim: int, device: torch.device) -> Kept:
    """Tries an optimizer over a small table of `dim` columns, on the host and on `device`. Raises ConfigError."""
    key = rule.kind, repr(rule.settings), rule.is_sparse, dim, device
    try:
        if key not in _kept:
            with unrecorded():
                first = first_states(rule)
                moves = train_apart(rule, first, dim, torch.device("cpu"))
                _kept[key] = Kept(first, moves, device.type == "cpu" or has_bits(rule, first, dim, device))
    except ConfigError as error:
        raise ConfigError(f"{error}; {remedy(table)}") from None
    except Exception as error:  # noqa: BLE001 - whatever the rule raises
        raise ConfigError(f"{rule.kind.__name__} cannot train rows of a table ({error}); {remedy(table)}") from None
    return _kept[key]


def remedy(table: str) -> str:
    return f"give {table} another optimizer, or leave it on the device by keep=[{table!r}]"


def refuse_kind(kind: type[Optimizer], group: Mapping[str, Any], table: str) -> None:
    """Raises ConfigError for an optimizer that is refused without a trial."""
    closure = arguments(kind.step).get("closure")
    if group.get("fused"):
        why = (
            "(fused=True) rounds the last values of an array differently, so rows apart would have other bits than the "
            'table; leave fused out (Hugging Face: TrainingArguments(optim="adamw_torch"))'
        )
    elif hasattr(kind, "eval"):
        why = " has a train and an eval mode, and changes all rows of a table from one to the other"
    elif hasattr(kind, "second_step") or (closure is not None and closure.default is closure.empty):
        why = " may take several gradients in a step, and rows of a table are prepared for one"
    else:
        return
    raise ConfigError(f"{kind.__name__}{why}; {remedy(table)}")


def first_states(rule: TriedRule) -> dict[str, float]:
    """The states that a rule keeps of a row, with their values before the first step."""
    weights = torch.linspace(-1, 1, SMALL[0] * SMALL[1], device="cpu").reshape(SMALL)
    optimizer, parameter = rule.anew(weights)
    grad = weights * 0.5
    if rule.is_sparse:
        grad[0] = 0  # a row without a gradient keeps what the rule begins its states with
        grad = grad.to_sparse(1)
    first = {name: float(state[0, 0]) for name, state in rows_of(optimizer.state.get(parameter, {})).items()}
    for _ in range(2):
        parameter.grad = grad
        step_without_hooks(optimizer)
    kept, form = optimizer.state.get(parameter, {}), form_of(weights)
    for name, value in [*hyper_of(optimizer.param_groups[0]).items(), *kept.items()]:
        for leaf in tree_leaves(value):
            is_row = isinstance(leaf, Tensor) and leaf is rows_of(kept).get(name)
            if isinstance(leaf, Tensor) and not (form_of(leaf) == form if is_row else is_number(leaf)):
                place = "" if leaf is value else f" in a {type(value).__name__}"
                raise rule.refuse(
                    f"keeps {name} of {form_of(leaf)}{place} for a table of {list(SMALL)}, and rowcast moves states "
                    "that have a row of torch.float32 for each row"
                )
    # a dense rule begins its states itself, in a row's first missed step
    return {
        name: first.get(name, float(state[0, 0]) if rule.is_sparse else 0.0) for name, state in rows_of(kept).items()
    }


def form_of(tensor: Tensor) -> str:
    return "a sparse tensor" if tensor.is_sparse else f"{tensor.dtype} {list(tensor.shape)}"


def has_bits(rule: TriedRule, first: dict[str, float], dim: int, device: torch.device) -> bool:
    try:
        train_apart(rule, first, dim, device)
    except Exception:  # noqa: BLE001 - whatever the rule raises
        return False
    return True


def train_apart(rule: TriedRule, first: dict[str, float], dim: int, device: torch.device) -> bool:
    """Trains a table whole, and as an adopted one. Returns whether a step moves rows without a gradient. Raises
    ConfigError if the bits differ."""
    if isinstance(rule.settings.get("lr"), float):  # a small rate hides much, and a warm-up begins with 0
        rule = rule._replace(settings={**rule.settings, "lr": 1.0})
    generator, drawn = np.random.default_rng(7), random_states()

    def values(num: int, least: int) -> Tensor:
        """Rows of sizes from 10**least to 10."""
        normal = generator.standard_normal((num, min(dim, MOST_COLUMNS)))
        return torch.from_numpy((normal * 10 ** generator.uniform(least, 1, (num, 1))).astype(np.float32)).to(device)

    weights, ways = values(ROWS, -4), values(ROWS, -3)
    whole, table = rule.anew(weights)
    part, parameter = rule.anew(weights[:1])
    states = {name: torch.full_like(weights, value) for name, value in first.items()}
    rows, log = Records(weights, states, torch.zeros(ROWS, dtype=torch.int64, device=device)), StepLog(rule.kind)
    spot = SpotCheck(rule.kind, Kept(first, moves=True, is_shown=True), device)
    for _ in range(STEPS):
        ids = torch.from_numpy(np.flatnonzero(generator.random(ROWS) < 0.4)).to(device)
        grads = (ways[ids] + values(len(ids), -3)) * values(len(ids), -3)[:, :1].relu()  # some are 0
        grad = torch.sparse_coo_tensor(ids[None], grads, weights.shape, device=device, check_invariants=False)
        table.grad = grad if rule.is_sparse else grad.to_dense()
        taken = rows.take(ids)
        catch_up(taken, log)
        parameter.grad, parameter.data = None, taken.weights
        parameter.grad = table.grad.index_select(0, ids)
        kept = part.state.get(parameter, {})
        kept.update({name: taken.states[name] for name in rows_of(kept)})
        settings = settings_of(part, part.param_groups[0])
        if not rule.is_sparse:
            log.append(settings, kept)
        spot.before_step(parameter, part.param_groups[0], settings, kept)
        step_without_hooks(part)
        step_without_hooks(whole)
        if fault := spot.fault(parameter, part.state.get(parameter, {})):
            raise rule.refuse(fault)
        rows.put(ids, Records(parameter.data, rows_of(part.state.get(parameter, {})), torch.full_like(ids, log.steps)))
    before = rows.take(torch.arange(ROWS, device=device))
    catch_up(rows, log)
    if has_drawn(drawn):
        raise rule.refuse(DRAWS)
    if not rows.has_bits_of(Records(table.data, rows_of(whole.state.get(table, {})), rows.lasts)):
        raise rule.refuse(MIXES)
    return not rows.has_bits_of(before)


def numbers_of(group: Mapping[str, Any], state: Mapping[str, Any], names: Iterable[str]) -> str:
    """What an optimizer keeps that no row has. `names`: of the group's."""
    kept = (
        [group.get(name) for name in names if name != "params"],
        [value for value in state.values() if not has_rows(value)],
    )
    simple = (leaf for leaf in tree_leaves(kept) if isinstance(leaf, (Tensor, *SIMPLE)))
    return repr([float(leaf) if isinstance(leaf, Tensor) else leaf for leaf in simple])


def random_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def has_drawn(before: tuple[Any, ...]) -> bool:
    """Whether this thread has: where there are others, theirs are not told apart, and other bits refuse a rule."""
    return threading.active_count() == 1 and not all(map(is_same, before, random_states()))


class SpotCheck:
    """Trains some rows of a table's step alone at steps 2, 4, 8, ...: a trial is not a proof."""

    def __init__(self, rule: type[Optimizer], kept: Kept, device: torch.device) -> None:
        self.rule, self.kept, self.device = rule, kept, device
        self.steps, self._group = 0, dict[str, Any]()
        self._alone: tuple[Tensor, Records, str, bool] | None = None  # places of the step that runs, their rows alone,
        # what is kept beside these, and whether they drew random numbers

    def before_step(
        self, parameter: nn.Parameter, group: dict[str, Any], settings: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        """`parameter`, `state`: of the step's rows; they stay as they are."""
        self.steps, self._group = self.steps + 1, group
        is_due = self.steps > 1 and self.steps & (self.steps - 1) == 0 and self.kept.is_shown
        if is_due and len(parameter) > 1 and parameter.device == self.device:
            with unrecorded():
                self._train_alone(parameter, settings, state)

    def _train_alone(self, parameter: nn.Parameter, settings: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        assert parameter.grad is not None, "a step is of rows with a gradient"
        drawn, places = random_states(), torch.arange(len(parameter), device=self.device)
        if parameter.grad.is_sparse:  # torch adds entries of one row in an order that depends on all
            places = (torch.bincount(parameter.grad._indices()[0], minlength=len(places)) == 1).nonzero().flatten()
        at = places[:: -(-len(places) // SPOT_ROWS) or 1][: len(parameter) - 1]
        if not len(at):
            return
        sample = nn.Parameter(parameter.data[at])
        sample.grad = parameter.grad.index_select(0, at)
        alone = made_anew(self.rule, settings, nn.Parameter(torch.zeros(1, 1, device="cpu")))
        rows = {name: value[at] if has_rows(value) else copy.deepcopy(value) for name, value in state.items()}
        step_twin(alone, sample, copy.deepcopy(dict(settings)), rows)
        numbers = numbers_of(alone.param_groups[0], alone.state.get(sample, {}), self._group)
        self._alone = at, Records(sample.data, rows_of(alone.state.get(sample, {})), at), numbers, has_drawn(drawn)

    def fault(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> str:
        """Returns, after the step, what it did that a table's rule must not do, or ""."""
        rows = rows_of(state)
        if rows.keys() != self.kept.first.keys():
            return (
                f"keeps {listed([*rows]) or 'nothing'} of a row, and before {listed([*self.kept.first]) or 'nothing'}"
            )
        if self._alone is None:
            return ""
        (at, alone, numbers, draws), self._alone = self._alone, None
        if draws:
            return DRAWS
        trained = Records(parameter.data[at], {name: value[at] for name, value in rows.items()}, at)
        is_same = alone.has_bits_of(trained) and numbers == numbers_of(self._group, state, self._group)
        return "" if is_same else MIXES
