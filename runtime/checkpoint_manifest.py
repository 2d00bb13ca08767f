"""The manifest of a checkpoint: what it consists of. Written last, so that a checkpoint with a manifest is whole.

    <run_dir>/checkpoints/step-000000000200/manifest.json
                                            dense.safetensors
                                            fp32_d16_sgd-00000.safetensors      rows that changed since step 100
    <run_dir>/checkpoints/step-000000000100/fp32_d16_sgd-00000.safetensors      the base, which this manifest names too

A manifest may come from anywhere, so everything in it is checked when it is read: names stay inside `checkpoints/`, counts are counts.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from rowcast.runtime.disk import Disk, RealDisk
from rowcast.runtime.errors import DataError
from rowcast.runtime.position import Position

MANIFEST_VERSION = 2
MANIFEST_NAME = "manifest.json"
READ_BYTES = 2**20
FOLDER_NAME = re.compile(r"step-[0-9]{12}")
FILE_NAME = re.compile(r"step-[0-9]{12}/[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
CHECKSUM = re.compile(r"[0-9a-f]{16}")
MAX_KEY = 2**63 - 1
MAX_STEP = 10**12 - 1  # twelve digits: names of folders are in order of their steps


class FilePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class DenseFile(FilePart, frozen=True, kw_only=True):
    """The trainer's side: weights, optimizer state and whatever else it needs to go on, as safetensors."""

    file: str  # relative to checkpoints/
    nbytes: int
    checksum: str  # xxh3_64 of the file, 16 hex digits

    def __post_init__(self) -> None:
        check_file(self.file, self.nbytes, self.checksum)


class RowFile(FilePart, frozen=True, kw_only=True):
    """Rows of one group by ascending key, as safetensors: `keys` i64[n] and `records` u8[n, record_bytes]."""

    group: str
    file: str  # relative to checkpoints/
    first_key: int
    last_key: int
    num_rows: int
    nbytes: int
    checksum: str  # xxh3_64 of the file, 16 hex digits

    def __post_init__(self) -> None:
        check_file(self.file, self.nbytes, self.checksum)
        if (
            not 1 <= self.num_rows <= self.last_key - self.first_key + 1
            or not 0 <= self.first_key <= self.last_key <= MAX_KEY
        ):
            raise ValueError(
                f"{self.file}: {self.num_rows} rows with keys from {self.first_key} to {self.last_key} cannot be"
            )


class RowLayer(FilePart, frozen=True, kw_only=True):
    """A base: every row that was trained up to a checkpoint. A delta: those that changed since the layer before."""

    kind: Literal["base", "delta"]
    num_rows: int
    files: tuple[RowFile, ...]  # those of a group side by side, by ascending key

    def __post_init__(self) -> None:
        if self.num_rows != sum(file.num_rows for file in self.files):
            raise ValueError(
                f"a layer of {self.num_rows} rows has files of {sum(file.num_rows for file in self.files)}"
            )
        seen = [
            group
            for i, group in enumerate(file.group for file in self.files)
            if i == 0 or self.files[i - 1].group != group
        ]
        if len(set(seen)) < len(seen):
            raise ValueError("a layer has files of one group in two places")
        for before, after in pairwise(self.files):
            if before.group == after.group and before.last_key >= after.first_key:
                raise ValueError(
                    f"{after.file} begins at key {after.first_key}, but {before.file} before it ends at {before.last_key}"
                )

    def of_group(self, group: str) -> tuple[RowFile, ...]:
        return tuple(file for file in self.files if file.group == group)


class Manifest(FilePart, frozen=True, kw_only=True):
    version: int
    run_id: str
    position: Position  # where training goes on
    finished: bool  # the data had ended; otherwise the run goes on after this, or was stopped
    reason: str
    world_size: int
    job: dict[str, Any]  # the whole job, checked: an export needs no other file
    training_digest: str
    # oldest first: one base, then deltas; a row's value is that of the newest layer that has it
    layers: tuple[RowLayer, ...]
    dense: DenseFile | None  # None: an import that gave no dense weights
    checksum: str = ""  # xxh3_64 of the manifest's file where it has "" here, 16 hex digits; `seal` fills it in

    def __post_init__(self) -> None:
        counts = msgspec.structs.asdict(self.position).values()
        if (
            not all(0 <= count <= MAX_STEP for count in counts if count is not None)
            or self.position.train_step > self.position.step
        ):
            raise ValueError(f"position {self.position} cannot be")
        if self.world_size < 1:
            raise ValueError(f"world_size = {self.world_size} must be at least 1")
        if [layer.kind for layer in self.layers] != ["base", *["delta"] * (len(self.layers) - 1)]:
            raise ValueError(f"layers {[layer.kind for layer in self.layers]} are not one base and deltas")

    @property
    def step(self) -> int | None:
        """The last step in it, None before the first."""
        return self.position.step - 1 if self.position.step else None

    @property
    def train_steps(self) -> int:
        return self.position.train_step

    @property
    def name(self) -> str:
        """Of its folder."""
        return folder_name(self.position)

    @property
    def num_rows(self) -> int:
        """Of all layers; a row that is in several counts in each."""
        return sum(layer.num_rows for layer in self.layers)

    @property
    def files(self) -> Iterator[RowFile | DenseFile]:
        """All that it names."""
        for layer in self.layers:
            yield from layer.files
        if self.dense is not None:
            yield self.dense

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


class Versioned(msgspec.Struct):
    version: int


def folder_name(position: Position) -> str:
    return f"step-{position.step:012d}"


def check_file(name: str, nbytes: int, checksum: str) -> None:
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f'{name!r} is no file of a checkpoint; such as "step-000000000100/dense.safetensors"')
    if nbytes < 0:
        raise ValueError(f"{name}: nbytes = {nbytes} must be at least 0")
    if not CHECKSUM.fullmatch(checksum):
        raise ValueError(f"{name}: checksum {checksum!r} is not 16 hex digits")


def file_checksum(path: Path) -> tuple[int, str]:
    """Bytes and xxh3_64 of a file."""
    hasher, nbytes = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            hasher.update(block)
            nbytes += len(block)
    return nbytes, hasher.hexdigest()


def write_durably(path: Path, content: bytes, disk: Disk | None = None) -> None:
    """The file appears whole or not at all, and stays. Raises OSError."""
    disk = disk or RealDisk()
    partial = path.with_name(path.name + ".partial")
    file = disk.create(partial)
    try:
        file.write(content)
        file.sync()
    finally:
        file.close()
    disk.rename(partial, path)
    disk.sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    RealDisk().sync_folder(folder)


def render(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def seal(manifest: Manifest) -> Manifest:
    """With its checksum."""
    checksum = xxhash.xxh3_64_hexdigest(render(msgspec.structs.replace(manifest, checksum="")))
    return msgspec.structs.replace(manifest, checksum=checksum)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_durably(folder / MANIFEST_NAME, render(seal(manifest)))


def read_manifest(folder: Path) -> Manifest:
    """Raises DataError where there is none, none that this version can read, or one that was changed since it was written."""
    path = folder / MANIFEST_NAME
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content, type=Versioned).version
        if version != MANIFEST_VERSION:
            raise DataError(f"{path}: manifest version {version}, but this version reads {MANIFEST_VERSION}")
        manifest = msgspec.json.decode(content, type=Manifest)
    except OSError as error:
        raise DataError(f"{path}: no checkpoint here ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not a manifest that this version can read ({error})") from None
    found = xxhash.xxh3_64_hexdigest(content.replace(manifest.checksum.encode(), b"", 1))
    if found != manifest.checksum:
        raise DataError(
            f"{path}: the manifest has checksum {found}, but says {manifest.checksum!r}: it was changed after it was written"
        )
    if manifest.name != folder.name:
        raise DataError(f"{path}: the manifest of {manifest.name} lies in the folder of another checkpoint")
    return manifest


def differs(path: Path, found: tuple[int, str], nbytes: int, checksum: str) -> DataError:
    return DataError(
        f"{path}: {found[0]} bytes with checksum {found[1]}, but the manifest says {nbytes} and {checksum}"
    )


def checked_file(root: Path, file: RowFile | DenseFile) -> Path:
    """The path of a file that a manifest names, after its size and checksum were compared. Raises DataError."""
    path = root / file.file
    try:
        found = file_checksum(path)
    except OSError as error:
        raise DataError(f"{path}: a file of the checkpoint cannot be read ({error.strerror})") from None
    if found != (file.nbytes, file.checksum):
        raise differs(path, found, file.nbytes, file.checksum)
    return path


def checkpoint_folders(root: Path) -> list[Path]:
    """In the folder of a run's checkpoints, newest first, by step. Only their manifests were looked for."""
    folders = [path.parent for path in root.glob(f"step-*/{MANIFEST_NAME}") if FOLDER_NAME.fullmatch(path.parent.name)]
    return sorted(folders, key=lambda folder: folder.name, reverse=True)


def beside(root: Path) -> tuple[Path, Path]:
    """Where a fresh run has its checkpoints until it takes the place of the run in `root`, and where that one's are while it does."""
    return root.with_name(f".{root.name}.new"), root.with_name(f".{root.name}.replaced")


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The folder of the newest checkpoint of a run, by step; None without one. Only its manifest was looked for."""
    return next(iter(checkpoint_folders(run_dir / "checkpoints")), None)
