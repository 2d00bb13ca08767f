"""Adds the gradients of the ranks of a script, in the order of `trainer/models/exchanges.py`: `rowcast.sum_gradients`,
or DistributedDataParallel around a model with adopted tables.

Each rank keeps and trains the rows of all ranks' batch. Of adopted tables, in the order of their names, ids and
gradients travel, and no rows: ranks that begin with the same rows end with the same rows.
"""

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from os import environ
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.adopted_table import AdoptedTable
from rowcast.trainer.adopt.ranks import GroupRanks, rank_and_count, ranks_of
from rowcast.trainer.adopt.records import BLOCK_ROWS, NO_ROWS, positions
from rowcast.trainer.adopt.row_gradient import as_plain
from rowcast.trainer.adopt.table_parameter import TableParameter
from rowcast.trainer.adopt.whole_table import WholeView
from rowcast.trainer.models.exchanges import PartVector, SumMemory, sum_in_order
from rowcast.trainer.run.launch import read_launch

NO_VALUES = torch.empty(0, dtype=torch.float32, device="cpu")
_sums = WeakKeyDictionary[nn.Module, "DenseSum"]()
_begun = WeakSet[nn.Module]()  # whose tables have been compared


def sum_gradients(model: nn.Module) -> None:
    """Makes each weight's gradient the mean over ranks: call it on all ranks between `backward()` and the optimizer's
    step, instead of DistributedDataParallel. On one rank it does nothing. Adopted tables are among the weights.

    Gradients are multiplied by 1 / ranks and added in one tree; collectives only copy. Waits for the device. Raises
    ConfigError for a gradient that is not float32, if other weights have one than in the first step, if ranks have
    begun with other weights, and before the script has made a process group."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    dense = {name: weight for name, weight in trained.items() if not isinstance(weight, TableParameter)}
    if not (dist.is_available() and dist.is_initialized()):
        if read_launch(environ).world_size > 1:
            raise ConfigError(
                "sum_gradients has no process group to add over; call torch.distributed.init_process_group() first"
            )
    elif trained and rank_and_count()[1] > 1:
        assert dist.group.WORLD is not None, "it is initialised"
        ranks = ranks_of(dist.group.WORLD, next(iter(trained.values())).device)
        ranks.begin_step(dense.values())
        add_dense(model, dense, ranks)
        tables = TableSum([weight.table for weight in trained.values() if isinstance(weight, TableParameter)], ranks)
        if model not in _begun:
            _begun.add(model)
            tables.begin_alike(sends=False)
        tables.add_up()


def add_dense(model: nn.Module, trained: Mapping[str, nn.Parameter], ranks: GroupRanks) -> None:
    if model not in _sums or _sums[model].names != [*trained]:  # others are frozen now
        _sums[model] = DenseSum(trained, ranks)
    _sums[model].add(ranks)


class DenseSum:
    def __init__(self, weights: Mapping[str, nn.Parameter], ranks: GroupRanks) -> None:
        self._weights, self.names = weights, [*weights]
        count, device = ranks.rank.count, ranks.streams.device
        self._vector = PartVector(self._weights, 1, count, device)
        self._gradients = self._vector.own[: sum(weight.numel() for weight in self._weights.values())]
        self._memory = SumMemory.of(self._vector.own, count)
        self._no_loss = torch.zeros(1, dtype=torch.float32, device=device)

    def add(self, ranks: GroupRanks) -> None:
        for name, weight in self._weights.items():
            if weight.grad is not None and (weight.grad.dtype != torch.float32 or weight.grad.is_sparse):
                kind = "sparse" if weight.grad.is_sparse else str(weight.grad.dtype).removeprefix("torch.")
                raise ConfigError(f"sum_gradients: the gradient of {name} is {kind}; dense float32 ones are added")
        self._vector.take(0, self._no_loss)
        self._gradients.mul_(1 / ranks.rank.count)
        self._vector.add_up()
        ranks.exchanges.name(f"the dense gradients of train step {ranks.train_steps}")
        ranks.exchanges.sum(ranks.streams, self._memory)
        self._vector.give(self._memory.total)
        self._vector.read(self._vector.told(self._memory.total), ranks.train_steps)


class TableSum:
    """Adds up adopted tables. Call its methods on all ranks."""

    def __init__(self, tables: Iterable[AdoptedTable], ranks: GroupRanks) -> None:
        self.tables, self.ranks = sorted(set(tables), key=lambda table: (table.dim, table.name)), ranks
        firsts = [at for at, table in enumerate(self.tables) if not at or table.dim != self.tables[at - 1].dim]
        ends = [*firsts[1:], len(self.tables)]
        self.widths = [Width(self.tables[at:end], at) for at, end in zip(firsts, ends, strict=False)]
        ranks.coming.tables.update(table.name for table in self.tables)

    @torch.no_grad()
    def begin_alike(self, *, sends: bool) -> None:
        """`sends`: rank 0 sends its first values; otherwise ranks with other values are refused. Raises ConfigError."""
        names = "; ".join(f"{table.name} {[*table.shape]} {table.home.origin}".rstrip() for table in self.tables)
        first, *others = map(bytes.decode, self.ranks.gather(names.encode()))
        for rank, theirs in enumerate(others, 1):
            if theirs != first:
                raise ConfigError(
                    f"rank 0 adopts {first} and rank {rank} {theirs}; give rowcast.adopt one model, capacity and files "
                    "on all"
                )
        for table in (each for each in self.tables if not each.home.is_on_demand):
            checksum = xxhash.xxh3_64()
            blocks = torch.split(torch.arange(table.num_rows, device=table.home.device), BLOCK_ROWS)
            for ids in blocks:
                checksum.update(table.home.read(ids).weights.cpu().numpy().tobytes())
            sums = self.ranks.gather(checksum.digest())
            differs = [rank for rank, each in enumerate(sums) if each != sums[0]]
            if differs and not sends:
                raise ConfigError(
                    f"rank {differs[0]} begins with other values of the adopted table {table.name} than rank 0; make "
                    "the model from one seed on all ranks (torch.manual_seed)"
                )
            whole = table.whole() if differs else table.parameter
            for ids in blocks if differs else ():
                block = table.home.read(ids).weights.to(self.ranks.device)
                block = self.ranks.collectives.gather(block, f"first values of {table.name}")[0]
                with as_plain():
                    whole[int(ids[0]) : int(ids[-1]) + 1].copy_(block)

    @torch.no_grad()
    def add_up(self) -> None:
        """Makes the gradient of each table the mean over ranks."""
        if not self.tables:
            return
        what, ranks = f"the table gradients of train step {self.ranks.train_steps}", self.ranks
        gradients = [table.own_gradient() for table in self.tables]
        pairs = [width.joined(gradients[width.span], ranks.device) for width in self.widths]
        facts = [(-1, 0) if each is None else (0, each[2]) for each in gradients]
        rows = [(len(ids), 0) for ids, _ in pairs]
        told = torch.tensor([*facts, *rows, (ranks.coming.num_begun, 0)], device=ranks.device)
        dims = torch.tensor([width.dim for width in self.widths], device="cpu")

        def nbytes(of_ranks: Tensor) -> Tensor:
            sizes = of_ranks.view(-1, *told.shape)[:, len(gradients) : -1, 0]  # [ranks, widths]
            return torch.cat([8 * sizes, 4 * sizes * dims], 1)

        given = [each.reshape(-1).view(torch.uint8) for kind in zip(*pairs, strict=True) for each in kind]
        of_ranks, pieces = ranks.exchange(told.view(-1), given, nbytes, what)
        of_ranks = of_ranks.view(-1, *told.shape)
        ranks.coming.compare(of_ranks[:, -1, 0].tolist())
        for at, width in enumerate(self.widths):
            most = of_ranks[:, width.span].amax(0).tolist()
            width.set_sums([(each[at], each[at + len(self.widths)]) for each in pieces], most)


class Width:
    """Tables of one number of columns, whose rows are numbered one table after the other."""

    def __init__(self, tables: Sequence[AdoptedTable], first: int) -> None:
        """`first`: the place of the first one among all."""
        self.tables, self.dim, self.span = tables, tables[0].dim, slice(first, first + len(tables))
        self._bases = [0, *accumulate(table.num_rows for table in tables)]

    def joined(
        self, given: Iterable[tuple[Tensor, Tensor, bool] | None], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Returns ids, i64 [n], and gradients, f32 [n, D]. `given`: of each table, as by `own_gradient`."""
        based = [(base, *each) for base, each in zip(self._bases, given, strict=False) if each is not None]
        ids = torch.cat([NO_ROWS.to(device), *((base + ids).to(device) for base, ids, _, _ in based)])
        gradients = torch.cat([NO_VALUES.to(device).view(0, self.dim), *(each.to(device) for _, _, each, _ in based)])
        if any(is_sparse for *_, is_sparse in based):
            return ids, gradients
        looked_up = gradients.view(torch.int32).any(1).nonzero().view(-1)  # rows of other ranks alone have +0.0
        return ids[looked_up], gradients[looked_up]

    def set_sums(self, given: Sequence[tuple[Tensor, Tensor]], facts: Sequence[tuple[int, int]]) -> None:
        """`given`: the bytes of ids and gradients of each rank. `facts`: of each table -1 if no rank has a gradient,
        and whether it is sparse."""
        ids_of, device = [ids.view(torch.int64) for ids, _ in given], given[0][0].device
        # a dense gradient has zeros in rows of the step that nobody has looked up
        shown = [
            (base + table.ids).to(device)
            for base, table, (_, is_sparse) in zip(self._bases, self.tables, facts, strict=False)
            if not is_sparse
        ]
        union = torch.cat([NO_ROWS.to(device), *shown])
        places = [positions(union, ids) for ids in ids_of]
        if not all(bool(known.all()) for _, known in places):
            union = torch.unique(torch.cat([union, *ids_of]))
            places = [positions(union, ids) for ids in ids_of]
        of_ranks = torch.zeros(len(given), len(union), self.dim, device=device)
        for of_rank, (at, _), (_, values) in zip(of_ranks, places, given, strict=True):
            of_rank.index_copy_(0, at, values.view(torch.float32).view(-1, self.dim))
        total = sum_in_order(of_ranks.mul_(1 / len(given)))
        spans = pairwise(torch.searchsorted(union, torch.tensor(self._bases, device=device)).tolist())
        for table, base, (first, end), (has, is_sparse) in zip(self.tables, self._bases, spans, facts, strict=False):
            if has >= 0:
                ids = (union[first:end] - base).to(table.home.device)
                table.set_sum(ids, total[first:end].to(table.home.device), is_sparse=bool(is_sparse))


class DataParallelSum:
    """The tables that one DistributedDataParallel leaves out: they are summed next to it.

    DistributedDataParallel(model)   made after `adopt`: its reducer gets no table; rank 0's first values count
    forward                          decides, as for DDP, whether the next backward pass is synchronised
    backward's end                   of a synchronised one: the gradients of all ranks, also from those that have
                                     looked nothing up; clipping and the optimizer see the mean
    """

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
        for node in self._nodes:  # before DDP waits for its ranks, so that this names a missing rank
            node.register_prehook(lambda grads: (call := arrives()) and call())

    def _begin(self, net: nn.Module, args: Any) -> None:
        assert isinstance(net, DistributedDataParallel), "it was registered there"
        if torch.is_grad_enabled():
            self._is_awaited = net.require_backward_grad_sync

    def arrives(self) -> None:
        """Called when a gradient is about to come: a synchronised pass exchanges all at its end."""
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
        tables = {name: weight.table for name, weight in named if isinstance(weight, TableParameter)}
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
    """Makes a method of a process group refuse an adopted table, where its writes would be lost."""

    @functools.wraps(plain)
    def exchange(group: Any, *args: Any, **kwargs: Any) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, TableParameter | WholeView):
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
    if table.is_summed or (count := rank_and_count()[1]) == 1:
        return
    raise ConfigError(
        f"the gradient of the adopted table {table.name} is of this rank alone, and there are {count}; "
        "use DistributedDataParallel, or rowcast.sum_gradients(model) after backward(): FSDP, DeepSpeed, a step within "
        f"no_sync() and an optimizer in backward leave tables out; or leave it on the device by keep=[{table.name!r}]"
    )


EXCHANGES = re.compile(r"_?(all_?)?(gather|reduce|to_?all|broadcast|scatter|send|recv)")
for method in [name for name in dir(dist.ProcessGroup) if EXCHANGES.match(name)]:
    setattr(dist.ProcessGroup, method, without_tables(getattr(dist.ProcessGroup, method)))
DistributedDataParallel.__init__ = leaving_tables_out(DistributedDataParallel.__init__)  # type: ignore[method-assign]
