"""Reads Parquet: a feature is the column of its name, with one id per sample or a list of ids (a bag; null = empty).

Ids are integers or, under data.columns.hash, strings. A null id is missing, in a list too. data.columns names the
labels and the dense columns; their values are used unchanged. A feature's weights are a column of numbers, or of lists
as long as its lists of ids. `parquet_files.py` reads the files.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.arrow_rows import RowDecoder, is_list
from rowcast.prefetcher.readers.column_roles import Roles, require_columns, roles_of
from rowcast.prefetcher.readers.column_rows import ColumnRows, open_named_columns
from rowcast.prefetcher.readers.formats.parquet_files import ParquetFiles
from rowcast.prefetcher.readers.hashed_ids import can_hash, is_all_missing, is_text, type_of
from rowcast.prefetcher.readers.id_check import IdCheck, job_features
from rowcast.prefetcher.readers.prepare import AS_IT_IS, Rules
from rowcast.prefetcher.readers.reader import Columns
from rowcast.prefetcher.readers.row_reader import RowReader
from rowcast.runtime.errors import ConfigError, DataError


def open_reader(job: Job, columns: Columns = "all") -> RowReader:
    """Raises ConfigError for a missing path or column, DataError for a file that is empty, damaged or mistyped."""
    if job.data.hash:
        raise ConfigError(
            "data.hash: parquet ids are used as they are; remove it, or set data.columns.hash = true to hash them"
        )
    return open_named_columns(job, columns, rows_of)


def rows_of(job: Job, ids: IdCheck, part: Columns, paths: list[Path]) -> ColumnRows:
    files = ParquetFiles(paths, job_features(job))
    roles = roles_in(job, files.paths, files.schemas, ids)
    return ColumnRows(files, roles.names(part), RowDecoder(job, roles, ids), roles.dense, part)


def roles_in(job: Job, paths: list[Path], schemas: list[Any], ids: IdCheck) -> Roles:
    """Returns the roles of the first file's columns. Raises DataError or ConfigError for a file that does not have
    them, or whose ids have another type than those of a file before."""
    first = schemas[0]
    roles = roles_of(job, paths[0], first.names, lambda: [field.name for field in first if is_number(field.type)])
    for path, schema in zip(paths, schemas, strict=True):
        require_columns(job, roles, path, schema.names)
        check_types(roles, job.data.columns.prepare, path, schema)
        for feature in roles.features:
            if feature.hashed and not feature.by_value and not is_all_missing(kind := schema.field(feature.name).type):
                ids.note_type(feature.name, type_of(kind), str(path))
    return roles


def check_types(roles: Roles, rules: Rules, path: Path, schema: Any) -> None:
    """Raises DataError for a column of a type that its role does not allow."""
    for feature in roles.features:
        kind = schema.field(feature.name).type
        single = kind.value_type if is_list(kind) else kind
        may_be_hashed = can_hash(single, by_value=feature.by_value)
        if is_all_missing(kind):
            continue
        if feature.name in rules:
            require_numbers(rules, path, feature.name, single)
        elif feature.separator and is_text(single):
            continue
        elif not pa.types.is_integer(single) and not (feature.hashed and may_be_hashed):
            remedy = "; set data.columns.hash = true to use strings as ids" if may_be_hashed else ""
            raise DataError(
                f"{path}, column {feature.name}: the type is {kind}; it must be integers or lists of integers{remedy}"
            )
    arrays = [name for name in roles.inputs if name not in {feature.name for feature in roles.features}]
    for name in [*roles.labels, *roles.dense, *roles.weights, *arrays]:
        kind = schema.field(name).type
        if name in arrays and is_list(kind) and name not in roles.of:
            raise DataError(
                f"{path}, column {name}: the type is {kind}, and lists belong to the look-ups of a feature; set "
                f'data.of.{name} = "FEATURE"'
            )
        has_lists = is_list(kind) and (name in roles.weights or name in roles.of)
        require_numbers(rules, path, name, kind.value_type if has_lists else kind)


def require_numbers(rules: Rules, path: Path, name: str, kind: Any) -> None:
    is_mapped = rules.get(name, AS_IT_IS).map and can_hash(kind, by_value=True)
    if not (is_number(kind) or is_all_missing(kind) or is_mapped):
        raise DataError(f"{path}, column {name}: the type is {kind}; it must be numbers")


def is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
