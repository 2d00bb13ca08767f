"""Tables larger than memory: an nn.Embedding whose weight is mapped from a file, or made by a rule.

Without a rule the script's own code gives the first values, which the kernel writes to the file. `adopt` reads rows
from it and never changes it. A rule gives those of a job's table with the same `init`: they are written to the file
too, or, above `records.MOST_WHOLE` rows, made when a row is first needed."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rowcast.job.embedding_tables import LARGEST, init_reach
from rowcast.protocol.first_values import rows_by
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.first_values import FirstValues, RowRule
from rowcast.trainer.adopt.records import BLOCK_ROWS, is_large, made_here, mapped
from rowcast.trainer.adopt.row_gradient import as_plain, attribute_of, words
from rowcast.trainer.adopt.table_parameter import is_of_parameter, operation, placeholder

MAKERS = frozenset(kind.__init__.__code__ for kind in (nn.Embedding, nn.EmbeddingBag))
DRAWS = words("normal_ uniform_")
MOST_SEED, MOST_ROWS = 2**63 - 1, 2**48


@contextmanager
def tables(folder: str | Path, *, init: str = "", seed: int = 0) -> Iterator[None]:
    """`with rowcast.tables(folder): model = Model()`: the weights of nn.Embedding and nn.EmbeddingBag that are made
    within are float32 in new files of the folder, one for each; all other code runs as it is.

    init: their first values by a rule, as in job files: "normal:0.02", "uniform", "uniform:-0.1,0.1", "constant:0".
    Then no code within initialises a whole one of these weights, or draws random numbers for it; a row of `padding_idx`
    is zeros. Those of more than 16,777,216 rows are in no file: their rows are made when they are first needed, once
    `rowcast.adopt` has the model. seed: of the rule.

    Raises ConfigError if a file is there already, unless it has the rule's values, if the disk lacks the space, or if
    there is no such rule."""
    check_rule(init, seed)
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    with MappedWeights(path, init, seed):
        yield


def check_rule(init: str, seed: int) -> None:
    if not 0 <= seed <= MOST_SEED or (seed and not init):
        raise ConfigError(
            f"rowcast.tables(init={init!r}, seed={seed}): a seed is a whole number from 0 to {MOST_SEED}, and one of a "
            "rule; give both, or neither"
        )
    try:
        reach = init_reach(init, 1) if init else 0.0
    except ValueError as error:
        raise ConfigError(f"rowcast.tables: {error}") from None
    if reach > LARGEST["fp32"]:
        raise ConfigError(f"rowcast.tables: init = {init!r} reaches {reach:.6g}, which is no float32; choose less")


class MappedWeights(TorchFunctionMode):
    """Gives each weight of a table a file or a rule, where its module asks `torch.empty` for it."""

    def __init__(self, folder: Path, init: str, seed: int) -> None:
        super().__init__()
        self.folder, self.num_tables = folder, 0
        self._init, self._seed = init, seed
        self._by_rule: dict[int, torch.Size] = {}  # shapes, by their memory's address

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, caller = kwargs or {}, sys._getframe(1)
        if func is torch.empty and caller.f_code in MAKERS:
            return self._table(caller.f_locals["self"], args[0], func(0, **kwargs))
        first = args[0] if args else kwargs.get("tensor")
        if initialises(func, caller.f_globals.get("__name__", "")) and self._is_by_rule(first):
            return first
        return func(*args, **kwargs)

    def _table(self, module: Any, shape: tuple[int, int], like: Tensor) -> Tensor:
        """`like`: without rows."""
        num_rows, dim = shape
        name = f"table{self.num_tables}"
        path = self.folder / f"{name}.{num_rows}x{dim}.f32"
        self.num_tables += 1
        if like.dtype != torch.float32 or like.device.type != "cpu":
            raise ConfigError(
                f"{path}: the table is made as {like.dtype} on {like.device}, and a file holds torch.float32 of the "
                "host; make the model on the host, and move it once it is adopted"
            )
        if not self._init:
            return new_table(path, num_rows, dim)
        if num_rows > MOST_ROWS:
            raise ConfigError(f"{path}: a table has up to {MOST_ROWS:,} rows, not {num_rows:,}")
        zero_row = -1 if module.padding_idx is None else module.padding_idx
        rule = RowRule(init=self._init, seed=self._seed, table=name, num_rows=num_rows, width=dim, zero_row=zero_row)
        weights = (
            TableOnDemand.of(FirstValues(width=dim, rule=rule), num_rows)
            if is_large(num_rows)
            else written_out(rule, path)
        )
        self._by_rule[address(weights)] = weights.shape
        return weights

    def _is_by_rule(self, first: Any) -> bool:
        return isinstance(first, Tensor) and self._by_rule.get(address(first)) == first.shape


def new_table(path: Path, num_rows: int, dim: int) -> Tensor:
    if path.exists():
        raise ConfigError(
            f"{path} is there already, and rowcast.tables overwrites no file: it may hold the first values of a model "
            "that still trains, or of a rowcast.save; name another folder, or init='constant:0' before rowcast.restore"
        )
    made_here.add(str(path))
    return mapped(path, (num_rows, dim), torch.float32)


def written_out(rule: RowRule, path: Path) -> Tensor:
    """Writes the rule's rows to a file. Takes a file that has them already, as when a script is started again."""
    blocks = [slice(at, min(at + BLOCK_ROWS, rule.num_rows)) for at in range(0, rule.num_rows, BLOCK_ROWS)]
    rows = (torch.from_numpy(rows_by(rule, np.arange(block.start, block.stop))) for block in blocks)
    size = rule.num_rows * rule.width
    if path.is_file() and path.stat().st_size == 4 * size:
        weights = torch.from_file(str(path), shared=True, size=size, device="cpu").view(rule.num_rows, rule.width)
        pairs = zip(blocks, rows, strict=True)
        if all(torch.equal(weights[block].view(torch.int32), first.view(torch.int32)) for block, first in pairs):
            made_here.add(str(path))
            return weights
    weights = new_table(path, rule.num_rows, rule.width)
    for block, first in zip(blocks, rows, strict=True):
        weights[block] = first
    return weights


def initialises(func: Callable[..., Any], caller: str) -> bool:
    """Whether a function gives a tensor first values. `caller`: the name of the module that calls it."""
    of_torch = "torch.nn.init" in (getattr(func, "__module__", ""), caller)
    return operation(func) in DRAWS or (of_torch and operation(func).endswith("_") and not is_of_parameter(func))


def address(tensor: Tensor) -> int:
    with as_plain():
        return tensor.untyped_storage().data_ptr()


class TableOnDemand(nn.Parameter):
    """A weight that is not adopted yet, and whose rows are made or read when they are needed: it has a shape and no
    values."""

    first: FirstValues

    @classmethod
    def of(cls, first: FirstValues, num_rows: int, device: str | torch.device = "cpu") -> "TableOnDemand":
        values: Any = placeholder((num_rows, first.width), torch.float32, torch.device(device))
        table = cast(TableOnDemand, values.as_subclass(cls))
        table.first = first
        return table

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, attribute = operation(func), attribute_of(func)
        if is_of_parameter(func) or attribute == "grad":
            with as_plain():
                return func(*args, **(kwargs or {}))
        table = next(leaf for leaf in [*args, *(kwargs or {}).values()] if isinstance(leaf, TableOnDemand))
        if name == "detach" or (attribute, name) == ("data", "__get__"):
            with as_plain():
                values: Any = func(table).as_subclass(cls)
            values.first = table.first
            return values
        rule = table.first.rule
        if name == "__repr__" and rule is not None:  # of the module, which prints all that it has
            return f"a table of {len(table):,} rows by the rule {rule.init}"
        if name == "__getitem__" and rule is not None and isinstance(args[1], int) and args[1] == rule.zero_row:
            return torch.zeros(rule.width, device="cpu")  # the padding's row is filled already
        raise ConfigError(
            f"{attribute or name} of a table of {len(table):,} rows, which a rule makes once rowcast.adopt has the "
            "model: call rowcast.adopt(model, ...) first, and give it first values by rowcast.tables(init=...) alone"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone()  # is refused


def come_on_demand(parameter: nn.Parameter, first: FirstValues, device: torch.device) -> None:
    """Makes a parameter of a model a table whose rows are read when they are needed. `device`: of one that is on
    `meta`."""
    if parameter.is_meta:  # torch refuses other values there
        table = TableOnDemand.of(first, len(parameter), device)
        torch.utils.swap_tensors(parameter, table.requires_grad_(parameter.requires_grad))  # type: ignore[no-untyped-call]
    else:
        parameter.data = placeholder(parameter.shape, parameter.dtype, parameter.device)
        parameter.__class__ = TableOnDemand
        cast(TableOnDemand, parameter).first = first
