"""The script's own optimizer trains the rows of adopted tables.

While an optimizer steps, a table's parameter is a plain `nn.Parameter` with the rows that have a gradient, ascending by
id, and the optimizer's state has theirs: it trains a small table, and knows of no other.

A dense rule also moves rows without a gradient. They catch up when they are next read (`catch_up.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import print_line
from rowcast.trainer.adopt.adopted_table import AdoptedTable, as_plain
from rowcast.trainer.adopt.catch_up import catch_up
from rowcast.trainer.adopt.optimizer_trial import first_states, moves_without_gradient
from rowcast.trainer.adopt.rows import Records
from rowcast.trainer.adopt.step_log import StepLog, has_rows
from rowcast.trainer.adopt.table_parameter import TableParameter


class TrainedTable:
    """A table under the optimizer that steps it. Another optimizer, or another state of it, begins anew."""

    def __init__(self, table: AdoptedTable, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Raises ConfigError if rows cannot be trained apart from each other."""
        grad = table.parameter.grad
        assert grad is not None, "a table is tried at its first step"
        self.table, self.optimizer = table, optimizer
        self.log = StepLog(type(optimizer))
        first = first_states(table.name, type(optimizer), group, is_sparse=grad.is_sparse)
        if not grad.is_sparse and moves_without_gradient(type(optimizer), group):
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


_followed: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()  # optimizers of tables: their last hook
_awaited: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()  # whether the closure of this step is to be called


def tables_of(optimizer: Optimizer) -> Iterator[tuple[AdoptedTable, Mapping[str, Any]]]:
    """The adopted tables among an optimizer's parameters, each with its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            table = getattr(parameter, "table", None)
            if isinstance(table, AdoptedTable):
                yield table, group


def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Puts `before_update` behind the optimizer's other hooks, which may give the step another closure."""
    if not any(tables_of(optimizer)):
        return
    if optimizer in _followed:
        _followed[optimizer].remove()
    else:
        optimizer.register_state_dict_post_hook(put_whole_states)
    _followed[optimizer] = optimizer.register_step_pre_hook(before_update)


def before_update(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:
    """Makes the rows ready: at once, or after the closure has made the gradients."""
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
        if table.parameter.grad is None or is_ready(table, optimizer):
            continue
        own: TrainedTable | None = table.trained
        if own is None or not own.is_of(optimizer):
            own = table.trained = TrainedTable(table, optimizer, group)
        table.parameter.__class__ = nn.Parameter
        own.before_step(group)


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


def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _awaited.get(optimizer):
        refuse_closure(optimizer, "in no step")
    for table, _ in tables_of(optimizer):
        if not isinstance(table.parameter, TableParameter):
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


@cache
def say_once(rule: str, *, decays: bool) -> None:
    how = "step by step, for its decay moves weights at each" if decays else "when they are next needed"
    twin = "; SparseAdam, of nn.Embedding(sparse=True), moves those alone and is another rule" if rule == "Adam" else ""
    print_line(f"{rule} moves all rows at each step: those that no batch looks up catch up {how}{twin}")
