"""`prefetcher export`: a checkpoint as one safetensors file, written table by table with memory for one block of rows.

    embedding_bags.<table>.weight     f32 [num_embeddings, embedding_dim]
    optimizer.<table>.<state>         f32 [num_embeddings, width of the state]
    <name>                            dense weights under the model's own names

A row that was never trained has its first value, which the manifest's job file determines.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from prefetcher.stores.memory import first_records
from protocol.errors import ConfigError, DataError
from protocol.job_file import parse_job
from protocol.manifest import Manifest, ShardFile, checked_file, newest_checkpoint, read_manifest, sync_folder
from protocol.tables import GroupSpec, TableSpec, group_specs, make_keys

BLOCK_ROWS = 65536
Floats = npt.NDArray[np.float32]
Progress = Callable[[str], None]


def export_run(run_dir: Path, out: Path, progress: Progress = lambda table: None) -> Manifest:
    """Writes the newest checkpoint of a run to `out`; `progress` is told each table's name. Raises ConfigError and DataError."""
    if out.is_dir() or not out.name:
        raise ConfigError(f"--out {out} is a folder; name a file, such as {out / 'model.safetensors'}")
    folder = newest_checkpoint(run_dir)
    if folder is None:
        raise ConfigError(f"{run_dir} holds no checkpoint; a run writes one at its end")
    manifest = read_manifest(folder)
    job = parse_job(manifest.job, f"{folder}/manifest.json")
    checkpoint = CheckpointRows(folder, manifest, job.job.seed)
    dense = load_dense(folder, manifest)
    partial = out.with_name(out.name + ".partial")
    try:
        with partial.open("wb") as file:
            write_safetensors(file, group_specs(job), checkpoint, dense, progress)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(out)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise ConfigError(f"{out}: the export could not be written ({error.strerror}); choose another --out or free space") from None
    finally:
        with suppress(OSError):  # renamed, or never made
            partial.unlink()
    return manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class RawTensor:
    """A tensor of any dtype that safetensors knows, as it stands in a file."""

    dtype: str  # in safetensors' words
    shape: tuple[int, ...]
    content: bytes


def load_dense(folder: Path, manifest: Manifest) -> dict[str, RawTensor]:
    """The model's tensors by their own names, uninterpreted: numpy has no bfloat16."""
    path = checked_file(folder, manifest.dense.file, manifest.dense.nbytes, manifest.dense.checksum)
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = {name: entry for name, entry in json.loads(raw[8:end]).items() if name.startswith("model.")}
    return {
        name.removeprefix("model."): RawTensor(
            dtype=entry["dtype"], shape=tuple(entry["shape"]), content=raw[slice(*(end + at for at in entry["data_offsets"]))]
        )
        for name, entry in header.items()
    }


class CheckpointRows:
    """Rows of a checkpoint by table, in blocks: trained ones from its shards, the others computed."""

    def __init__(self, folder: Path, manifest: Manifest, seed: int) -> None:
        self._folder = folder
        self._shards = manifest.shards
        self._seed = seed

    def blocks(self, group: GroupSpec, table: TableSpec) -> Iterator[Floats]:
        """f32 [n, record_floats] of rows 0, 1, ... of the table, at most `BLOCK_ROWS` at a time."""
        for first in range(0, table.num_embeddings, BLOCK_ROWS):
            keys = make_keys(table.index, np.arange(first, min(first + BLOCK_ROWS, table.num_embeddings), dtype=np.int64))
            records = first_records(group, self._seed, keys)
            for shard in self._shards:
                if shard.group == group.name and shard.first_key <= keys[-1] and shard.last_key >= keys[0]:
                    self._overlay(group, shard, keys, records)
            yield records.view(np.float32)

    def _overlay(self, group: GroupSpec, shard: ShardFile, keys: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        trained, rows = self._load(group, shard)
        start, stop = np.searchsorted(trained, [keys[0], keys[-1] + 1])
        records[trained[start:stop] - keys[0]] = rows[start:stop]

    def _load(self, group: GroupSpec, shard: ShardFile) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """One shard is kept in memory: blocks ask for them in order."""
        if self._loaded is None or self._loaded[0] != shard.file:
            path = checked_file(self._folder, shard.file, shard.nbytes, shard.checksum)
            content = load_file(path)
            keys, rows = content["keys"], content["records"]
            if len(keys) != shard.num_rows or rows.shape != (shard.num_rows, group.record_bytes):
                raise DataError(f"{path}: {len(keys)} keys and records of shape {rows.shape}, but the manifest says {shard.num_rows} rows")
            self._loaded = (shard.file, keys, rows)
        return self._loaded[1:]

    _loaded: tuple[str, npt.NDArray[np.int64], npt.NDArray[np.uint8]] | None = None


def write_safetensors(
    file: IO[bytes],
    groups: tuple[GroupSpec, ...],
    rows: CheckpointRows,
    dense: dict[str, RawTensor],
    progress: Progress,
) -> None:
    """Header first, then every tensor at its place; a table's parts are filled side by side, block by block."""
    offsets, header = layout(groups, dense)
    file.write(header)
    start = len(header)
    for group in groups:
        for table in group.tables:
            progress(table.name)
            at = {part.name: start + offsets[part_name(table, part.name)] for part in group.parts}
            for records in rows.blocks(group, table):
                for part in group.parts:
                    content = np.ascontiguousarray(records[:, part.offset : part.offset + part.width])
                    file.seek(at[part.name])
                    file.write(content.data)
                    at[part.name] += content.nbytes
    for name, tensor in dense.items():
        file.seek(start + offsets[name])
        file.write(tensor.content)


def part_name(table: TableSpec, part: str) -> str:
    return f"embedding_bags.{table.name}.weight" if part == "weight" else f"optimizer.{table.name}.{part}"


def layout(groups: tuple[GroupSpec, ...], dense: dict[str, RawTensor]) -> tuple[dict[str, int], bytes]:
    """Where each tensor begins behind the header, and the header: 8 bytes of length, JSON, padding to 8 bytes."""
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for group in groups:
        for table in group.tables:
            for part in group.parts:
                nbytes = 4 * table.num_embeddings * part.width
                tensors[part_name(table, part.name)] = ("F32", (table.num_embeddings, part.width), nbytes)
    tensors |= {name: (tensor.dtype, tensor.shape, len(tensor.content)) for name, tensor in dense.items()}
    content, offsets, end = {}, {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        offsets[name] = end
        end += nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return offsets, len(text).to_bytes(8, "little") + text
