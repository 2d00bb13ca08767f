"""Shows whether an optimizer trains the rows of a table apart from each other. One that does not is refused by name.

before the first step   a small table is trained twice: whole, and as adopted tables are, some rows a step
at steps 2, 4, 8, ...   some rows of the step are trained alone as well, from copies
"""

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
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes as unrecorded
from torch.utils._pytree import tree_leaves

from rowcast.runtime.errors import ConfigError, listed
from rowcast.trainer.adopt.catch_up import catch_up, made_anew, step_twin, step_without_hooks
from rowcast.trainer.adopt.read_ahead import is_same
from rowcast.trainer.adopt.rows import Records
from rowcast.trainer.adopt.step_log import StepLog, has_rows, hyper_of, is_number, rows_of

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


class Rule(NamedTuple):
    """What makes another optimizer like the script's."""

    kind: type[Optimizer]
    settings: dict[str, Any]  # of the group, and arguments that the optimizer keeps itself
    is_sparse: bool  # gradients are

    def anew(self, weights: Tensor) -> tuple[Optimizer, nn.Parameter]:
        parameter = nn.Parameter(weights.clone())
        return made_anew(self.kind, self.settings, parameter), parameter

    def refuse(self, why: str) -> ConfigError:
        return ConfigError(f"{self.kind.__name__} {why}")


@cache
def arguments(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def settings_of(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    names = arguments(type(optimizer).__init__)
    kept = {name: value for name, value in vars(optimizer).items() if name in names and isinstance(value, SIMPLE)}
    return {**kept, **hyper_of(group)}


_kept: dict[tuple[Any, ...], Kept] = {}


def try_rule(rule: Rule, table: str, dim: int, device: torch.device) -> Kept:
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
    """Raises ConfigError for what needs no trial."""
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


def first_states(rule: Rule) -> dict[str, float]:
    """The states that a rule keeps of a row, with their values before the first step."""
    weights = torch.linspace(-1, 1, SMALL[0] * SMALL[1], device="cpu").reshape(SMALL)
    optimizer, parameter = rule.anew(weights)
    grad = weights * 0.5
    if rule.is_sparse:
        grad[0] = 0  # a row without a gradient keeps what the rule begins its states with
        grad = grad.to_sparse(1)
    first = {name: float(own[0, 0]) for name, own in rows_of(optimizer.state.get(parameter, {})).items()}
    for _ in range(2):
        parameter.grad = grad
        step_without_hooks(optimizer)
    kept, form = optimizer.state.get(parameter, {}), form_of(weights)
    for name, value in [*hyper_of(optimizer.param_groups[0]).items(), *kept.items()]:
        for own in tree_leaves(value):
            is_row = isinstance(own, Tensor) and own is rows_of(kept).get(name)
            if isinstance(own, Tensor) and not (form_of(own) == form if is_row else is_number(own)):
                place = "" if own is value else f" in a {type(value).__name__}"
                raise rule.refuse(
                    f"keeps {name} of {form_of(own)}{place} for a table of {list(SMALL)}, and rowcast moves states "
                    "that have a row of torch.float32 for each row"
                )
    # a dense rule begins its states itself, in a row's first missed step
    return {name: first.get(name, float(own[0, 0]) if rule.is_sparse else 0.0) for name, own in rows_of(kept).items()}


def form_of(own: Tensor) -> str:
    return "a sparse tensor" if own.is_sparse else f"{own.dtype} {list(own.shape)}"


def has_bits(rule: Rule, first: dict[str, float], dim: int, device: torch.device) -> bool:
    try:
        train_apart(rule, first, dim, device)
    except Exception:  # noqa: BLE001 - whatever the rule raises
        return False
    return True


def train_apart(rule: Rule, first: dict[str, float], dim: int, device: torch.device) -> bool:
    """Trains a table whole, and as an adopted one. Returns whether a step moves rows without a gradient. Raises
    ConfigError if the bits differ."""
    if isinstance(rule.settings.get("lr"), float):  # a small one hides much, and a warm-up begins with 0
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
    kept = [group.get(name) for name in names if name != "params"], [own for own in state.values() if not has_rows(own)]
    simple = (own for own in tree_leaves(kept) if isinstance(own, (Tensor, *SIMPLE)))
    return repr([float(own) if isinstance(own, Tensor) else own for own in simple])


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
        own = nn.Parameter(parameter.data[at])
        own.grad = parameter.grad.index_select(0, at)
        alone = made_anew(self.rule, settings, nn.Parameter(torch.zeros(1, 1, device="cpu")))
        rows = {name: value[at] if has_rows(value) else copy.deepcopy(value) for name, value in state.items()}
        step_twin(alone, own, copy.deepcopy(dict(settings)), rows)
        numbers = numbers_of(alone.param_groups[0], alone.state.get(own, {}), self._group)
        self._alone = at, Records(own.data, rows_of(alone.state.get(own, {})), at), numbers, has_drawn(drawn)

    def fault(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> str:
        """After the step: what it has shown that a table's rule must not do, or ""."""
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
        trained = Records(parameter.data[at], {name: own[at] for name, own in rows.items()}, at)
        is_same = alone.has_bits_of(trained) and numbers == numbers_of(self._group, state, self._group)
        return "" if is_same else MIXES
