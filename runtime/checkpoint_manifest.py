"""Writes and reads the manifest of a checkpoint, which lists its files and is written after all of them.

    <run_dir>/checkpoints/step-000000000200/manifest.json
                                            dense-00000.safetensors
                                            fp32_d16_sgd-00000.safetensors      rows that changed since step 100
    <run_dir>/checkpoints/step-000000000100/fp32_d16_sgd-00000.safetensors      the base, also named by this manifest

With several ranks, each writes the rows of its shard to separate files (`...-r003-00000`), and the manifest lists each
shard's.

A manifest is not trusted: reading it checks that all names stay inside `checkpoints/` and all counts are possible.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import xxhash
from msgspec.structs import replace

from rowcast.runtime.disk import CHECKSUM, NOT_THE_FILE, Disk, Sealed, listed_in, open_regular, read_sealed, unreadable
from rowcast.runtime.errors import DataError, RowcastError
from rowcast.runtime.first_values import FirstValues
from rowcast.runtime.machine import UNRECORDED, Machine
from rowcast.runtime.ranges import Number


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A position between two batches of the schedule; the default is the start."""

    step: Number = 0  # batches of both kinds before this position
    train_step: Number = 0  # training batches before it
    epoch: Number = 0
    train_batch: Number = 0  # training batches of this epoch before it
    eval_batch: Number | None = None  # batches of the current evaluation before it; None outside an evaluation


MANIFEST_VERSION = 12
MANIFEST_NAME = "manifest.json"
READ_BYTES = 2**20
FOLDER_NAME = re.compile(r"step-[0-9]{12}")
FILE_NAME = re.compile(r"step-[0-9]{12}/[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
RUN_ID = re.compile(rb'"run_id": ?"([^"]*)"')
MAX_KEY = 2**63 - 1
UNKNOWN = -1
MAX_STEP = 10**12 - 1  # twelve digits, so that folders sort by step


# of each table of the job (`protocol/parts.py`): its point; none if every block of its rows has its own. () if no
# table is placed
Points = tuple[tuple[Number, ...], ...]
IdType = Literal["text", "integers"]
BlockBits = Annotated[int, msgspec.Meta(ge=0, le=40)]


class FilePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class DenseFile(FilePart, frozen=True, kw_only=True):
    """The model state as safetensors: weights, optimizer state, and everything else that the trainer needs to
    continue."""

    file: str  # relative to checkpoints/
    nbytes: int
    checksum: str  # xxh3_64 of the file, 16 hex digits

    def __post_init__(self) -> None:
        check_file(self.file, self.nbytes, self.checksum)


class RowFile(FilePart, frozen=True, kw_only=True):
    """Rows of one group by ascending key as safetensors: `keys` i64 [n] and `records` u8 [n, record_bytes]."""

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
                f"{self.file}: {self.num_rows} rows with keys from {self.first_key} to {self.last_key} are impossible"
            )

    def spans(self, first_key: int, last_key: int) -> bool:
        """Returns whether it may have a key of this range."""
        return self.first_key <= last_key and first_key <= self.last_key


class RowLayer(FilePart, frozen=True, kw_only=True):
    """A base holds every row trained up to a checkpoint, a delta the rows changed since the previous layer."""

    kind: Literal["base", "delta"]
    num_rows: int
    files: tuple[RowFile, ...]  # the files of a group are adjacent, by ascending key
    # of a delta: the checksum of the manifest since which its rows changed; "" of a base, and in versions before 5
    after: str = ""
    # its rows were last trained before this train step, after which `rowcast forget` ran; 0: after the last `forget`
    until: Number = 0

    def __post_init__(self) -> None:
        if self.num_rows != sum(file.num_rows for file in self.files):
            raise ValueError(
                f"a layer of {self.num_rows} rows has files of {sum(file.num_rows for file in self.files)}"
            )
        if self.after and (self.kind == "base" or not CHECKSUM.fullmatch(self.after)):
            raise ValueError(f"a {self.kind} after {self.after!r} is impossible")
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
                    f"{after.file} begins at key {after.first_key}, but {before.file} before it ends at "
                    f"{before.last_key}"
                )

    def of_group(self, group: str) -> tuple[RowFile, ...]:
        return tuple(file for file in self.files if file.group == group)


class BatchChecksum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """A part of a batch after a checkpoint, already known at it."""

    train_step: int  # training batches before it
    eval_batch: int | None  # batches before it in its evaluation; None: a training batch
    ids: str  # xxh3_64 of ids, offsets and weights, 16 hex digits
    dense: str  # of dense features and labels; "" if not known yet
    part: Number = 0  # of the job's parts


class ShardLayers(FilePart, frozen=True, kw_only=True):
    """The rows of one shard of the tables (`protocol/parts.py`)."""

    # oldest first: one base, then deltas; the newest layer that has a row decides its value
    layers: tuple[RowLayer, ...]
    ahead: tuple[BatchChecksum, ...] = ()  # of the rank's parts of batches that a restart must read

    def __post_init__(self) -> None:
        if [layer.kind for layer in self.layers] != ["base", *["delta"] * (len(self.layers) - 1)]:
            raise ValueError(f"layers {[layer.kind for layer in self.layers]} are not one base and deltas")


class DataFile(FilePart, frozen=True, kw_only=True):
    path: str
    nbytes: int
    checksum: str  # of a sample of its contents (prefetcher/readers/data_files.py), 16 hex digits


class TrainingData(FilePart, frozen=True, kw_only=True):
    """The data that the steps before a checkpoint have read."""

    # in reading order; empty for a data set made by code. With data.follow, those from the next row on that were read
    files: tuple[DataFile, ...]
    # with data.follow, of the files before these, which may have left: their rows, and the path of the last one
    rows_before: Number = 0
    last_before: str = ""
    hot_rows: str = ""  # older versions kept the checksum of the rows of data.hot here
    num_dense: int = UNKNOWN  # dense features per sample; UNKNOWN in version 4
    dense_columns: tuple[str, ...] = ()  # their names; none were recorded if there are not `num_dense`


NOTHING_READ = TrainingData(files=())


class SavedTable(FilePart, frozen=True, kw_only=True):
    """An adopted table. Its records are f32: `dim` weights, as many of each state, and a number of the script's."""

    name: str  # of the parameter
    num_rows: Annotated[int, msgspec.Meta(ge=1, le=2**48)]
    dim: Annotated[int, msgspec.Meta(ge=1)]
    states: tuple[str, ...]  # of the script's optimizer, by torch.optim's names
    # of its records, from the left: what rows are that no layer has; (): the layers have all rows
    first: tuple[FirstValues, ...] = ()

    def __post_init__(self) -> None:
        if self.first and sum(columns.width for columns in self.first) != self.width:
            raise ValueError(f"{self.name}: first values of {sum(columns.width for columns in self.first)} columns")
        for columns in self.first:
            for file in columns.files:
                if not file.checksum:
                    raise ValueError(f"{self.name}: first values in {file.path!r} have no checksum")

    @property
    def width(self) -> int:
        """The columns of a record."""
        return self.dim * (1 + len(self.states)) + 1


class SavedScript(FilePart, frozen=True, kw_only=True):
    """A training script that has saved itself by `rowcast.save`."""

    name: str  # of its file
    tables: Annotated[tuple[SavedTable, ...], msgspec.Meta(min_length=1)]  # their numbers are those in keys
    num_ranks: Annotated[int, msgspec.Meta(ge=1)] = 1

    def holding_all(self) -> "SavedScript":
        """Returns it without names of first values."""
        return replace(self, tables=tuple(replace(table, first=()) for table in self.tables))


class Manifest(Sealed, frozen=True, kw_only=True):
    run_id: str
    position: Position  # where training continues
    finished: bool  # True if the data has ended; otherwise the run continued or was stopped
    reason: str
    job: dict[str, Any]  # the complete, checked job: an export needs no other file; {} of a script
    trained_on: TrainingData | None  # None after an import, and of a script
    shards: tuple[ShardLayers, ...]  # one per rank that wrote the checkpoint
    points: Points = ()  # that divided the tables among them; before version 9 none is placed
    block_bits: BlockBits = 6  # a block of rows with one owner has 2**block_bits; before version 9 it was 6
    dense: DenseFile | None  # None after an import without dense weights
    ahead: tuple[BatchChecksum, ...] = ()  # of whole batches; before version 8
    machine: Machine = UNRECORDED  # of its trainer; not recorded after an import, and before version 6
    # the name of the checkpoint of the best evaluation so far; "" without `eval.keep = "best"`, and before version 7
    best: str = ""
    # what the ids of each feature were that is hashed by their bytes; before version 10 none
    id_types: dict[str, IdType] = msgspec.field(default_factory=dict)
    forgot: Number = 0  # train steps before the last `forget` that left rows out; 0: there was none
    script: SavedScript | None = None  # that saved itself, in place of `job` and `trained_on`; before version 10 none

    def __post_init__(self) -> None:
        check_position(self.position)
        if self.script is not None and (self.job or self.trained_on or len(self.shards) > 1):
            raise ValueError("a checkpoint is of a job or of a script")
        if not self.shards:
            raise ValueError("a checkpoint has at least one shard")
        if self.best and not FOLDER_NAME.fullmatch(self.best):
            raise ValueError(f"the best checkpoint {self.best!r} is not the name of one")
        names = [file.file for file in self.files]
        if len(set(names)) < len(names):
            raise ValueError(f"{max(names, key=names.count)} is named twice")

    @property
    def is_import(self) -> bool:
        """Whether the run has trained nothing yet."""
        return self.trained_on is None

    def known_ahead(self, num_parts: int) -> tuple[BatchChecksum, ...]:
        """Returns the batches that a restart must read, by parts. Earlier versions tell only of undivided ones."""
        return *(self.ahead if num_parts == 1 else ()), *(part for shard in self.shards for part in shard.ahead)

    @property
    def layers(self) -> tuple[RowLayer, ...]:
        """The layers of all shards, each shard's oldest first. A row is in layers of only one shard."""
        return tuple(layer for shard in self.shards for layer in shard.layers)

    @property
    def step(self) -> int | None:
        """The last step before the checkpoint; None before the first step."""
        return self.position.step - 1 if self.position.step else None

    @property
    def train_steps(self) -> int:
        return self.position.train_step

    @property
    def name(self) -> str:
        return folder_name(self.position)

    @property
    def num_rows(self) -> int:
        """The rows of all layers; a row in several layers counts in each."""
        return sum(layer.num_rows for layer in self.layers)

    @property
    def files(self) -> Iterator[RowFile | DenseFile]:
        for layer in self.layers:
            yield from layer.files
        if self.dense is not None:
            yield self.dense

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def having(**fields: Any) -> Any:
    return msgspec.defstruct("Saved", list(fields.items()))


# what the job in a manifest of any version has, whatever else its version knew
SAVED_JOB = having(
    job=having(seed=int),
    data=having(format=str, columns=dict),
    tables=list[having(name=str)],  # type: ignore[misc]
    ranks=having(count=int, parts=int | None),
    **dict.fromkeys(("model", "optimizer", "transport", "metrics"), dict),
)


class ManifestOfVersion3(Manifest, frozen=True, kw_only=True):
    trained_on: None = None
    training_digest: str  # over settings and the sizes of data files; "" after an import by `--from`

    @property
    def is_import(self) -> bool:
        return not self.training_digest


KINDS: dict[int, type[Manifest]] = {3: ManifestOfVersion3, **dict.fromkeys(range(4, MANIFEST_VERSION + 1), Manifest)}


def check_position(position: Position) -> None:
    counts = msgspec.structs.asdict(position).values()
    if not all(0 <= count <= MAX_STEP for count in counts if count is not None) or position.train_step > position.step:
        raise ValueError(f"position {position} is impossible")


def folder_name(position: Position) -> str:
    return f"step-{position.step:012d}"


def check_file(name: str, nbytes: int, checksum: str) -> None:
    if not FILE_NAME.fullmatch(name):
        raise ValueError(
            f'{name!r} is not the name of a checkpoint file, such as "step-000000000100/dense.safetensors"'
        )
    if nbytes < 0:
        raise ValueError(f"{name}: nbytes = {nbytes} must be at least 0")
    if not CHECKSUM.fullmatch(checksum):
        raise ValueError(f"{name}: checksum {checksum!r} is not 16 hex digits")


def file_checksum(path: Path) -> tuple[int, str]:
    hasher, nbytes = xxhash.xxh3_64(), 0
    with open_regular(path) as file:
        while block := file.read(READ_BYTES):
            hasher.update(block)
            nbytes += len(block)
    return nbytes, hasher.hexdigest()


def write_durably(path: Path, content: bytes, disk: Disk | None = None) -> None:
    """Writes a file so that it appears whole or not at all, and survives a power loss. Raises OSError."""
    disk = disk or Disk()
    partial = path.with_name(path.name + ".partial")
    file = disk.create(partial)
    try:
        file.write(content)
        file.sync()
    finally:
        file.close()
    disk.rename(partial, path)
    disk.sync_folder(path.parent)


def read_manifest(folder: Path) -> Manifest:
    """Raises DataError if the manifest is missing, changed since, or of another version, and Unreadable."""
    path = folder / MANIFEST_NAME
    try:
        manifest = read_sealed(path, KINDS, "manifest")
    except OSError as error:
        raise missing(path, "no checkpoint here", error) from None
    if manifest.script is not None:
        return in_its_folder(path, manifest)
    try:
        msgspec.convert(manifest.job, SAVED_JOB)
    except msgspec.ValidationError as error:
        raise DataError(f"{path}: what it holds as `job` is no job ({error})") from None
    columns = manifest.job["data"]["columns"]
    if manifest.version < 10 and columns.get("hash_by_value"):
        columns["value_rule"] = 1  # the only one that they had
    return in_its_folder(path, manifest)


def in_its_folder(path: Path, manifest: Manifest) -> Manifest:
    if manifest.name != path.parent.name:
        raise DataError(f"{path}: the manifest of {manifest.name} is in the folder of another checkpoint")
    return manifest


def missing(path: Path, what: str, error: OSError) -> RowcastError:
    """Returns DataError if the file is not there, Unreadable if it may be."""
    return DataError(f"{path}: {what} ({error.strerror})") if error.errno in NOT_THE_FILE else unreadable(path, error)


def readable(folder: Path) -> Manifest | None:
    """Returns the manifest of a checkpoint; None if it is gone or damaged. Raises Unreadable."""
    try:
        return read_manifest(folder)
    except DataError:
        return None


def run_of(folder: Path) -> str | None:
    """Returns the run that wrote the checkpoint in a folder, even if its manifest is damaged or of a different version.
    None if there is no manifest, or it names no run; "" if something else has its name. Raises Unreadable."""
    path = folder / MANIFEST_NAME
    try:
        match = RUN_ID.search(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in NOT_THE_FILE:
            raise unreadable(path, error) from None
        return ""
    return None if match is None else match[1].decode(errors="replace")


def differs(path: Path, sample: tuple[int, str], nbytes: int, checksum: str) -> DataError:
    return DataError(
        f"{path}: {sample[0]} bytes with checksum {sample[1]}, but the manifest says {nbytes} and {checksum}"
    )


def checked_file(root: Path, file: RowFile | DenseFile) -> Path:
    """Returns the path of a file that a manifest names. Raises DataError if its size or checksum differs, and
    Unreadable."""
    path = root / file.file
    try:
        sample = file_checksum(path)
    except OSError as error:
        raise missing(path, "a file of the checkpoint cannot be read", error) from None
    if sample != (file.nbytes, file.checksum):
        raise differs(path, sample, file.nbytes, file.checksum)
    return path


def checkpoint_folders(root: Path) -> list[Path]:
    """Lists the checkpoints in `root`, newest step first. Only checks that each has a manifest. Raises Unreadable."""
    names = sorted(filter(FOLDER_NAME.fullmatch, listed_in(root)), reverse=True)
    return [root / name for name in names if MANIFEST_NAME in listed_in(root / name)]


def beside(root: Path) -> tuple[Path, Path]:
    """Returns where a fresh run keeps its checkpoints until it replaces the run in `root`, and where it moves the old
    ones."""
    return root.with_name(f".{root.name}.new"), root.with_name(f".{root.name}.replaced")


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Returns the folder of a run's checkpoint with the highest step, or None. Only checks that it has a manifest."""
    return next(iter(checkpoint_folders(run_dir / "checkpoints")), None)


SHARD_VERSION = 4
SHARD_NAME = r"shard-[0-9]{3,}\.json"  # of `shard_name`
OF_A_RANK = re.compile(r".*-r([0-9]{3,})-[0-9]{5}\.safetensors|shard-([0-9]{3,})\.json(?:\.partial)?")


class ShardFile(Sealed, frozen=True, kw_only=True):
    """The file by which a rank declares its shard of a checkpoint durable.

    rank 3    row files ... | shard-003.json      waits until it sees the manifest
    rank 0    row files ... |    waits for the files of all other ranks    | removes these, writes the manifest
    """

    number: int
    count: int
    run_id: str
    position: Position  # the checkpoint's
    after: str  # checksum of the manifest whose files its layers also name; "" if they name only new ones
    model_state: str  # xxh3_64 of the model state that its trainer holds, 16 hex digits
    shard: ShardLayers

    def __post_init__(self) -> None:
        check_position(self.position)
        if not 0 <= self.number < self.count:
            raise ValueError(f"shard {self.number} of {self.count} is impossible")
        if not CHECKSUM.fullmatch(self.model_state):
            raise ValueError(f"the checksum {self.model_state!r} of a model state is not 16 hex digits")


def shard_name(number: int) -> str:
    return f"shard-{number:03d}.json"


def writer_of(name: str, count: int) -> int:
    """Returns which rank of `count` writes files of this name. Files without a rank are rank 0's."""
    match = OF_A_RANK.fullmatch(name)
    number = 0 if match is None else int(match[1] or match[2])
    return number if number < count else 0


def read_shard_file(path: Path) -> ShardFile | None:
    """Reads a shard file; None if it does not exist yet. Raises DataError if it is unreadable or changed since it was
    written, and Unreadable."""
    try:
        return read_sealed(path, {SHARD_VERSION: ShardFile}, "shard file")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise missing(path, "the shard file cannot be read", error) from None
