"""Adds the gradients of the ranks of a script, in the order of `trainer/models/ordered.py`: `rowcast.sum_gradients`.

Each rank keeps and trains the rows of all ranks' batch. Of adopted tables, in the order of their names, ids and
gradients travel, and no rows: ranks that begin with the same rows end with the same rows.
"""

from collections.abc import Iterable, Mapping
from os import environ
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.adopted_table import AdoptedTable, spread
from rowcast.trainer.adopt.ranks import OPEN, GroupRanks, Summing, ranks_of
from rowcast.trainer.adopt.row_gradient import as_plain
from rowcast.trainer.adopt.rows import BLOCK_ROWS, NO_ROWS
from rowcast.trainer.adopt.table_parameter import TableParameter
from rowcast.trainer.models.exchanges import SumMemory
from rowcast.trainer.models.ordered import PartVector, sum_in_order
from rowcast.trainer.run.launch import read_launch

NO_VALUES = torch.empty(0, dtype=torch.float32, device="cpu")
_sums = WeakKeyDictionary[nn.Module, "DenseSum"]()
_begun = WeakSet[nn.Module]()  # whose tables have been compared


def sum_gradients(model: nn.Module) -> None:
    """Makes each weight's gradient the mean over ranks: call it on all ranks between `backward()` and the optimizer's
    step, instead of DistributedDataParallel. On one rank it does nothing. Adopted tables are among the weights.

    Gradients are multiplied by 1 / ranks and added in one tree; collectives only copy. Waits for the device. Raises
    ConfigError for a gradient that is not float32, if other weights have one than in the first step, if ranks have
    begun with other weights, and before the script has made a process group or connect's loader has yielded a batch."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    dense = {name: weight for name, weight in trained.items() if not isinstance(weight, TableParameter)}
    if OPEN:
        add_dense(model, dense, OPEN[-1])
    elif not (dist.is_available() and dist.is_initialized()):
        if read_launch(environ).world_size > 1:
            raise ConfigError(
                "sum_gradients has no process group to add over; call torch.distributed.init_process_group() first, or "
                "sum_gradients within the loop over connect's loader"
            )
    elif trained and dist.get_world_size() > 1:
        assert dist.group.WORLD is not None, "it is initialised"
        ranks = ranks_of(dist.group.WORLD, next(iter(trained.values())).device)
        ranks.begin_step(dense.values())
        add_dense(model, dense, ranks)
        tables = TableSum([own.table for own in trained.values() if isinstance(own, TableParameter)], ranks)
        if model not in _begun:
            _begun.add(model)
            tables.begin_alike(sends=False)
        tables.add_up()


def add_dense(model: nn.Module, trained: Mapping[str, nn.Parameter], ranks: Summing) -> None:
    if model not in _sums or _sums[model].names != [*trained]:  # others are frozen now
        _sums[model] = DenseSum(trained, ranks)
    _sums[model].add(ranks)


class DenseSum:
    def __init__(self, weights: Mapping[str, nn.Parameter], ranks: Summing) -> None:
        self._weights, self.names = weights, [*weights]
        count, device = ranks.rank.count, ranks.streams.device
        self._vector = PartVector(self._weights, 1, count, device)
        self._gradients = self._vector.own[: sum(weight.numel() for weight in self._weights.values())]
        self._memory = SumMemory.of(self._vector.own, count)
        self._no_loss = torch.zeros(1, dtype=torch.float32, device=device)

    def add(self, ranks: Summing) -> None:
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
        self.tables, self.ranks = sorted(set(tables), key=lambda table: table.name), ranks

    @torch.no_grad()
    def begin_alike(self, *, sends: bool) -> None:
        """`sends`: the first values of rank 0 count; otherwise others are refused. Raises ConfigError."""
        names = "; ".join(f"{table.name} {[*table.shape]}" for table in self.tables)
        first, *others = map(bytes.decode, self.ranks.gather(names.encode()))
        for rank, theirs in enumerate(others, 1):
            if theirs != first:
                raise ConfigError(
                    f"rank 0 adopts {first} and rank {rank} {theirs}; give rowcast.adopt one model and capacity on all"
                )
        for table in self.tables:
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
        own = [table.own_gradient() for table in self.tables]
        sizes = [(-1, 0) if each is None else (len(each[0]), each[2]) for each in own]
        told = torch.tensor(sizes, device=ranks.device)
        of_ranks = ranks.collectives.gather(told, f"sizes of {what}").cpu()  # [ranks, tables, 2]
        rows = of_ranks[:, :, 0].clamp(min=0)
        ids_of = ranks.pieces([NO_ROWS, *(each[0] for each in own if each)], rows.tolist(), what)
        values = [NO_VALUES, *(each[1].reshape(-1) for each in own if each)]
        dims = torch.tensor([table.dim for table in self.tables], device="cpu")
        values_of = ranks.pieces(values, (rows * dims).tolist(), what)
        for at, table in enumerate(self.tables):
            most, is_sparse = of_ranks[:, at].amax(0).tolist()
            if most >= 0:
                given = [(ids[at], own[at].view(-1, table.dim)) for ids, own in zip(ids_of, values_of, strict=True)]
                union = torch.unique(torch.cat([ids for ids, _ in given]))
                total = sum_in_order(torch.stack([spread(union, *each) for each in given]).mul_(1 / ranks.rank.count))
                table.set_sum(union.to(table.home.device), total.to(table.home.device), is_sparse=bool(is_sparse))
