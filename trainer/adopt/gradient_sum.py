"""Adds the gradients of the ranks of a script, in the order of `trainer/models/ordered.py`: `rowcast.sum_gradients`.

Each rank keeps and trains the rows of all ranks' batch. Of adopted tables, in the order of their names, ids and
gradients travel, and no rows: ranks that begin with the same rows end with the same rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from os import environ
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.adopted_table import AdoptedTable
from rowcast.trainer.adopt.first_rows import BLOCK_ROWS
from rowcast.trainer.adopt.ranks import GroupRanks, ranks_of
from rowcast.trainer.adopt.row_gradient import as_plain
from rowcast.trainer.adopt.rows import NO_ROWS, positions
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
    begun with other weights, and before the script has made a process group."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    dense = {name: weight for name, weight in trained.items() if not isinstance(weight, TableParameter)}
    if not (dist.is_available() and dist.is_initialized()):
        if read_launch(environ).world_size > 1:
            raise ConfigError(
                "sum_gradients has no process group to add over; call torch.distributed.init_process_group() first"
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
        """`sends`: the first values of rank 0 count; otherwise others are refused. Raises ConfigError."""
        names = "; ".join(f"{table.name} {[*table.shape]} {table.home.rule or ''}".rstrip() for table in self.tables)
        first, *others = map(bytes.decode, self.ranks.gather(names.encode()))
        for rank, theirs in enumerate(others, 1):
            if theirs != first:
                raise ConfigError(
                    f"rank 0 adopts {first} and rank {rank} {theirs}; give rowcast.adopt one model and capacity on all"
                )
        for table in (each for each in self.tables if each.home.rule is None):
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
        pairs = [width.joined(own[width.span], ranks.device) for width in self.widths]
        facts = [(-1, 0) if each is None else (0, each[2]) for each in own]
        rows = [(len(ids), 0) for ids, _ in pairs]
        told = torch.tensor([*facts, *rows, (ranks.coming.num_begun, 0)], device=ranks.device)
        of_ranks = ranks.collectives.gather(told, f"sizes of {what}").cpu()
        ranks.coming.compare(of_ranks[:, -1, 0].tolist())
        sizes = of_ranks[:, len(own) : -1, 0]  # [ranks, widths]
        nbytes = torch.cat([8 * sizes, 4 * sizes * torch.tensor([own.dim for own in self.widths], device="cpu")], 1)
        given = [each.reshape(-1).view(torch.uint8) for kind in zip(*pairs, strict=True) for each in kind]
        pieces = ranks.pieces(given, nbytes.tolist(), what)
        for at, width in enumerate(self.widths):
            most = of_ranks[:, width.span].amax(0).tolist()
            width.set_sums([(each[at], each[at + len(self.widths)]) for each in pieces], most)


class Width:
    """Tables with as many columns, whose rows are numbered one table after the other."""

    def __init__(self, tables: Sequence[AdoptedTable], first: int) -> None:
        """`first`: the place of the first one among all."""
        self.tables, self.dim, self.span = tables, tables[0].dim, slice(first, first + len(tables))
        self._bases = [0, *accumulate(table.num_rows for table in tables)]

    def joined(self, own: Iterable[tuple[Tensor, Tensor, bool] | None], device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns ids, i64 [n], and gradients, f32 [n, D]. `own`: of each table, as `own_gradient` returns them."""
        based = [(base, *each) for base, each in zip(self._bases, own, strict=False) if each is not None]
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
        for own, (at, _), (_, values) in zip(of_ranks, places, given, strict=True):
            own.index_copy_(0, at, values.view(torch.float32).view(-1, self.dim))
        total = sum_in_order(of_ranks.mul_(1 / len(given)))
        spans = pairwise(torch.searchsorted(union, torch.tensor(self._bases, device=device)).tolist())
        for table, base, (first, end), (has, is_sparse) in zip(self.tables, self._bases, spans, facts, strict=False):
            if has >= 0:
                ids = (union[first:end] - base).to(table.home.device)
                table.set_sum(ids, total[first:end].to(table.home.device), is_sparse=bool(is_sparse))
