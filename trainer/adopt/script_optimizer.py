"""The script's own optimizer trains the rows of adopted tables.

While an optimizer steps, a table's parameter is a plain `nn.Parameter` with the rows that have a gradient, ascending by
id, and the optimizer's state has theirs: it trains a small table, and knows of no other.

A dense rule also moves rows without a gradient. They catch up when they are next read (`catch_up.py`).
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import print_line
from rowcast.trainer.adopt.adopted_table import AdoptedTable
from rowcast.trainer.adopt.catch_up import SpotCheck, TriedRule, refuse_kind, remedy, settings_of, try_rule
from rowcast.trainer.adopt.gradient_sum import refuse_alone
from rowcast.trainer.adopt.missed_steps import StepLog, rows_of
from rowcast.trainer.adopt.records import Records
from rowcast.trainer.adopt.table_parameter import TableParameter, TableState, placeholder, state_door


class TrainedTable:
    """A table with the optimizer that steps it. Another optimizer, or another state, needs a new one."""

    def __init__(self, table: AdoptedTable, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Raises ConfigError if rows cannot be trained apart from each other."""
        grad = table.grad
        assert grad is not None, "a table is tried at its first step"
        self.table, self.optimizer = table, optimizer
        self.log = StepLog(type(optimizer))
        rule, device = TriedRule(type(optimizer), settings_of(optimizer, group), grad.is_sparse), table.parameter.device
        kept = try_rule(rule, table.name, table.dim, device)
        self._spot = SpotCheck(rule.kind, kept, device)
        if kept.moves:
            say_once(type(optimizer).__name__, decays=bool(group.get("weight_decay")))
        loaded = {name: one_value(state) for name, state in rows_of(self._state).items() if state.shape == table.shape}
        fields = {name: getattr(state, "field", None) for name, state in loaded.items()}
        if table.home.is_restored and fields == {name: table.home.whole(name) for name in kept.first}:
            table.home.go_on(kept.first, self.log)
        else:
            table.home.begin_states({**kept.first, **loaded}, self.log)
        table.read_again()
        self._doors: dict[str, TableState] = {}
        self._left = rows_of(self._state)  # as the last step left them

    @property
    def _state(self) -> dict[str, Any]:
        """What the optimizer keeps of the table."""
        state: dict[str, Any] = self.optimizer.state.get(self.table.parameter, {})
        return state

    def is_of(self, optimizer: Optimizer) -> bool:
        """Returns False if the script has made another optimizer, or has loaded or reset its state."""
        return optimizer is self.optimizer and all(self._state.get(name) is state for name, state in self._left.items())

    def before_step(self, group: dict[str, Any]) -> None:
        table, parameter = self.table, self.table.parameter
        table.see_changes()
        self.ids, gradient = table.step_gradient()
        table.need(self.ids)
        parameter.__class__ = nn.Parameter
        parameter.data = table.of_step(table.step_rows.weights, self.ids)
        parameter.grad = gradient
        for name in rows_of(self._state):
            self._state[name] = table.of_step(table.step_rows.states[name], self.ids)
        settings = settings_of(self.optimizer, group)
        if not gradient.is_sparse:
            self.log.append(settings, self._state)
        self._spot.before_step(parameter, group, settings, self._state)

    def after_step(self) -> None:
        table, parameter = self.table, self.table.parameter
        states = rows_of(self._state)
        lasts = torch.full((len(self.ids),), self.log.steps, device=parameter.device)
        rows = Records(parameter.data, states, lasts)
        fault = self._spot.fault(parameter, self._state)
        parameter.grad = None
        parameter.data = placeholder(table.shape, parameter.dtype, parameter.device)
        parameter.__class__ = TableParameter
        if fault:
            raise ConfigError(
                f"{type(self.optimizer).__name__} {fault}: at step {self._spot.steps} of {table.name}, so steps before "
                f"may already have other bits than without adopt; {remedy(table.name)}"
            )
        table.home.write(self.ids, rows)
        for name in states:
            if name not in self._doors:
                self._doors[name] = state_door(table, name)
            self._left[name] = self._state[name] = self._doors[name]
        table.is_stepped = True
        table.begin_step()


_followed: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, ...]] = WeakKeyDictionary()  # optimizers of tables
_awaited: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()  # whether this step's closure is still to be called


def one_value(state: Tensor) -> Tensor | float:
    """Reduces an expanded state to its one value, such as that of a large table before its first step."""
    return state if isinstance(state, TableState) or any(state.stride()) else state[0, 0].item()


def tables_of(optimizer: Optimizer) -> Iterator[tuple[AdoptedTable, dict[str, Any]]]:
    """The adopted tables among an optimizer's parameters, each with its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            table = getattr(parameter, "table", None)
            if isinstance(table, AdoptedTable):
                yield table, group


def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Places the update after the script's pre-step hooks and before its post-step hooks, so that both see whole
    tables."""
    is_wrapper = "_optimizer_state_dict_post_hooks" not in vars(optimizer)  # its optimizer steps the tables
    if is_wrapper or not any(tables_of(optimizer)):
        return
    if optimizer not in _followed:
        for table, group in tables_of(optimizer):
            if table.parameter.requires_grad:
                refuse_kind(type(optimizer), group, table.name)
    for handle in _followed.get(optimizer, ()):
        handle.remove()
    before, after = optimizer.register_step_pre_hook(before_update), optimizer.register_step_post_hook(after_update)
    cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks).move_to_end(after.id, last=False)
    _followed[optimizer] = before, after


def before_update(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:
    """Prepares the rows, at once or after the closure has computed the gradients."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": ready_after(kwargs["closure"], optimizer)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], ready_after(args[1], optimizer), *args[2:]), kwargs
    make_ready(optimizer)
    return None


def ready_after(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    _awaited[optimizer] = True

    def closed() -> Any:
        if not _awaited.get(optimizer):
            refuse_closure(optimizer, "more than once a step, and its update has begun after the first call")
        loss = closure()
        _awaited[optimizer] = False
        make_ready(optimizer)
        return loss

    return closed


def refuse_closure(optimizer: Optimizer, called: str) -> NoReturn:
    name = next(tables_of(optimizer))[0].name
    raise ConfigError(
        f"{type(optimizer).__name__} calls its closure {called}, so it cannot train the rows of {name}; "
        f"give {name} an optimizer that calls it once, or leave it on the device by keep=[{name!r}]"
    )


def make_ready(optimizer: Optimizer) -> None:
    for table, group in tables_of(optimizer):
        if table.grad is None or is_ready(table, optimizer):
            continue
        refuse_alone(table)
        if os.getpid() != table.pid:
            raise ConfigError(
                f"process {os.getpid()} was forked from {table.pid}, which adopted {table.name}, and its steps would "
                f"not reach the rows there; train in one process, or share the table's memory by keep=[{table.name!r}]"
            )
        if table.trained is None or not table.trained.is_of(optimizer):
            table.trained = None  # with the doors to its states, unless the script has them
            table.trained = TrainedTable(table, optimizer, group)
        table.trained.before_step(group)


def is_ready(table: AdoptedTable, optimizer: Optimizer) -> bool:
    """Whether a step of the optimizer, around this one of its base class, has made the rows ready."""
    if isinstance(table.parameter, TableParameter):
        return False
    if table.trained.optimizer is not optimizer:
        raise ConfigError(
            f"{type(optimizer).__name__} steps {table.name} within a step of {type(table.trained.optimizer).__name__}, "
            f"and rowcast follows one optimizer at a time; leave the table on the device by keep=[{table.name!r}]"
        )
    return True


def after_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _awaited.get(optimizer):
        refuse_closure(optimizer, "in no step")
    for table, _ in tables_of(optimizer):
        if not isinstance(table.parameter, TableParameter):
            with torch.no_grad():
                table.trained.after_step()


register_optimizer_step_pre_hook(before_step)


@cache
def say_once(rule: str, *, decays: bool) -> None:
    how = "step by step, for its decay moves weights at each" if decays else "when they are next needed"
    twin = "; SparseAdam, of nn.Embedding(sparse=True), moves those alone and is another rule" if rule == "Adam" else ""
    print_line(f"{rule} moves all rows at each step: those that no batch looks up catch up {how}{twin}")
