"""Adopts a script's model: tables that do not fit on the device become doors to rows that rowcast keeps.

    adopt          chooses tables, and makes the parameter of each the door to its rows
    ahead          batches that are read ahead; those of a DataLoader are by themselves, while a table is adopted
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
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from rowcast.runtime.errors import ConfigError, listed, nearest
from rowcast.runtime.telemetry.logs import print_line
from rowcast.trainer.adopt import script_optimizer  # noqa: F401 - it follows the script's optimizers from here on
from rowcast.trainer.adopt.adopted_table import AdoptedTable
from rowcast.trainer.adopt.adoption import ALL, STATES, Adoption, Capacity, store_of
from rowcast.trainer.adopt.data_parallel import refuse_earlier, refuse_wrappers
from rowcast.trainer.adopt.given_ids import LookedUp, given_by
from rowcast.trainer.adopt.mapped_tables import RuledTable
from rowcast.trainer.adopt.random_states import NO_LOOP, Loop, Loops, refuse_begun
from rowcast.trainer.adopt.read_ahead import ReadAhead, no_ids
from rowcast.trainer.adopt.rows import Home
from rowcast.trainer.adopt.table_parameter import TableParameter, become, refuse_compilation, refuse_whole

DEPTH = 16  # batches that are read ahead
KINDS: tuple[Any, ...] = (nn.Embedding, nn.EmbeddingBag)

Model = TypeVar("Model", bound=nn.Module)


def adopt(
    model: Model,
    capacity: str | int,
    tables: Collection[str] = (),
    keep: Collection[str] = (),
    memory: str | int = ALL,
) -> Model:
    """Adopts the weights of nn.Embedding and nn.EmbeddingBag that do not fit on the device. Returns the model.

    capacity: memory of the device for tables: "8GiB", or "20000 rows" of all tables together. tables: names of other
    parameters [V, D] that are tables, as `named_parameters` has them. keep: names of tables that stay ordinary; they
    count for nothing. memory: of the host for the prefetcher, such as "4GiB"; trained rows that it cannot hold are kept
    in files of `runs/<script>.*`. A table that is adopted already stays so.

    On several ranks call it before DistributedDataParallel(model), or use `rowcast.sum_gradients(model)`.

    Raises ConfigError for names that the model lacks, a table that is not float32, and a model within
    DistributedDataParallel, FSDP or DeepSpeed."""
    room, store = Capacity.of(capacity), store_of(memory)
    found = tables_of(model, tables, keep)
    _parameters.update(model.named_parameters(remove_duplicate=False))
    chosen = those_that_do_not_fit(found, room)
    for name in chosen:
        refuse_wrappers(model, name)
        refuse_other_kinds(name, found[name])
    if chosen:
        of_process = doors(room, room.left_by(own for name, own in found.items() if name not in chosen), store)
        for name in chosen:
            of_process.add(name, found[name])
        for module in model.modules():
            if isinstance(module, KINDS):
                module.has_adopted_table = isinstance(module._parameters.get("weight"), TableParameter)
    say_what_was_adopted(found, chosen, room)
    return model


def tables_of(model: nn.Module, tables: Collection[str], keep: Collection[str]) -> dict[str, nn.Parameter]:
    """The tables that may be adopted, by name; one that modules share has the name of the first."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    refuse_unknown("tables", tables, [name for name, own in parameters.items() if own.dim() == 2])
    of_modules = {id(own._parameters.get("weight")) for own in model.modules() if isinstance(own, KINDS)}
    found = {name: own for name, own in parameters.items() if id(own) in of_modules or name in tables}
    refuse_unknown("keep", keep, found)
    for name in keep:
        if isinstance(found[name], RuledTable):
            raise ConfigError(
                f"adopt(keep=[{name!r}]): a rule makes its {len(found[name]):,} rows when they are needed, so it "
                "cannot be on the device as a whole; leave it out of keep"
            )
    left = {id(found[name]) for name in keep}
    names = {id(own): name for name, own in reversed(found.items())}
    return {
        name: found[name]
        for name in reversed(names.values())
        if id(found[name]) not in left and not isinstance(found[name], TableParameter)
    }


def refuse_unknown(argument: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"adopt({argument}=[{name!r}]): the model has no such table{nearest(name, known)}; name some of "
                f"{listed(list(known)) or 'none'}"
            )


def those_that_do_not_fit(found: Mapping[str, nn.Parameter], room: Capacity) -> list[str]:
    """The names of the tables to adopt, in the model's order."""
    costs = {name: math.inf if isinstance(own, RuledTable) else room.cost(own) for name, own in found.items()}
    if sum(costs.values()) <= room.most:
        return []
    taken = 0.0
    ordinary = set()
    for name in sorted(costs, key=costs.__getitem__):
        taken += costs[name]
        if taken <= room.most // 2:
            ordinary.add(name)
    return [name for name in found if name not in ordinary]


def refuse_other_kinds(name: str, table: nn.Parameter) -> None:
    if table.dtype != torch.float32:
        raise ConfigError(
            f"table {name} is {table.dtype}, and rowcast keeps rows of torch.float32; make it float32, or leave it on "
            f"the device by keep=[{name!r}]"
        )


def say_what_was_adopted(found: Mapping[str, nn.Parameter], chosen: list[str], room: Capacity) -> None:
    ordinary = [name for name in found if name not in chosen]
    if not chosen:
        if found:
            print_line(f"all {len(found)} tables fit into {room.text}, none is adopted: {listed(ordinary)}")
        return
    rows = {name: found[name].table.num_rows for name in chosen}  # type: ignore[attr-defined]
    dims = {name: found[name].table.dim for name in chosen}  # type: ignore[attr-defined]
    left = room.left_by(found[name] for name in ordinary).most
    if not room.counts_rows:
        row_bytes = 4 * (1 + STATES) * sum(rows[name] * dims[name] for name in chosen) / sum(rows.values())
        left = int(left / row_bytes)
    own = [f"{name} ({rows[name]:,} rows of {dims[name]})" for name in chosen]
    print_line(
        f"adopted {listed(own)}: about {min(left, sum(rows.values())):,} of {sum(rows.values()):,} rows stay on the "
        f"device; ordinary: {listed(ordinary) or 'none'}"
    )


# what a process has adopted


@dataclass(frozen=True)
class Run:
    """What this process knows of a run that it has saved or gone on from."""

    run_id: str
    checksum: str  # of the newest manifest; "" before the first save


class Doors:
    """The adopted tables of this process, which share one engine."""

    def __init__(self, room: Capacity, left: Capacity, store: Mapping[str, Any]) -> None:
        """left: by the tables that stay ordinary."""
        self.room, self.store = room, store
        self.engine = Adoption(left, store)
        self.reading = ReadAhead(DEPTH, self.engine)
        self.reading.open()
        self.tables: dict[str, weakref.finalize[Any, AdoptedTable]] = {}
        self.gone: list[Home] = []
        self.loops = Loops()
        self.runs: dict[Path, Run] = {}  # by the folder of their saves; that of the last save is the last
        atexit.register(self.report)

    def report(self) -> None:
        """Says how the run went, when it is over: at the end of a process without an error, or once the script has
        dropped all tables."""
        atexit.unregister(self.report)
        if self.engine.num_starts and not self.engine.is_forked and not hasattr(sys, "last_value"):
            print_line(f"{self.reading.counts.sentence()}; {self.engine.sentence()}")

    def add(self, name: str, parameter: nn.Parameter) -> None:
        while name in self.tables:
            name += "'"
        is_ruled = isinstance(parameter, RuledTable)
        home = self.engine.home(name, parameter if is_ruled else parameter.detach().cpu())
        table, key = AdoptedTable(name, parameter, home), LookedUp(name, len(parameter))
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
        """Whether the script still has a table: models are cycles, and their graphs hold tables."""
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
    return any(own.tables for own in _doors)


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
        batches = loops.begin(batches, skip) if is_iterator else Loop(loops, batches, skip, plain)
    return batches if reading is None else reading.ahead(batches, given_by(ids, _parameters))


def ahead_calls(function: Callable[[], Any], *, ids: Callable[[Any], Any] = no_ids) -> Callable[[], Any]:
    """The same function, called ahead: `sampler.next = rowcast.ahead_calls(sampler.next)`, after `adopt`."""
    return _doors[0].reading.ahead_calls(function, given_by(ids, _parameters)) if adopts() else function


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
for kind in KINDS:
    kind.has_adopted_table = False
    kind.extra_repr = shown(kind.extra_repr)
    kind.forward = uncompiled(kind.forward)
