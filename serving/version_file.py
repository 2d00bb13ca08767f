"""Describes a version: one step of a run, in a folder that never changes.

    served/CURRENT                      the newest version's name and checksum, written last
           v000000000007/version.json   sealed: what follows, with checksums of all files
                         user.rows      `row_layout.py`, newest rows first
                         user.index     places u32 [cells], tags u16 [cells]
                         dense.safetensors

A *whole* version has all rows. A *changed* one has the rows that changed since the version before; a reader maps all
versions from the whole one on, which it names with their checksums. Earlier rowcasts wrote format 1, without these
names: there they have numbers in a row."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from rowcast.job.checks import check_tables
from rowcast.job.embedding_tables import ParameterTable, RowType, Table
from rowcast.job.formats import Columns, Prepare
from rowcast.job.schema import JobSection
from rowcast.job.tables import TableSpec, specs_of
from rowcast.prefetcher.readers.arrow_rows import Rules
from rowcast.protocol.first_values import Initializer, spec_of, table_initializer
from rowcast.runtime.checkpoint_manifest import Position, check_position
from rowcast.runtime.disk import CHECKSUM, Sealed, open_regular, read_sealed
from rowcast.runtime.errors import DataError
from rowcast.runtime.first_values import RowRule
from rowcast.serving.index_loops import CELL_BYTES, num_cells
from rowcast.serving.row_layout import DType

FORMAT = 2
CURRENT, VERSION_NAME, DENSE_NAME = "CURRENT", "version.json", "dense.safetensors"
FOLDER_NAME = re.compile(r"v([0-9]{12})")
CURRENT_TEXT = re.compile(r"v([0-9]{12})(?: ([0-9a-f]{16}))?\n")
CURRENT_BYTES = 64  # more than it ever has
FILE_NAME = re.compile(r"[A-Za-z0-9_.-]+\.(?:rows|index|safetensors)")
Rule = Literal[  # `raw_ids.py`
    "hash", "hash of text", "hash of integers", "hash by value", "hash by value 2", "remainder", "unsigned remainder",
    "buckets", "row",
]  # fmt: skip
CHECK_BYTES = 4 * 2**20  # of a file, per checksum
MOST_STACKED = 16  # versions that a reader maps


class Named(NamedTuple):
    """A version, by number and contents."""

    number: int  # 0: there is none yet
    checksum: str  # of its version.json; "" where an earlier rowcast wrote the name: any contents


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class FileChecksums(Part, frozen=True, kw_only=True):
    name: str
    nbytes: int
    checksums: tuple[str, ...]  # xxh3_64 of each CHECK_BYTES of the file, 16 hex digits

    def __post_init__(self) -> None:
        if not FILE_NAME.fullmatch(self.name) or self.name.startswith("."):
            raise ValueError(f"{self.name!r} is not the name of a file of a version")
        if self.nbytes < 0 or len(self.checksums) != -(-self.nbytes // CHECK_BYTES):
            raise ValueError(f"{self.name}: {len(self.checksums)} checksums of {self.nbytes} bytes are impossible")
        if not all(CHECKSUM.fullmatch(checksum) for checksum in self.checksums):
            raise ValueError(f"{self.name}: a checksum is not 16 hex digits")


class IdRule(Part, frozen=True, kw_only=True):
    """How raw ids of a feature become rows (`raw_ids.py`)."""

    feature: str
    table: str
    rule: Rule
    on_invalid: Literal["error", "modulo", "zero"]  # of "row": data.on_invalid_id


class TableFiles(Part, frozen=True, kw_only=True):
    name: str
    num_rows: int
    stride: int
    rows: FileChecksums
    index: FileChecksums

    def __post_init__(self) -> None:
        if not 0 <= self.num_rows < 2**32 or self.rows.nbytes != self.num_rows * self.stride:
            raise ValueError(
                f"{self.rows.name}: {self.num_rows} rows of {self.stride} bytes are not {self.rows.nbytes}"
            )
        if self.index.nbytes != num_cells(self.num_rows) * CELL_BYTES:
            raise ValueError(f"{self.index.name}: {self.index.nbytes} bytes are no index of {self.num_rows} rows")


class VersionFile(Sealed, frozen=True, kw_only=True):
    number: int  # ascends
    base: int  # the whole version that it needs; itself if it is whole
    below: tuple[Named, ...] = ()  # the versions from `base` on, below this one; () in format 1
    reason: str  # why it is whole; "" if it is not
    dtype: DType
    run_id: str
    checkpoint: str  # checksum of the checkpoint's manifest
    position: Position  # the checkpoint's
    layers: tuple[tuple[str, ...], ...]  # of each shard of the checkpoint, `layer_name`
    num_dense: int  # dense features per sample
    ids: tuple[IdRule, ...]
    tables: tuple[TableFiles, ...]  # in the job's order
    dense: FileChecksums
    job: dict[str, Any]  # complete and checked: tables, first values, seed, model

    def __post_init__(self) -> None:
        check_position(self.position)
        numbers = [*(stood_on.number for stood_on in self.stands_on[::-1]), self.number]
        if numbers[0] != self.base or self.base < 1 or len(numbers) > MOST_STACKED or numbers != sorted(set(numbers)):
            raise ValueError(f"version {self.number} on versions {numbers[:-1]} and the whole version {self.base}")
        if not self.num_dense >= 0:
            raise ValueError(f"num_dense = {self.num_dense} must be at least 0")

    @property
    def is_bound(self) -> bool:
        """Whether it records the checksums of its base version."""
        return self.version >= 2

    @property
    def named(self) -> Named:
        return Named(self.number, self.checksum)

    @property
    def stands_on(self) -> list[Named]:
        """The versions below it, newest first."""
        if self.is_bound:
            return list(self.below[::-1])
        return [
            Named(number, "") for number in range(self.number - 1, max(self.base, self.number - MOST_STACKED) - 1, -1)
        ]

    @property
    def is_whole(self) -> bool:
        return self.base == self.number

    @property
    def kind(self) -> str:
        return "whole" if self.is_whole else "changed"

    @property
    def num_rows(self) -> int:
        return sum(table.num_rows for table in self.tables)

    @property
    def files(self) -> Iterator[FileChecksums]:
        for table in self.tables:
            yield table.rows
            yield table.index
        yield self.dense

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def version_name(number: int) -> str:
    return f"v{number:012d}"


def read_version(folder: Path, named: Named) -> VersionFile:
    """Raises DataError if the file is missing, changed or of another format, or of another version than the named."""
    path = folder / version_name(named.number) / VERSION_NAME
    try:
        version = read_sealed(path, {1: VersionFile, FORMAT: VersionFile}, "version")
    except OSError as error:
        raise unreadable(path, error) from None
    if version.number != named.number:
        raise DataError(f"{path}: version {version.number} is in the folder of another")
    if version.checksum != (named.checksum or version.checksum):
        raise DataError(
            f"{path}: the version has checksum {version.checksum}, but what names it says {named.checksum}: another "
            "version took its place; `rowcast publish --check` writes a whole version"
        )
    return version


def read_current(folder: Path) -> Named:
    """Returns the newest version. Raises DataError if CURRENT does not hold a name."""
    path = folder / CURRENT
    try:
        with open_regular(path) as file:
            content = file.read(CURRENT_BYTES)
    except FileNotFoundError:
        return Named(0, "")
    except OSError as error:
        raise unreadable(path, error) from None
    match = CURRENT_TEXT.fullmatch(content.decode("ascii", "replace"))
    if match is None:
        raise DataError(f"{path}: {content[:40]!r} names no version; run `rowcast publish --check`")
    return Named(int(match[1]), match[2] or "")


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{error.filename or path}: a file of the version cannot be read ({error.strerror})")


def blocks_of(path: Path, nbytes: int = CHECK_BYTES) -> Iterator[bytes]:
    """Yields a file in blocks, and leaves no page in memory that was not mapped. Raises OSError."""
    with open_regular(path) as file:
        while block := file.read(nbytes):
            yield block
            os.posix_fadvise(file.fileno(), file.tell() - len(block), len(block), os.POSIX_FADV_DONTNEED)


def checksums_of(path: Path) -> tuple[str, ...]:
    return tuple(xxhash.xxh3_64_hexdigest(block) for block in blocks_of(path))


def check_file(folder: Path, file: FileChecksums) -> None:
    """Reads a file. Raises DataError with the first block that differs, and OSError."""
    path = folder / file.name
    check_size(folder, file)
    for number, (checksum, expected) in enumerate(zip(checksums_of(path), file.checksums, strict=False)):
        if checksum != expected:
            raise DataError(
                f"{path}: block {number} of {CHECK_BYTES} bytes has checksum {checksum}, but version.json says "
                f"{expected}; `rowcast publish --check` writes a whole version"
            )


def check_size(folder: Path, file: FileChecksums) -> None:
    path = folder / file.name
    size = path.stat().st_size
    if size != file.nbytes:
        raise DataError(
            f"{path}: {size} bytes, but version.json says {file.nbytes}; `rowcast publish --check` writes a whole "
            "version"
        )


# the job in `version.json`, of which a newer publisher may have more keys


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedJob:
    seed: int
    tables: tuple[TableSpec, ...]
    weighted: frozenset[str]  # features that were trained with weights
    prepare: Rules  # of columns
    gradients: RowType  # `ranks.gradients`
    rules: Mapping[str, RowRule]  # of tables that the job's seed does not decide, by name

    def first(self, table: TableSpec) -> Initializer:
        rule = self.rules.get(table.name)
        return table_initializer(*((self.seed, table) if rule is None else (rule.seed, spec_of(rule))))


class ServedTable(ParameterTable, frozen=True, kw_only=True, forbid_unknown_fields=False):
    pass


def served_job(content: dict[str, Any]) -> ServedJob:
    """Raises ValueError."""
    try:
        served = msgspec.convert(content["tables"], tuple[ServedTable, ...])
        tables: list[Table] = [*served]
        given = content["data"]["columns"]
        prepare = msgspec.convert(
            given.get("prepare", {}), dict[str, Prepare]
        )  # versions of an earlier rowcast have none
        columns = Columns(weights=given["weights"])
        check_tables(tables, columns)
        gradients = msgspec.convert(content.get("ranks", {}).get("gradients", "fp32"), RowType)
        seed = JobSection(seed=content["job"]["seed"], run_dir="any").seed
    except (AttributeError, LookupError, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"not a job ({type(error).__name__}: {error})") from None
    tables_of = specs_of(tables, frozenset())
    return ServedJob(
        seed=seed,
        tables=tables_of,
        weighted=frozenset(columns.weights),
        prepare=prepare,
        gradients=gradients,
        rules={table.name: table.rule for table in served if table.rule is not None},
    )
