"""The manifest of a checkpoint: what it consists of. Written last, so that a checkpoint with a manifest is whole."""

import os
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from protocol.errors import DataError

MANIFEST_VERSION = 1
MANIFEST_NAME = "manifest.json"


class ShardFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of one group by ascending key, as safetensors: `keys` i64[n] and `records` u8[n, record_bytes]."""

    group: str
    file: str  # relative to the manifest's folder
    first_key: int
    last_key: int
    num_rows: int
    nbytes: int
    checksum: str  # xxh3_64 of the file, 16 hex digits


class DenseFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: str
    nbytes: int
    checksum: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    run_id: str
    step: int | None  # the last step in it, None before the first
    train_steps: int
    finished: bool  # the data had ended; otherwise the run was stopped
    reason: str
    world_size: int
    job: dict[str, Any]  # the whole job, checked: an export needs no other file
    training_digest: str
    shards: tuple[ShardFile, ...]
    dense: DenseFile
    checksum: str = ""  # xxh3_64 of the manifest's file where it has "" here, 16 hex digits; `write_manifest` fills it in


def file_checksum(path: Path) -> tuple[int, str]:
    """Bytes and xxh3_64 of a file."""
    hasher, nbytes = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            hasher.update(block)
            nbytes += len(block)
    return nbytes, hasher.hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """The file appears whole or not at all, and stays."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def render(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    checksum = xxhash.xxh3_64_hexdigest(render(msgspec.structs.replace(manifest, checksum="")))
    write_durably(folder / MANIFEST_NAME, render(msgspec.structs.replace(manifest, checksum=checksum)))


def read_manifest(folder: Path) -> Manifest:
    """Raises DataError where there is none, none that this version can read, or one that was changed since it was written."""
    path = folder / MANIFEST_NAME
    try:
        content = path.read_bytes()
        manifest = msgspec.json.decode(content, type=Manifest)
    except OSError as error:
        raise DataError(f"{path}: no checkpoint here ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a manifest that this version can read ({error})") from None
    if manifest.version != MANIFEST_VERSION:
        raise DataError(f"{path}: manifest version {manifest.version}, but this version reads {MANIFEST_VERSION}")
    found = xxhash.xxh3_64_hexdigest(content.replace(manifest.checksum.encode(), b"", 1))
    if found != manifest.checksum:
        raise DataError(f"{path}: the manifest has checksum {found}, but says {manifest.checksum!r}: it was changed after it was written")
    return manifest


def checked_file(folder: Path, name: str, nbytes: int, checksum: str) -> Path:
    """The path of a file that a manifest names, after its size and checksum were compared. Raises DataError."""
    path = folder / name
    try:
        found = file_checksum(path)
    except OSError as error:
        raise DataError(f"{path}: a file of the checkpoint cannot be read ({error.strerror})") from None
    if found != (nbytes, checksum):
        raise DataError(f"{path}: {found[0]} bytes with checksum {found[1]}, but the manifest says {nbytes} and {checksum}")
    return path


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The folder of the newest whole checkpoint of a run, by step; None without one."""
    folders = [path.parent for path in (run_dir / "checkpoints").glob(f"step-*/{MANIFEST_NAME}")]
    return max(folders, key=lambda folder: folder.name, default=None)
