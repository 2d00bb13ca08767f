"""Saves an adopted script as a run, and goes on from there.

    objects        tried and packed: numbers, text and tensors; adopted tables and their states are left out
    rows           those that may have another value than in the last save: caught up, and returned to the prefetcher
    prefetcher     freezes them and writes a checkpoint as those of job runs (`prefetcher/run/script_saves.py`)

The model state of such a checkpoint, as safetensors:

    model.<name>             of the first module among the objects, under its own names
    objects.<n>.<number>     other tensors of the n-th object
    objects.structure        u8, JSON: the kinds of the objects, and the nesting around the tensors
    random.<rank>...         random states of a rank: at the beginning of the loop, and now; .structure as above
"""

import json
import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rowcast.protocol.script_setup import Columns, SaveRequest
from rowcast.runtime.checkpoint_manifest import (
    Manifest,
    SavedScript,
    SavedTable,
    checked_file,
    newest_checkpoint,
    read_manifest,
)
from rowcast.runtime.children import start_child
from rowcast.runtime.errors import ConfigError, Diverged, listed, peer_failure
from rowcast.trainer.adopt.adopt import Doors, Run, adopted
from rowcast.trainer.adopt.adopted_table import AdoptedTable
from rowcast.trainer.adopt.first_rows import BLOCK_ROWS, alike
from rowcast.trainer.adopt.random_states import States, packed, unpacked
from rowcast.trainer.adopt.ranks import ranks_of
from rowcast.trainer.adopt.rows import Home, Records
from rowcast.trainer.adopt.table_parameter import TableParameter, TableState, state_door
from rowcast.trainer.adopt.whole_table import WEIGHTS
from rowcast.trainer.models.model_state import Stateful, Tensors, flattened, pack, rebuilt, unpack

STRUCTURE = "objects.structure"
MOST_STEPS = 10**12 - 1
DOOR = "adopted"  # in a structure: [the name of a table, its field]
MOST_ROWS = 2**24  # of a table
OBJECTS_FILE, ROWS_FILE, LOG = "objects.safetensors", "rows.safetensors", "export.log"


def save(folder: str | Path, *objects: Stateful, step: int, keep: int = 2) -> None:
    """Saves an adopted script between two steps as a checkpoint of the run in `folder`, which is durable then.

    objects: the model, optimizers, schedules, averages: whatever has state_dict and load_state_dict, of numbers, text
    and tensors. step: of the script, above that of earlier saves. keep: checkpoints; older ones are removed. On several
    ranks all call it, and rank 0 writes.

    Raises ConfigError for objects that cannot be saved, gradients that no optimizer has stepped, and a folder of
    another run; RowcastError if the disk fails, and the save before stays."""
    doors = adopted("save")
    for table in tables_of(doors).values():
        table.home.refuse_whole()
        if table.grad is not None and not table.is_stepped:
            raise ConfigError(
                f"save: {table.name} has a gradient that no optimizer has stepped; save after optimizer.step(), or "
                "after zero_grad()"
            )
    if keep < 1:
        raise ConfigError(f"save(keep={keep}): the newest checkpoint always stays; give 1 or more")
    if not hasattr(step, "__index__") or not 0 <= step <= MOST_STEPS:
        raise ConfigError(f"save(step={step!r}): a step is a whole number from 0 to {MOST_STEPS:,}")
    step = int(step)
    content, adoption, (rank, num_ranks) = state_of(objects), doors.engine, rank_and_count()
    for states in gathered(pack(drawn(doors.loops.states(), rank)), adoption.homes[0].device):
        content |= unpack(states)
    if rank:
        return
    place, newest = Path(folder).resolve(), newest_of(Path(folder))
    run = run_to_save(place, newest, doors.runs.get(place), step)
    for home in adoption.homes:
        home.take_back()
    script = SavedScript(name=script_name(), tables=tuple(map(saved_table, adoption.homes)), num_ranks=num_ranks)
    for own in script.tables:
        if own.num_rows > MOST_ROWS:
            raise ConfigError(
                f"save: {own.name} has {own.num_rows:,} rows, and a first save, or decay, writes them all; tables of "
                f"more than {MOST_ROWS:,} rows cannot be saved yet: save what the script needs of them by torch.save"
            )
    is_last = newest is not None and newest.checksum == run.checksum and next(reversed(doors.runs)) == place
    goes_on = is_last and newest is not None and newest.script == script
    doors.runs[place] = run  # an interrupt may end the wait below
    engine = adoption.with_all()
    engine.begin_save()
    for home in adoption.homes:
        send_home(home, home.unsaved_rows() if goes_on else torch.arange(len(home.here.first.lasts), device="cpu"))
    (adoption.folder / OBJECTS_FILE).write_bytes(pack(content))
    request = SaveRequest(
        folder=str(place),
        run_id=run.run_id,
        step=step,
        keep=keep,
        after=run.checksum if goes_on else "",
        script=script,
        objects=str(adoption.folder / OBJECTS_FILE),
    )
    engine.save(msgspec.json.encode(request))
    note(doors, place, read_manifest(place / "checkpoints" / f"step-{step:012d}"))


def restore(folder: str | Path, *objects: Stateful) -> int:
    """Brings tables, objects and random states to the newest checkpoint of `save` in the folder. Call it after `adopt`,
    with the objects that were saved, in their order, before the first step. Returns its step; 0 if there is none.

    Raises ConfigError if the run is of a job, or has other tables or objects; DataError if it is damaged."""
    doors = adopted("restore")
    place, manifest = Path(folder).resolve(), newest_of(Path(folder))
    if manifest is None:
        return 0
    if manifest.script is None:
        raise ConfigError(f"restore: {folder} holds a run of a job; `rowcast train` continues it")
    tables, root = tables_of(doors), place / "checkpoints"
    refuse_others(manifest.script, [saved_table(own) for own in doors.engine.homes], folder)
    assert manifest.dense is not None, "a script always saves objects"
    tensors = unpack(checked_file(root, manifest.dense).read_bytes())
    structure = read_json(tensors[STRUCTURE])
    refuse_other_objects(structure, objects, folder)
    rows = exported(place, manifest, doors.engine.folder / "restored")
    for own in manifest.script.tables:
        home = tables[own.name].home
        names = {WEIGHTS: f"embedding_bags.{own.name}.weight"}
        names |= {state: f"optimizer.{own.name}.{state}" for state in own.states}
        fields = {field: rows.field(name) for field, name in names.items()}
        places = {name: place for name, (place, _) in fields.items()}
        weights, *states = (tensor for _, tensor in fields.values())
        first = Records(weights, dict(zip(own.states, states, strict=True)), alike(0, (own.num_rows,), torch.int64))
        home.restore(first, places)
        tables[own.name].trained = None
    for part, (_, state) in zip(objects, structure, strict=True):
        load(part, rebuilt(state, tensors), tables)
    states = read_json(tensors[f"random.{rank_and_count()[0]}.structure"])
    doors.loops.restore(*(unpacked(rebuilt(own, tensors)) for own in states))
    note(doors, place, manifest)
    return manifest.train_steps


def rank_and_count() -> tuple[int, int]:
    is_divided = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if is_divided else (0, 1)


def gathered(content: bytes, device: torch.device) -> list[bytes]:
    """What each rank passes to the same call. `device`: for what travels."""
    if rank_and_count()[1] == 1:
        return [content]
    assert dist.group.WORLD is not None, "it is initialised"
    return ranks_of(dist.group.WORLD, device).gather(content)


def tables_of(doors: Doors) -> dict[str, AdoptedTable]:
    found = (own.peek() for own in doors.tables.values())
    return {own[0].name: own[0] for own in found if own is not None}


def script_name() -> str:
    return Path(getattr(sys.modules.get("__main__"), "__file__", None) or "notebook").name


def newest_of(folder: Path) -> Manifest | None:
    """Raises DataError if the newest checkpoint is damaged."""
    found = newest_checkpoint(folder)
    return None if found is None else read_manifest(found)


def note(doors: Doors, place: Path, manifest: Manifest) -> None:
    doors.runs.pop(place, None)
    doors.runs[place] = Run(manifest.run_id, manifest.checksum)
    for home in doors.engine.homes:
        home.note_saved()


def run_to_save(place: Path, newest: Manifest | None, run: Run | None, step: int) -> Run:
    if newest is None:
        return run or Run(uuid.uuid4().hex[:12], "")
    if run is None or run.run_id != newest.run_id:
        of = "a job" if newest.script is None else newest.script.name
        raise ConfigError(
            f"save: {place} holds a run of {of} after step {newest.train_steps:,}, from which this process has not "
            "gone on; call rowcast.restore(folder, ...) first, or name another folder"
        )
    if step <= newest.train_steps:
        raise ConfigError(f"save(step={step}): {place} has step {newest.train_steps} already; steps ascend")
    return run


# rows


def saved_table(home: Home) -> SavedTable:
    first = home.here.first
    num_rows, dim = first.weights.shape
    return SavedTable(name=home.name, num_rows=num_rows, dim=dim, states=tuple(first.states))


def send_home(home: Home, ids: Tensor) -> None:
    """Raises Diverged if a row is not finite."""
    for own in torch.split(ids.to(home.device), BLOCK_ROWS):
        rows = home.read(own)
        for name in (WEIGHTS, *rows.states):
            bad = ~rows.field(name).isfinite().all(1)
            if bool(bad.any()):
                raise Diverged(
                    f"row {int(own[bad][0])} of {home.name} has {name} that are not finite: training diverged; go on "
                    "from the last save with a lower rate"
                )
        home.rows.write(own, rows)


def refuse_others(script: SavedScript, own: Sequence[SavedTable], folder: str | Path) -> None:
    if script.num_ranks != (count := rank_and_count()[1]):
        raise ConfigError(
            f"restore: {folder} was saved on {script.num_ranks} ranks, whose number decides the bits of a script, and "
            f"here are {count}; start it on {script.num_ranks}"
        )
    for saved, here in zip_longest(script.tables, own):
        was, now = (table and f"{table.name} [{table.num_rows:,}, {table.dim}]" for table in (saved, here))
        if was != now:
            raise ConfigError(
                f"restore: {folder} is of {script.name}, whose adopted tables are others: {was or 'none'} there, "
                f"{now or 'none'} here; adopt the same tables, or name another folder"
            )


class ExportedRows:
    """All rows of a checkpoint, mapped from one safetensors file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            nbytes = int.from_bytes(file.read(8), "little")
            self._header, self._begin = json.loads(file.read(nbytes)), 8 + nbytes

    def field(self, name: str) -> tuple[Columns, Tensor]:
        """Where it is, and f32 [V, D]. What is written there stays in memory."""
        shape, offset = self._header[name]["shape"], self._begin + self._header[name]["data_offsets"][0]
        values = np.memmap(self._path, np.float32, "c", offset, (*shape,))
        return Columns(width=shape[1], path=str(self._path), offset=offset), torch.from_numpy(values)


def exported(place: Path, manifest: Manifest, folder: Path) -> ExportedRows:
    """Raises DataError if the checkpoint is damaged, ConfigError if the disk has no room for all rows."""
    folder.mkdir(exist_ok=True)  # the tables share the file, so it stays as long as they do
    path = folder / f"{manifest.name}.{ROWS_FILE}"
    pinned = f"--checkpoint={manifest.name}@{manifest.checksum}"
    child = start_child("export", "rowcast", ["export", f"--run={place}", pinned, f"--out={path}"], folder / LOG)
    child.process.wait()
    if child.code:
        raise peer_failure(child.code, child.describe_exit())
    return ExportedRows(path)


# objects


def state_of(objects: Sequence[Stateful]) -> Tensors:
    """Raises ConfigError for an object that cannot be saved."""
    tensors: Tensors = {}
    structure = []
    model = next((own for own in objects if isinstance(own, nn.Module)), None)
    for n, part in enumerate(objects):
        kind = type(part).__name__
        if not all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict")):
            raise ConfigError(f"save: a {kind} cannot be saved without state_dict and load_state_dict; leave it out")
        state = without_doors(part.state_dict(keep_vars=True) if isinstance(part, nn.Module) else part.state_dict())
        own: Tensors = {}
        try:
            structure.append([kind, flattened(state, f"objects.{n}", own)])
        except ConfigError as error:
            raise ConfigError(f"save: {kind}: {error}") from None
        if part is model:
            names = {entry["tensor"]: f"model.{key}" for key, entry in structure[-1][1]["dict"] if "tensor" in entry}
            own = {names.get(name, name): tensor for name, tensor in own.items()}
            structure[-1][1] = renamed(structure[-1][1], names)
        tensors |= own
    return {**tensors, STRUCTURE: as_json(structure)}


def drawn(states: Sequence[States], rank: int) -> Tensors:
    tensors: Tensors = {}
    structure = [flattened(packed(own), f"random.{rank}.{n}", tensors) for n, own in enumerate(states)]
    return {**tensors, f"random.{rank}.structure": as_json(structure)}


def as_json(structure: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(structure).encode()), dtype=torch.uint8)


def read_json(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())


def renamed(structure: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    entries = [[key, {"tensor": names[own["tensor"]]} if "tensor" in own else own] for key, own in structure["dict"]]
    return {"dict": entries}


def without_doors(value: Any) -> Any:
    """A state with a mark for each adopted table and each state of one."""
    if isinstance(value, TableParameter):
        return {DOOR: [value.table.name, WEIGHTS]}
    if isinstance(value, TableState):
        assert value.field.keeper is not None, "the optimizer holds it"
        return {DOOR: [value.field.keeper.name, value.field.name]}
    if isinstance(value, Mapping) and not isinstance(value, Counter):
        return {key: without_doors(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_doors, value)) if type(value) in (list, tuple) else value
    return value


def with_doors(value: Any, tables: Mapping[str, AdoptedTable]) -> Any:
    if isinstance(value, dict) and set(value) == {DOOR}:
        name, field = value[DOOR]
        return tables[name].parameter if field == WEIGHTS else state_door(tables[name], field)
    if isinstance(value, dict) and not isinstance(value, Counter):
        return {key: with_doors(own, tables) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_doors(own, tables) for own in value)
    return value


def refuse_other_objects(structure: Sequence[Any], objects: Sequence[Stateful], folder: str | Path) -> None:
    saved, given = [kind for kind, _ in structure], [type(own).__name__ for own in objects]
    if saved != given:
        raise ConfigError(
            f"restore: {folder} has the states of {listed(saved) or 'no object'}, and was given "
            f"{listed(given) or 'none'}; give the objects that were saved, in their order"
        )


def load(part: Stateful, state: Any, tables: Mapping[str, AdoptedTable]) -> None:
    """Raises ConfigError if the state is not of this object."""
    whole = with_doors(state, tables)
    try:
        if isinstance(part, nn.Module):
            others = {name: own for name, own in whole.items() if not isinstance(own, TableParameter)}
            found = part.load_state_dict(others, strict=False)
            unlike = [*found.unexpected_keys, *({*found.missing_keys} - {*whole})]
            if unlike:
                raise LookupError(f"{listed(unlike)}: in one of them only")
        elif isinstance(part, Optimizer):
            kept = {index: dict(doors_of(own)) for index, own in whole["state"].items()}
            others = {
                index: {name: value for name, value in own.items() if name not in kept[index]}
                for index, own in whole["state"].items()
            }
            part.load_state_dict({**whole, "state": others})
            parameters = [own for group in part.param_groups for own in group["params"]]
            for index, own in kept.items():
                part.state[parameters[index]].update(own)
        else:
            part.load_state_dict(whole)
    except (RuntimeError, ValueError, LookupError) as error:
        sentence = " ".join(str(error).split())
        raise ConfigError(
            f"restore: the saved {type(part).__name__} is not this one: {sentence}; make the objects as they were saved"
        ) from None


def doors_of(state: Mapping[str, Any]) -> Iterator[tuple[str, TableState]]:
    return ((name, own) for name, own in state.items() if isinstance(own, TableState))
