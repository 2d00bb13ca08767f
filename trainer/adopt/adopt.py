"""Adopts a script's model: tables that do not fit on the device become doors to rows that rowcast keeps.

    adopt          chooses tables, and makes the parameter of each the door to its rows
    ahead          reads batches ahead; a DataLoader's are read ahead anyway while a table is adopted
    ahead_calls    the same for a function that returns a batch

A table costs the device its weights and `STATES` states of each of its rows, whatever the optimizer will keep. If all
tables fit into the capacity, none is adopted. Otherwise the smallest stay ordinary, one after another, while together
they take no more than half of it, and the others share the rest.
"""

import atexit
import functools
import gc
import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from rowcast.protocol.released_rows import find_released
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError, listed, nearest
from rowcast.runtime.telemetry.logs import print_line
from rowcast.trainer.adopt import script_optimizer  # noqa: F401 - it follows the script's optimizers from here on
from rowcast.trainer.adopt.adopted_table import AdoptedTable
from rowcast.trainer.adopt.adoption import ALL, STATES, Adoption, Capacity, store_of
from rowcast.trainer.adopt.gradient_sum import refuse_earlier, refuse_wrappers
from rowcast.trainer.adopt.id_program import TableKey
from rowcast.trainer.adopt.mapped_tables import TableOnDemand, come_on_demand
from rowcast.trainer.adopt.random_states import NO_LOOP, Loops, refuse_begun
from rowcast.trainer.adopt.read_ahead import GiveIds, ReadAhead, no_ids
from rowcast.trainer.adopt.records import distinct_rows
from rowcast.trainer.adopt.rows import Home
from rowcast.trainer.adopt.table_parameter import TableParameter, become, refuse_compilation, refuse_whole

DEPTH = 16  # batches that are read ahead
FUNCTION = "the function of rowcast.ahead(..., ids=...)"
KINDS: tuple[Any, ...] = (nn.Embedding, nn.EmbeddingBag)

Model = TypeVar("Model", bound=nn.Module)


def adopt(
    model: Model,
    capacity: str | int,
    tables: Collection[str] = (),
    keep: Collection[str] = (),
    memory: str | int = ALL,
    files: Mapping[str, str | Path] = MappingProxyType({}),
) -> Model:
    """Adopts the weights of nn.Embedding and nn.EmbeddingBag that do not fit on the device. Returns the model.

    capacity: memory of the device for tables: "8GiB", or "20000 rows" of all tables together. tables: names of other
    parameters [V, D] that are tables, as `named_parameters` has them. keep: names of tables that stay ordinary,
    outside the capacity. memory: of the host for the prefetcher, such as "4GiB"; trained rows beyond it are kept
    in files of `runs/<script>.*`. files: folders of safetensors files, by the names of tables that begin with the rows
    there: float32, bfloat16 or float16, as one tensor of the parameter's name or in pieces NAME.shard_0, NAME.shard_1,
    ... A row is read when it is first looked up; the parameter itself may be on the device `meta`. Such a table is
    always adopted. A table that is adopted already stays so.

    On several ranks call it before DistributedDataParallel(model), or use `rowcast.sum_gradients(model)`.

    Raises ConfigError for names that the model does not have, a table that is not float32, files without its rows, and
    a model within DistributedDataParallel, FSDP or DeepSpeed."""
    room, store = Capacity.of(capacity), store_of(memory)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    refuse_unknown("files", files, [name for name, weight in parameters.items() if weight.dim() == 2])
    candidates = tables_of(model, [*tables, *files], keep)
    begin_in_files(parameters, files, keep)
    _parameters.update(parameters)
    chosen = those_that_do_not_fit(candidates, room)
    for name in chosen:
        refuse_wrappers(model, name)
        refuse_other_kinds(name, candidates[name])
    if chosen:
        of_process = doors(room, room.left_by(table for name, table in candidates.items() if name not in chosen), store)
        for name in chosen:
            of_process.add(name, candidates[name])
        for module in model.modules():
            if isinstance(module, KINDS):
                module.has_adopted_table = isinstance(module._parameters.get("weight"), TableParameter)
    say_what_was_adopted(candidates, chosen, room)
    return model


def tables_of(model: nn.Module, tables: Collection[str], keep: Collection[str]) -> dict[str, nn.Parameter]:
    """The tables that may be adopted, by name; one that modules share has the name of the first."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    refuse_unknown("tables", tables, [name for name, weight in parameters.items() if weight.dim() == 2])
    of_modules = {id(module._parameters.get("weight")) for module in model.modules() if isinstance(module, KINDS)}
    weights = {name: weight for name, weight in parameters.items() if id(weight) in of_modules or name in tables}
    refuse_unknown("keep", keep, weights)
    for name in keep:
        if isinstance(weights[name], TableOnDemand):
            raise ConfigError(
                f"adopt(keep=[{name!r}]): a rule makes its {len(weights[name]):,} rows when they are needed, so it "
                "cannot be on the device as a whole; leave it out of keep"
            )
    left = {id(weights[name]) for name in keep}
    names = {id(table): name for name, table in reversed(weights.items())}
    return {
        name: weights[name]
        for name in reversed(names.values())
        if id(weights[name]) not in left and not isinstance(weights[name], TableParameter)
    }


def begin_in_files(
    parameters: Mapping[str, nn.Parameter], files: Mapping[str, str | Path], keep: Collection[str]
) -> None:
    """Makes tables that are not adopted yet begin with rows of released files. Checks all before it changes one."""
    given = {name: parameters[name] for name in files if not isinstance(parameters[name], TableParameter)}
    places = {}
    for name, parameter in given.items():
        if name in keep:
            raise ConfigError(f"adopt(keep=[{name!r}], files=...): rows of files are never on the device as a whole")
        refuse_other_kinds(name, parameter)
        places[name] = find_released(files[name], name, *parameter.shape)
    devices = {parameter.device for parameter in parameters.values() if not parameter.is_meta}
    for name, first in places.items():
        come_on_demand(given[name], first, min(devices, key=str, default=torch.device("cpu")))


def refuse_unknown(argument: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"adopt({argument}=[{name!r}]): the model has no such table{nearest(name, known)}; name some of "
                f"{listed(list(known)) or 'none'}"
            )


def those_that_do_not_fit(weights: Mapping[str, nn.Parameter], room: Capacity) -> list[str]:
    """The names of the tables to adopt, in the model's order."""
    costs = {
        name: math.inf if isinstance(table, TableOnDemand) else room.cost(table) for name, table in weights.items()
    }
    if sum(costs.values()) <= room.most:
        return []
    taken = 0.0
    ordinary = set()
    for name in sorted(costs, key=costs.__getitem__):
        taken += costs[name]
        if taken <= room.most // 2:
            ordinary.add(name)
    return [name for name in weights if name not in ordinary]


def refuse_other_kinds(name: str, table: nn.Parameter) -> None:
    if table.dtype != torch.float32:
        raise ConfigError(
            f"table {name} is {table.dtype}, and rowcast keeps rows of torch.float32; make it float32, or leave it on "
            f"the device by keep=[{name!r}]"
        )


def say_what_was_adopted(weights: Mapping[str, nn.Parameter], chosen: list[str], room: Capacity) -> None:
    ordinary = [name for name in weights if name not in chosen]
    if not chosen:
        if weights:
            print_line(f"all {len(weights)} tables fit into {room.text}, none is adopted: {listed(ordinary)}")
        return
    rows = {name: weights[name].table.num_rows for name in chosen}  # type: ignore[attr-defined]
    dims = {name: weights[name].table.dim for name in chosen}  # type: ignore[attr-defined]
    left = room.left_by(weights[name] for name in ordinary).most
    if not room.counts_rows:
        row_bytes = 4 * (1 + STATES) * sum(rows[name] * dims[name] for name in chosen) / sum(rows.values())
        left = int(left / row_bytes)
    described = [f"{name} ({rows[name]:,} rows of {dims[name]})" for name in chosen]
    print_line(
        f"adopted {listed(described)}: about {min(left, sum(rows.values())):,} of {sum(rows.values()):,} rows stay on "
        f"the device; ordinary: {listed(ordinary) or 'none'}"
    )


# what a process has adopted


@dataclass(frozen=True)
class SavedRun:
    """What this process knows of a run that it has saved or restored."""

    run_id: str
    checksum: str  # of the newest manifest; "" before the first save


class Doors:
    """The adopted tables of this process, which share one engine."""

    def __init__(self, room: Capacity, left: Capacity, store: Mapping[str, Any]) -> None:
        """left: bytes that the ordinary tables leave."""
        self.room, self.store = room, store
        self.engine = Adoption(left, store)
        self.reading = ReadAhead(DEPTH, self.engine)
        self.reading.open()
        self.tables: dict[str, weakref.finalize[Any, AdoptedTable]] = {}
        self.gone: list[Home] = []
        self.loops = Loops()
        self.runs: dict[Path, SavedRun] = {}  # by the folder of their saves; that of the last save is the last
        atexit.register(self.report)

    def report(self) -> None:
        """Prints how the run went once it is over: at the end of a process without an error, or when the script has
        dropped all tables."""
        atexit.unregister(self.report)
        if self.engine.num_starts and not self.engine.is_forked and not hasattr(sys, "last_value"):
            print_line(f"{self.reading.counts.sentence()}; {self.engine.sentence()}")

    def add(self, name: str, parameter: nn.Parameter) -> None:
        while name in self.tables:
            name += "'"
        has_values = not isinstance(parameter, TableOnDemand)
        home = self.engine.home(name, parameter.detach().cpu() if has_values else parameter)
        table, key = AdoptedTable(name, parameter, home), TableKey(name, len(parameter))
        become(parameter, table)

        def note(ids: Tensor) -> None:
            refuse_earlier(table)
            self.settle()
            self.engine.look_up(home.device)
            self.reading.note(key, ids)

        table.note = note
        self.tables[name] = weakref.finalize(table, self.let_go, name, home)
        self.tables[name].atexit = False

    def let_go(self, name: str, home: Home) -> None:
        """The script has dropped a table. Python calls this from any thread, at any time."""
        del self.tables[name]
        self.gone.append(home)
        if not self.tables:
            self.reading.shut()

    def settle(self) -> None:
        """Ends what dropped tables have left."""
        while self.gone:
            self.engine.forget(self.gone.pop())

    def is_alive(self) -> bool:
        """Whether the script still has a table. Models are reference cycles, and their graphs hold tables."""
        with self.reading.paused():
            self.reading.settle_departed()
        for _ in range(2):
            gc.collect()
        self.settle()
        return bool(self.tables)


_doors: list[Doors] = []  # none or one
_parameters: weakref.WeakValueDictionary[str, nn.Parameter] = (
    weakref.WeakValueDictionary()
)  # those of adopted models, by name


def doors(room: Capacity, left: Capacity, store: Mapping[str, Any]) -> Doors:
    if _doors and not _doors[0].is_alive():
        dropped = _doors.pop()
        dropped.report()
        dropped.reading.close()
    if not _doors:
        _doors.append(Doors(room, left, store))
    for name, shared, given in (
        ("capacity", _doors[0].room.text, room.text),
        ("memory", _doors[0].store.get("memory", ALL), store.get("memory", ALL)),
    ):
        if shared != given:
            raise ConfigError(
                f"this process has adopted {listed(list(_doors[0].tables))} with {name}={shared!r}, and all models "
                f"share it: give this one the same instead of {given!r}, or drop the other and call gc.collect()"
            )
    return _doors[0]


def adopts() -> bool:
    return any(held.tables for held in _doors)


def adopted(action: str) -> Doors:
    """Raises ConfigError if no table is adopted. `action`: what needs one."""
    if not adopts():
        raise ConfigError(
            f"{action}: no table is adopted; call rowcast.adopt(model, ...) first, and where all tables fit on the "
            "device, use torch.save"
        )
    return _doors[0]


def ahead(batches: Iterable[Any], *, ids: Callable[[Any], Any] = no_ids, skip: int = NO_LOOP) -> Iterable[Any]:
    """The same batches, read ahead: `for batch in rowcast.ahead(batches)`, after `adopt`.

    ids: for ids that Python or NumPy computes, a function from a batch to {parameter or its name: ids of its step},
    integers of any shape or lists of them. Missing ids are fetched when the step asks for them. Random numbers that it
    draws are put back. An exception waits for its batch, also a ConfigError about what it gives.

    skip: batches that the script has had before `rowcast.save`, 0 or more. The first loop passes them over, and begins
    with the random states that the loop of the save began with."""
    reading = _doors[0].reading if adopts() else None
    if skip != NO_LOOP:
        loops, plain = (Loops(), nullcontext) if reading is None else (_doors[0].loops, reading.plain)
        refuse_begun(batches)
        is_iterator = isinstance(batches, Iterator)
        batches = loops.begin(batches, skip) if is_iterator else loops.over(batches, skip, plain)
    return batches if reading is None else reading.ahead(batches, given_by(ids, _parameters))


def ahead_calls(function: Callable[[], Any], *, ids: Callable[[Any], Any] = no_ids) -> Callable[[], Any]:
    """The same function, called ahead: `sampler.next = rowcast.ahead_calls(sampler.next)`, after `adopt`."""
    return _doors[0].reading.ahead_calls(function, given_by(ids, _parameters)) if adopts() else function


# ids that the script gives itself


def given_by(function: Callable[[Any], Any], parameters: Mapping[str, nn.Parameter]) -> GiveIds:
    """`function`: the script's. `parameters`: of its models, by name. The result raises ConfigError."""
    if function is no_ids:
        return no_ids

    def give_ids(batch: Any) -> dict[TableKey, I64]:
        [given] = (function(each) for each in (batch,))  # in a generator, a StopIteration is an error: it ends no loop
        if not isinstance(given, Mapping):
            raise ConfigError(f"{FUNCTION} returns a {type(given).__name__}; give a dict {{parameter: ids}}")
        ids: dict[TableKey, list[I64]] = {}
        for key, key_ids in given.items():
            parameter = parameters.get(key) if isinstance(key, str) else key
            if not isinstance(parameter, nn.Parameter):
                raise ConfigError(
                    f"{FUNCTION} gives ids of {str(key)!r}, which is no parameter of an adopted model"
                    f"{nearest(str(key), parameters)}; give ids of {listed(list(parameters))}"
                )
            if isinstance(parameter, TableParameter):  # the others are on the device
                table = TableKey(parameter.table.name, len(parameter))
                ids.setdefault(table, []).append(ids_of(table, key_ids))
        return {table: distinct_rows(table.num_embeddings, np.concatenate(parts)) for table, parts in ids.items()}

    return give_ids


def ids_of(table: TableKey, given: Any) -> I64:
    ids = flat(given)
    is_id = (ids >= 0) & (ids < table.num_embeddings) if ids.dtype.kind in "iu" else np.zeros(len(ids), np.bool_)
    if not is_id.all():
        raise ConfigError(
            f"{FUNCTION} gives {ids[~is_id][0]} for {table.name}; its ids are integers from 0 to "
            f"{table.num_embeddings - 1:,}, in lists, arrays or tensors"
        )
    rows: I64 = ids.astype(np.int64)
    return rows


def flat(ids: Any) -> Any:
    """Flattens a tensor, an array, numbers, or a list of these into an array [n]."""
    if isinstance(ids, list | tuple) and ids and isinstance(ids[0], list | tuple | np.ndarray | Tensor):
        return np.concatenate([flat(part) for part in ids if len(part)] or [np.empty(0, np.int64)])
    return (ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)).reshape(-1)


# of modules with a table


def shown(plain: Callable[[Any], str]) -> Callable[[Any], str]:
    def extra_repr(module: Any) -> str:
        return plain(module) + (", adopted" if isinstance(module._parameters.get("weight"), TableParameter) else "")

    return extra_repr


def uncompiled(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() and module.has_adopted_table:
            refuse(module)
        return plain(module, *args, **kwargs)

    return forward


@_disable_dynamo
def refuse(module: Any) -> None:
    """Called when the compiled function runs."""
    refuse_compilation(module.weight.table.name)


def without_tables(plain: Callable[..., None]) -> Callable[..., None]:
    """Makes a module's state_dict and load_state_dict leave out tables that are nowhere stored whole."""

    @functools.wraps(plain)
    def save_or_load(module: Any, state: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        weights = [(key, weight) for key, weight in module._parameters.items() if isinstance(weight, TableParameter)]
        left_out = {key: weight for key, weight in weights if weight.table.home.is_on_demand}
        for key, weight in left_out.items():
            if prefix + key in state:
                raise ConfigError(
                    f"load_state_dict has {prefix + key}, and the {len(weight):,} rows of the adopted table are never "
                    "here as a whole; take it out of the state, and load changed rows by rowcast.restore"
                )
            say_left_out(prefix + key)
        module._parameters.update(dict.fromkeys(left_out))  # torch passes over those that are None
        try:
            plain(module, state, prefix, *args, **kwargs)
        finally:
            module._parameters.update(left_out)

    return save_or_load


@functools.cache
def say_left_out(key: str) -> None:
    print_line(f"state_dict() leaves {key} out: rowcast.save keeps its changed rows")


def of_all_inputs(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        inputs = kwargs.get("inputs", args[5] if len(args) > 5 else None)
        for table in [inputs] if isinstance(inputs, Tensor) else inputs or ():
            if isinstance(table, TableParameter):
                refuse_whole("backward", [table], {})
        plain(*args, **kwargs)

    return backward


torch.autograd.backward = of_all_inputs(torch.autograd.backward)
module: Any = nn.Module
module._save_to_state_dict = without_tables(module._save_to_state_dict)
module._load_from_state_dict = without_tables(module._load_from_state_dict)
for kind in KINDS:
    kind.has_adopted_table = False
    kind.extra_repr = shown(kind.extra_repr)
    kind.forward = uncompiled(kind.forward)
