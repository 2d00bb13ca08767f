"""The script's own optimizer trains the rows of adopted tables.

While an optimizer steps, a table's parameter is a plain `nn.Parameter` with the rows that have a gradient, ascending by
id, and the optimizer's state has theirs: it trains a small table, and knows of no other.

A dense rule also moves rows without a gradient. They catch up when they are next read (`catch_up.py`).
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import print_line
from rowcast.trainer.adopt.adopted_table import AdoptedTable, as_plain
from rowcast.trainer.adopt.catch_up import catch_up, made_anew, step_without_hooks
from rowcast.trainer.adopt.rows import Records
from rowcast.trainer.adopt.step_log import StepLog, has_rows
from rowcast.trainer.adopt.table_parameter import TableParameter

TRIED_ROWS, TRIED_DIM, TRIED_STEPS = 3, 4, 2  # of a table that shows what an optimizer keeps of a row


class TrainedTable:
    """A table under the optimizer that steps it. Another optimizer, or another state of it, begins anew."""

    def __init__(self, table: AdoptedTable, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Raises ConfigError if rows cannot be trained apart from each other."""
        self.table, self.optimizer = table, optimizer
        self.log = StepLog(type(optimizer))
        first = first_states(table, type(optimizer), group)
        if moves_without_gradient(table, type(optimizer), group):
            say_once(type(optimizer).__name__, decays=bool(group.get("weight_decay")))
        loaded = {name: own for name, own in self._rows_of_state() if own.shape == table.shape}
        table.home.begin_states({**first, **loaded}, table.catch_up)
        table.catch_up = self._catch_up
        table.read_again()
        self._left = dict(self._rows_of_state())  # as the last step left them

    @property
    def _state(self) -> dict[str, Any]:
        """What the optimizer keeps of the table."""
        state: dict[str, Any] = self.optimizer.state.get(self.table.parameter, {})
        return state

    def _rows_of_state(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, own) for name, own in self._state.items() if has_rows(own))

    def is_of(self, optimizer: Optimizer) -> bool:
        """False: the script has made another one, or has loaded or reset its state."""
        return optimizer is self.optimizer and all(self._state.get(name) is own for name, own in self._left.items())

    def _catch_up(self, rows: Records) -> None:
        if self.log.steps:
            self.table.home.steps_replayed += catch_up(rows, self.log)

    def before_step(self, group: Mapping[str, Any]) -> None:
        table, parameter = self.table, self.table.parameter
        table.see_changes()
        parameter.data = table.of_step(table.step_rows.weights)
        for name, _ in [*self._rows_of_state()]:
            self._state[name] = table.of_step(table.step_rows.states[name])
        assert parameter.grad is not None, "before_step is for a table with a gradient"
        if not parameter.grad.is_sparse:
            self.log.append(group, self._state)

    def after_step(self) -> None:
        table, parameter = self.table, self.table.parameter
        self._left = dict(self._rows_of_state())
        lasts = torch.full((len(table.trained_ids),), self.log.steps, device=parameter.device)
        table.home.write(table.trained_ids, Records(parameter.data, dict(self._left), lasts))
        table.is_stepped = True
        table.begin_step()

    def whole_state(self) -> dict[str, Any]:
        whole = self.table.whole()
        return {**self._state, **{name: whole.states[name].clone() for name, _ in self._rows_of_state()}}


_followed: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()  # optimizers whose state_dict() has whole tables


def tables_of(optimizer: Optimizer) -> Iterator[tuple[AdoptedTable, Mapping[str, Any]]]:
    """The adopted tables with a gradient among an optimizer's parameters, each with its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            table = getattr(parameter, "table", None)
            if isinstance(table, AdoptedTable) and parameter.grad is not None:
                yield table, group


def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for table, group in tables_of(optimizer):
        own: TrainedTable | None = table.trained
        if own is None or not own.is_of(optimizer):
            own = table.trained = TrainedTable(table, optimizer, group)
        if optimizer not in _followed:
            optimizer.register_state_dict_post_hook(put_whole_states)
            _followed[optimizer] = None
        table.parameter.__class__ = nn.Parameter
        own.before_step(group)


def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for table, _ in tables_of(optimizer):
        table.parameter.__class__ = TableParameter
        with as_plain():
            table.trained.after_step()


def put_whole_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    parameters = [own for group in optimizer.param_groups for own in group["params"]]
    for number, parameter in enumerate(parameters):
        own: TrainedTable | None = parameter.table.trained if isinstance(parameter, TableParameter) else None
        if own is not None and number in state_dict["state"] and own.is_of(optimizer):
            state_dict["state"][number] = own.whole_state()


register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)


def first_states(table: AdoptedTable, rule: type[Optimizer], group: Mapping[str, Any]) -> dict[str, float]:
    """The value of each state of a row before the optimizer's first step. Steps a small table, and each row alone.

    Raises ConfigError if a state has not a row for each row, or if a row's step depends on other rows."""
    grad = table.parameter.grad
    assert grad is not None, "a table is tried at its first step"
    keep = f"give {table.name} an optimizer that does, or leave it on the device by keep=[{table.name!r}]"
    if group.get("fused"):
        raise ConfigError(
            f"{rule.__name__}(fused=True) rounds the last values of an array differently, so rows apart would not have "
            f"the bits of the table {table.name}; leave fused out, or leave the table on the device by "
            f"keep=[{table.name!r}]"
        )
    weights = torch.linspace(-1, 1, TRIED_ROWS * TRIED_DIM, device="cpu").reshape(TRIED_ROWS, TRIED_DIM)
    try:
        first, whole, states = tried(rule, group, weights, is_sparse=grad.is_sparse)
        alone = torch.cat([tried(rule, group, row[None], is_sparse=grad.is_sparse)[1] for row in weights])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{rule.__name__} cannot train the rows of a table ({error}); {keep}") from None
    for name, own in states.items():
        if own.is_sparse or own.shape != weights.shape:
            kept = "a sparse tensor" if own.is_sparse else f"{list(own.shape)}"
            raise ConfigError(
                f"{rule.__name__} keeps {name} of {kept} for a table of {list(weights.shape)}, and rowcast moves state "
                f"that has a row for each row; {keep}"
            )
    if not torch.equal(whole, alone):
        raise ConfigError(
            f"{rule.__name__} does not train each row for itself: a step of one row depends on others; {keep}"
        )
    return {name: first.get(name, 0.0) for name in states}


def moves_without_gradient(table: AdoptedTable, rule: type[Optimizer], group: Mapping[str, Any]) -> bool:
    """Whether a step with a gradient of zero changes a row that has had another one."""
    if table.parameter.grad is not None and table.parameter.grad.is_sparse:
        return False
    parameter = nn.Parameter(torch.ones(1, TRIED_DIM, device="cpu"))
    optimizer = made_anew(rule, group, parameter)
    rows: list[list[Tensor]] = []
    for gradient in (1.0, 0.0):
        parameter.grad = torch.full((1, TRIED_DIM), gradient, device="cpu")
        step_without_hooks(optimizer)
        states = (own.clone() for own in optimizer.state[parameter].values() if has_rows(own))
        rows.append([parameter.detach().clone(), *states])
    return any(not torch.equal(before, after) for before, after in zip(*rows, strict=True))


@cache
def say_once(rule: str, *, decays: bool) -> None:
    how = "step by step, for its decay moves weights at each" if decays else "when they are next needed"
    twin = "; SparseAdam, of nn.Embedding(sparse=True), moves those alone and is another rule" if rule == "Adam" else ""
    print_line(f"{rule} moves all rows at each step: those that no batch looks up catch up {how}{twin}")


def tried(
    rule: type[Optimizer], group: Mapping[str, Any], weights: Tensor, *, is_sparse: bool
) -> tuple[dict[str, float], Tensor, dict[str, Tensor]]:
    """Steps a parameter with these weights. Returns the first value of states that are there from the beginning, the
    weights after the steps, and states."""
    parameter = nn.Parameter(weights.clone())
    optimizer = made_anew(rule, group, parameter)
    first = {name: float(own.flatten()[0]) for name, own in optimizer.state[parameter].items() if has_rows(own)}
    for _ in range(TRIED_STEPS):
        parameter.grad = (weights * 0.5).to_sparse(1) if is_sparse else weights * 0.5
        step_without_hooks(optimizer)
    states = {name: own for name, own in optimizer.state[parameter].items() if has_rows(own)}
    return first, parameter.detach(), states
