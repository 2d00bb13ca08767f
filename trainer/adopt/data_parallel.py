"""DistributedDataParallel around a model with adopted tables: it leaves them out, and they are added up beside it.

DistributedDataParallel(model)   made after `adopt`: its reducer gets no table; rank 0's first values count
forward                          decides, as for DDP, whether the next backward pass is synchronised
backward's end                   of a synchronised one: the gradients of all ranks, also from those that have looked
                                 nothing up; clipping and the optimizer see the mean
"""

import functools
import re
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.adopted_table import AdoptedTable
from rowcast.trainer.adopt.gradient_sum import TableSum
from rowcast.trainer.adopt.ranks import ranks_of
from rowcast.trainer.adopt.table_parameter import TableParameter
from rowcast.trainer.adopt.whole_table import TableView


class DataParallelSum:
    """The tables of one DistributedDataParallel."""

    def __init__(self, net: DistributedDataParallel, tables: list[AdoptedTable], *, sends: bool) -> None:
        self._sum = TableSum(tables, ranks_of(net.process_group, next(net.module.parameters()).device))
        if sends:
            self._sum.begin_alike(sends=True)
        self._is_awaited = False
        net.register_forward_pre_hook(self._begin)
        for table in tables:
            table.arrives = self.arrives
        _followed.update(tables)
        arrives = weakref.WeakMethod(self.arrives)  # nodes are not seen by Python's collector of cycles
        self._weights = [weight for weight in net._module_parameters if weight.requires_grad]
        self._nodes = [get_gradient_edge(weight).node for weight in self._weights]
        for node in self._nodes:  # before DDP waits for its ranks: a rank that is missing gets its name from here
            node.register_prehook(lambda grads: (call := arrives()) and call())

    def _begin(self, net: nn.Module, args: Any) -> None:
        assert isinstance(net, DistributedDataParallel), "it was registered there"
        if torch.is_grad_enabled():
            self._is_awaited = net.require_backward_grad_sync

    def arrives(self) -> None:
        """A gradient is about to come: in a synchronised pass all are exchanged at its end."""
        if self._is_awaited:
            self._is_awaited = False
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        for table in self._sum.tables:
            table.end_backward()
        self._sum.ranks.begin_step(self._weights)
        self._sum.add_up()


def leaving_tables_out(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def __init__(net: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        named = module.named_parameters(remove_duplicate=False)
        tables = {name: own.table for name, own in named if isinstance(own, TableParameter)}
        if tables:
            ignored = [*getattr(module, "_ddp_params_and_buffers_to_ignore", ())]
            ignored += [form for name in tables for form in (name, f".{name}")]  # DDP's for one of the module itself
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
        plain(net, module, *args, **kwargs)
        if tables:
            net.join = functools.partial(refuse_join, next(iter(tables)))  # type: ignore[method-assign]
            init_sync = kwargs.get("init_sync", args[4] if len(args) > 4 else True)
            DataParallelSum(net, [*tables.values()], sends=init_sync)

    return __init__


def refuse_join(table: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigError(
        f"join() of DistributedDataParallel goes on with fewer ranks, and the adopted table {table} needs gradients of "
        "all; give each rank as many batches, as DistributedSampler does"
    )


def without_tables(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a process group that refuses an adopted table: what it writes there would not be seen."""

    @functools.wraps(plain)
    def exchange(group: Any, *args: Any, **kwargs: Any) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, TableParameter | TableView):
                keeper = leaf.table if isinstance(leaf, TableParameter) else leaf.field.keeper
                raise ConfigError(
                    f"{plain.__name__} of torch.distributed would change {keeper.name if keeper else 'it'}, an adopted "
                    "table, unseen; give it a copy, own = weight.detach().clone(), then write weight.data.copy_(own)"
                )
        return plain(group, *args, **kwargs)

    return exchange


_followed = weakref.WeakSet[AdoptedTable]()


def refuse_earlier(table: AdoptedTable) -> None:
    """Call it at each look-up. Raises ConfigError within a DistributedDataParallel that has the table's gradient."""
    net = DistributedDataParallel._active_ddp_module
    if net is not None and table not in _followed:
        refuse_wrappers(net, table.name)


def refuse_wrappers(model: nn.Module, table: str) -> None:
    """Raises ConfigError for a model within a wrapper that adds up its gradients, or cuts its parameters."""
    for kind in [kind for module in model.modules() for kind in type(module).__mro__]:
        if kind.__module__.startswith(("torch.nn.parallel.distributed", "torch.distributed.fsdp", "deepspeed.")):
            raise ConfigError(
                f"{kind.__name__} was made before the table {table} was adopted, and has a gradient of all its rows; "
                "write model = rowcast.adopt(model, ...) first, then net = DistributedDataParallel(model)"
            )


def refuse_alone(table: AdoptedTable) -> None:
    """Raises ConfigError if the gradient of a table is of this rank alone, and there are others."""
    if table.is_summed or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    raise ConfigError(
        f"the gradient of the adopted table {table.name} is of this rank alone, and there are {dist.get_world_size()}; "
        "use DistributedDataParallel, or rowcast.sum_gradients(model) after backward(): FSDP, DeepSpeed, a step within "
        f"no_sync() and an optimizer in backward leave tables out; or leave it on the device by keep=[{table.name!r}]"
    )


EXCHANGES = re.compile(r"_?(all_?)?(gather|reduce|to_?all|broadcast|scatter|send|recv)")
for method in [name for name in dir(dist.ProcessGroup) if EXCHANGES.match(name)]:
    setattr(dist.ProcessGroup, method, without_tables(getattr(dist.ProcessGroup, method)))
DistributedDataParallel.__init__ = leaving_tables_out(DistributedDataParallel.__init__)  # type: ignore[method-assign]
