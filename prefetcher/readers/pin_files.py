"""Reads and writes pin files, which list rows that never leave the device once fetched.

    <table>       i64 [n], row numbers, ascending            one tensor per table with pinned rows
    __metadata__  format, version, checksum of the tensors, and where the rows came from

`rowcast profile` writes them, `cache.pin` names one, and `data.hot` names one whose rows make samples hot. The
numbers count within a table, so a file fits any job whose tables have these names, in any order and of any width.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rowcast.job.tables import GroupSpec, make_keys
from rowcast.runtime.arrays import I64
from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.errors import ConfigError, DataError

PIN_FORMAT = "rowcast-pins"
PIN_VERSION = "1"


def save_pins(path: Path, rows: Mapping[str, I64], facts: Mapping[str, str]) -> None:
    """Writes rows i64 [n] of each table, ascending. `facts`: where they came from, for people. Raises ConfigError."""
    tensors = {name: np.ascontiguousarray(own, np.int64) for name, own in sorted(rows.items()) if len(own)}
    for name, own in tensors.items():
        assert (np.diff(own, prepend=-1) > 0).all(), (
            f"rows of table {name} go from {own[0]} to {own[-1]}, but do not ascend"
        )
    metadata = {**facts, "format": PIN_FORMAT, "version": PIN_VERSION, "checksum": checksum(tensors)}
    try:
        write_durably(path, save(tensors, metadata=metadata))
    except OSError as error:
        raise ConfigError(
            f"{path}: the pin file cannot be written ({error.strerror}); choose another --out or free space"
        ) from None


def load_pins(path: Path, groups: tuple[GroupSpec, ...]) -> tuple[I64, ...]:
    """Returns the ascending keys of the pinned rows, one array per group. `groups` are all groups of the job.

    Raises ConfigError if there is no such file or it does not fit the job's tables, DataError if it is damaged.
    """
    rows = read_pins(path)
    tables = {table.name: table.num_embeddings for group in groups for table in group.tables}
    check_tables(rows, tables, f"cache.pin = {str(path)!r}")
    none = np.zeros(0, np.int64)
    return tuple(
        np.concatenate(
            [none, *(make_keys(table.index, rows[table.name]) for table in group.tables if table.name in rows)]
        )
        for group in groups
    )


def check_tables(rows: Mapping[str, I64], tables: Mapping[str, int], where: str) -> None:
    """Raises ConfigError, which begins with `where`, unless all rows are in `tables`: name -> number of rows."""
    for name, own in rows.items():
        if name not in tables:
            raise ConfigError(
                f"{where}: table {name} is not a table of this job; make the file with this job's own profile"
            )
        if own[-1] >= tables[name]:
            raise ConfigError(
                f"{where}: row {own[-1]} is outside table {name} (num_embeddings = {tables[name]}); "
                "make the file with this job's own profile"
            )


def read_pins(path: Path, key: str = "cache.pin") -> dict[str, I64]:
    """Returns rows i64 [n] of each table, n at least 1, ascending from 0. Raises as `load_pins`, with the job file's
    `key` that names the file."""
    where = f"{key} = {str(path)!r}"
    try:
        with safe_open(path, framework="numpy") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be read ({error.strerror or error}); make it with `rowcast profile --out`"
        ) from None
    except SafetensorError as error:
        raise DataError(
            f"{where}: not a whole pin file ({error}); make it again with `rowcast profile --out`"
        ) from None
    check_facts(where, facts)
    for name, own in tensors.items():
        check_rows(where, name, own)
    if checksum(tensors) != facts.get("checksum"):
        raise DataError(f"{where}: the rows do not have the checksum that was written with them; make the file again")
    return tensors


def check_facts(where: str, facts: Mapping[str, str]) -> None:
    if facts.get("format") != PIN_FORMAT:
        raise DataError(f"{where}: a safetensors file, but not a pin file; make one with `rowcast profile --out`")
    if facts.get("version") != PIN_VERSION:
        raise DataError(
            f"{where}: pin file version {facts.get('version')}, but this version reads {PIN_VERSION}; "
            "make the file again"
        )


def check_rows(where: str, table: str, rows: npt.NDArray[np.generic]) -> None:
    if rows.dtype != np.int64 or rows.ndim != 1 or not len(rows):
        raise DataError(
            f"{where}: the rows of table {table} are {rows.dtype}{list(rows.shape)}; "
            "they must be int64[n], n at least 1"
        )
    if not (np.diff(rows, prepend=-1) > 0).all():
        raise DataError(f"{where}: the rows of table {table} do not ascend from 0, each once; make the file again")


def checksum(tensors: Mapping[str, npt.NDArray[np.generic]]) -> str:
    """Returns the xxh3_64 of names and rows, 16 hex digits."""
    hasher = xxhash.xxh3_64()
    for name, own in sorted(tensors.items()):
        hasher.update(f"{name} {own.dtype.str} {own.shape} ".encode())
        hasher.update(np.ascontiguousarray(own).data)
    return hasher.hexdigest()
