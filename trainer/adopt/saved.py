"""Saves an adopted script as a run, and restores it.

    objects        checked and packed: numbers, text and tensors, without adopted tables and their states
    rows           those that may differ from the last save: caught up, and returned to the prefetcher
    prefetcher     freezes them and writes a checkpoint as those of job runs (`prefetcher/run/script.py`)

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
from msgspec import structs
from torch import Tensor, nn
from torch.optim import Optimizer

from rowcast.protocol.messages import SaveRequest
from rowcast.runtime.checkpoint_manifest import (
    Manifest,
    SavedScript,
    SavedTable,
    checked_file,
    newest_checkpoint,
    read_manifest,
)
from rowcast.runtime.errors import ConfigError, Diverged, RowcastError, listed, peer_failure
from rowcast.runtime.first_values import FirstValues, other_file
from rowcast.runtime.process import start_child
from rowcast.runtime.tensor_file import PlacedTensor, read_header
from rowcast.trainer.adopt import records
from rowcast.trainer.adopt.adopt import Doors, SavedRun, adopted
from rowcast.trainer.adopt.adopted_table import AdoptedTable
from rowcast.trainer.adopt.random_states import States, packed, unpacked
from rowcast.trainer.adopt.ranks import rank_and_count, ranks_of
from rowcast.trainer.adopt.records import BLOCK_ROWS, WEIGHTS, Records, alike, values_at
from rowcast.trainer.adopt.rows import Home
from rowcast.trainer.adopt.table_parameter import TableParameter, TableState, state_door
from rowcast.trainer.models.model_state import Stateful, Tensors, flattened, pack, rebuilt, unpack

STRUCTURE = "objects.structure"
MOST_STEPS = 10**12 - 1
NO_TENSOR = PlacedTensor(dtype="I64", shape=(0,), nbytes=0, start=0)
DOOR = "adopted"  # in a structure: [the name of a table, its field]
OBJECTS_FILE, ROWS_FILE, LOG = "objects.safetensors", "rows.safetensors", "export.log"


def save(folder: str | Path, *objects: Stateful, step: int, keep: int = 2) -> None:
    """Saves an adopted script between two steps as a checkpoint of the run in `folder`. It is durable on return.

    objects: the model, optimizers, schedules, averages: whatever has state_dict and load_state_dict, of numbers, text
    and tensors. step: of the script, above that of earlier saves. keep: checkpoints; older ones are removed. On several
    ranks all call it, and rank 0 writes.

    Raises ConfigError for objects that cannot be saved, gradients that no optimizer has stepped, and a folder of
    another run; RowcastError if the disk fails: the previous save stays, and the script may go on and save again."""
    doors = adopted("save")
    for table in tables_of(doors).values():
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
    for home in adoption.homes:
        home.take_back()
        home.refuse_every_row()
    for states in gathered(pack(drawn(doors.loops.states(), rank)), adoption.homes[0].device):
        content |= unpack(states)
    if rank:
        return
    place, newest = Path(folder).resolve(), newest_of(Path(folder))
    run = run_to_save(place, newest, doors.runs.get(place), step)
    name = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "notebook").name
    script = SavedScript(name=name, tables=tuple(map(saved_table, adoption.homes)), num_ranks=num_ranks)
    is_last = newest is not None and newest.checksum == run.checksum and next(reversed(doors.runs)) == place
    last = newest.script if newest is not None and is_last else None
    is_smaller_anew = any(home.unsaved.are_all and home.first_values() for home in adoption.homes)
    goes_on = last is not None and last.holding_all() == script and not is_smaller_anew
    doors.runs[place] = run  # an interrupt may end the wait below
    engine = adoption.with_all()
    script = naming(script, adoption.homes, last if goes_on else None)
    engine.begin_save()
    for home in adoption.homes:
        send_home(home, home.unsaved_rows() if goes_on else home.changed_rows())
    try:
        (adoption.folder / OBJECTS_FILE).write_bytes(pack(content))
    except OSError as error:
        raise RowcastError(f"save: {adoption.folder} cannot be written ({error.strerror}); free space there") from None
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
    """Restores tables, objects and random states from the newest checkpoint of `save` in the folder. Call it after
    `adopt` and before the first step, with the saved objects in their order. Returns its step, or 0 if there is none.

    Raises ConfigError if the run is of a job, or has other tables or objects; DataError if it is damaged."""
    doors = adopted("restore")
    place, manifest = Path(folder).resolve(), newest_of(Path(folder))
    if manifest is None:
        return 0
    if manifest.script is None:
        raise ConfigError(f"restore: {folder} holds a run of a job; `rowcast train` continues it")
    tables, root = tables_of(doors), place / "checkpoints"
    refuse_others(manifest.script, [saved_table(home) for home in doors.engine.homes], folder)
    assert manifest.dense is not None, "a script always saves objects"
    tensors = unpack(checked_file(root, manifest.dense).read_bytes())
    structure = read_json(tensors[STRUCTURE])
    refuse_other_objects(structure, objects, folder)
    first = {saved.name: given_again(saved, tables[saved.name].home, folder) for saved in manifest.script.tables}
    rows = exported(place, manifest, doors.engine.folder / "restored")
    for saved in manifest.script.tables:
        home = tables[saved.name].home
        names = {WEIGHTS: f"embedding_bags.{saved.name}.weight"}
        names |= {state: f"optimizer.{saved.name}.{state}" for state in saved.states}
        places = {field: rows.place(name) for field, name in names.items()}
        ids = rows.ids(f"embedding_bags.{saved.name}.rows")
        weights, *states = (values_at(place, len(ids)) for place in places.values())
        trained = Records(weights, dict(zip(saved.states, states, strict=True)), alike(0, (len(ids),), torch.int64))
        if home.is_large and saved.first:
            places = dict(zip(names, first[saved.name], strict=False))
        home.restore(places, ids, trained)
        tables[saved.name].trained = None
    for part, (_, state) in zip(objects, structure, strict=True):
        load(part, rebuilt(state, tensors), tables)
    states = read_json(tensors[f"random.{rank_and_count()[0]}.structure"])
    doors.loops.restore(*(unpacked(rebuilt(state, tensors)) for state in states))
    note(doors, place, manifest)
    return manifest.train_steps


def gathered(content: bytes, device: torch.device) -> list[bytes]:
    """Returns what each rank passed to the same call. `device`: of the tensors that travel."""
    if rank_and_count()[1] == 1:
        return [content]
    assert dist.group.WORLD is not None, "it is initialised"
    return ranks_of(dist.group.WORLD, device).gather(content)


def tables_of(doors: Doors) -> dict[str, AdoptedTable]:
    alive = (finalizer.peek() for finalizer in doors.tables.values())
    return {entry[0].name: entry[0] for entry in alive if entry is not None}


def newest_of(folder: Path) -> Manifest | None:
    """Raises DataError if the newest checkpoint is damaged."""
    newest = newest_checkpoint(folder)
    return None if newest is None else read_manifest(newest)


def note(doors: Doors, place: Path, manifest: Manifest) -> None:
    doors.runs.pop(place, None)
    doors.runs[place] = SavedRun(manifest.run_id, manifest.checksum)
    for home in doors.engine.homes:
        home.note_saved()


def run_to_save(place: Path, newest: Manifest | None, run: SavedRun | None, step: int) -> SavedRun:
    if newest is None:
        return run or SavedRun(uuid.uuid4().hex[:12], "")
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


def naming(script: SavedScript, homes: Sequence[Home], last: SavedScript | None) -> SavedScript:
    """Returns the table with names of its first values, if any. `last`: the save that this one continues, whose names
    stay, although released files may be in another folder by now."""
    tables = [
        table if last is not None and not home.is_on_demand else structs.replace(table, first=home.first_values())
        for table, home in zip((last or script).tables, homes, strict=True)
    ]
    return structs.replace(script, tables=tuple(tables))


def given_again(saved: SavedTable, home: Home, folder: str | Path) -> tuple[FirstValues, ...]:
    """Returns names of first values, with released files where the script has them now. Raises ConfigError if they
    differ from those of the save."""
    weights, *others = saved.first or (FirstValues(width=saved.dim),)
    now = home.places[WEIGHTS]
    if weights.released is None and now.released is None:
        return saved.first
    now = now.sampled() if now.released else now
    if differs := other_file(weights.named_files, now.named_files):
        raise ConfigError(
            f"restore: the rows of {saved.name} in {folder} began in {differs}; give adopt(files=...) those of the save"
        )
    return now, *others


def send_home(home: Home, ids: Tensor) -> None:
    """Raises Diverged if a row is not finite."""
    for part in torch.split(ids.to(home.device), BLOCK_ROWS):
        rows = home.read(part)
        for name in (WEIGHTS, *rows.states):
            bad = ~rows.field(name).isfinite().all(1)
            if bool(bad.any()):
                raise Diverged(
                    f"row {int(part[bad][0])} of {home.name} has {name} that are not finite: training diverged; go on "
                    "from the last save with a lower rate"
                )
        home.rows.write(part, rows)


def refuse_others(script: SavedScript, tables: Sequence[SavedTable], folder: str | Path) -> None:
    if script.num_ranks != (count := rank_and_count()[1]):
        raise ConfigError(
            f"restore: {folder} was saved on {script.num_ranks} ranks, whose number decides the bits of a script, and "
            f"here are {count}; start it on {script.num_ranks}"
        )
    for saved, here in zip_longest(script.tables, tables):
        was, now = (table and f"{table.name} [{table.num_rows:,}, {table.dim}]" for table in (saved, here))
        if was != now:
            raise ConfigError(
                f"restore: {folder} is of {script.name}, whose adopted tables are others: {was or 'none'} there, "
                f"{now or 'none'} here; adopt the same tables, or name another folder"
            )


class ExportedRows:
    """Rows of a checkpoint in one safetensors file: a whole table, or of a large one the rows that differ from its
    first values."""

    def __init__(self, path: Path) -> None:
        self._path, self._tensors = path, read_header(path)

    def place(self, name: str) -> FirstValues:
        """Returns where the field's f32 [n, D] are."""
        tensor = self._tensors[name]
        return FirstValues(width=tensor.shape[1], path=str(self._path), offset=tensor.start)

    def ids(self, name: str) -> Tensor:
        """Returns the numbers of a large table's rows, i64 [n]; none for others, which are there whole."""
        tensor = self._tensors.get(name, NO_TENSOR)
        return torch.from_numpy(np.fromfile(self._path, np.int64, tensor.shape[0], offset=tensor.start))


def exported(place: Path, manifest: Manifest, folder: Path) -> ExportedRows:
    """Raises DataError if the checkpoint is damaged, ConfigError if the disk has no room for all rows."""
    folder.mkdir(exist_ok=True)  # the tables share the file, so it stays as long as they do
    path = folder / f"{manifest.name}.{ROWS_FILE}"
    pinned = f"--checkpoint={manifest.name}@{manifest.checksum}"
    rows = ["--trained-rows", f"--above={records.MOST_WHOLE}"]
    child = start_child("export", "rowcast", ["export", f"--run={place}", pinned, f"--out={path}", *rows], folder / LOG)
    child.process.wait()
    if child.code:
        raise peer_failure(child.code, child.describe_exit())
    return ExportedRows(path)


# objects


def state_of(objects: Sequence[Stateful]) -> Tensors:
    """Raises ConfigError for an object that cannot be saved."""
    tensors: Tensors = {}
    structure = []
    model = next((part for part in objects if isinstance(part, nn.Module)), None)
    for n, part in enumerate(objects):
        kind = type(part).__name__
        if not all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict")):
            raise ConfigError(f"save: a {kind} cannot be saved without state_dict and load_state_dict; leave it out")
        state = without_doors(part.state_dict(keep_vars=True) if isinstance(part, nn.Module) else part.state_dict())
        part_tensors: Tensors = {}
        structure.append([kind, flattened(state, f"objects.{n}", part_tensors, kind)])
        if part is model:
            names = {entry["tensor"]: f"model.{key}" for key, entry in structure[-1][1]["dict"] if "tensor" in entry}
            part_tensors = {names.get(name, name): tensor for name, tensor in part_tensors.items()}
            structure[-1][1] = renamed(structure[-1][1], names)
        tensors |= part_tensors
    return {**tensors, STRUCTURE: as_json(structure)}


def drawn(states: Sequence[States], rank: int) -> Tensors:
    tensors: Tensors = {}
    structure = [
        flattened(packed(state), f"random.{rank}.{n}", tensors, "a generator") for n, state in enumerate(states)
    ]
    return {**tensors, f"random.{rank}.structure": as_json(structure)}


def as_json(structure: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(structure).encode()), dtype=torch.uint8)


def read_json(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())


def renamed(structure: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    entries = [
        [key, {"tensor": names[entry["tensor"]]} if "tensor" in entry else entry] for key, entry in structure["dict"]
    ]
    return {"dict": entries}


def without_doors(value: Any) -> Any:
    """Returns a state with a mark in place of each adopted table and each of its states."""
    if isinstance(value, TableParameter):
        return {DOOR: [value.table.name, WEIGHTS]}
    if isinstance(value, TableState):
        assert value.field.keeper is not None, "the optimizer holds it"
        return {DOOR: [value.field.keeper.name, value.field.name]}
    if isinstance(value, Mapping) and not isinstance(value, Counter):
        return {key: without_doors(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_doors, value)) if type(value) in (list, tuple) else value
    return value


def with_doors(value: Any, tables: Mapping[str, AdoptedTable]) -> Any:
    if isinstance(value, dict) and set(value) == {DOOR}:
        name, field = value[DOOR]
        return tables[name].parameter if field == WEIGHTS else state_door(tables[name], field)
    if isinstance(value, dict) and not isinstance(value, Counter):
        return {key: with_doors(part, tables) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_doors(part, tables) for part in value)
    return value


def refuse_other_objects(structure: Sequence[Any], objects: Sequence[Stateful], folder: str | Path) -> None:
    saved, given = [kind for kind, _ in structure], [type(part).__name__ for part in objects]
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
            others = {name: value for name, value in whole.items() if not isinstance(value, TableParameter)}
            keys = part.load_state_dict(others, strict=False)
            unlike = [*keys.unexpected_keys, *({*keys.missing_keys} - {*whole})]
            if unlike:
                raise LookupError(f"{listed(unlike)}: in one of them only")
        elif isinstance(part, Optimizer):
            kept = {index: dict(doors_of(state)) for index, state in whole["state"].items()}
            others = {
                index: {name: value for name, value in state.items() if name not in kept[index]}
                for index, state in whole["state"].items()
            }
            part.load_state_dict({**whole, "state": others})
            parameters = [parameter for group in part.param_groups for parameter in group["params"]]
            for index, doors in kept.items():
                part.state[parameters[index]].update(doors)
        else:
            part.load_state_dict(whole)
    except (RuntimeError, ValueError, LookupError) as error:
        sentence = " ".join(str(error).split())
        raise ConfigError(
            f"restore: the saved {type(part).__name__} is not this one: {sentence}; make the objects as they were saved"
        ) from None


def doors_of(state: Mapping[str, Any]) -> Iterator[tuple[str, TableState]]:
    return ((name, value) for name, value in state.items() if isinstance(value, TableState))
