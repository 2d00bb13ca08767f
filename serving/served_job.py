"""Reads from the job in `version.json` what serving needs. The job of a newer publisher may have more keys."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rowcast.job.embedding_tables import Table
from rowcast.job.file import check_tables
from rowcast.job.formats import Columns
from rowcast.job.schema import JobSection
from rowcast.job.section import decode
from rowcast.job.tables import TableSpec, specs_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedJob:
    seed: int
    tables: tuple[TableSpec, ...]
    weighted: frozenset[str]  # features that were trained with weights


TABLE_KEYS = {field.name for field in msgspec.structs.fields(Table)}


def served_job(content: dict[str, Any]) -> ServedJob:
    """Raises ValueError."""
    try:
        tables = [decode(Table, known(own, TABLE_KEYS), "tables") for own in content["tables"]]
        columns = decode(Columns, known(content["data"]["columns"], {"weights"}), "data.columns")
        check_tables(tables, columns)
        seed = decode(JobSection, known(content["job"], {"seed", "run_dir"}), "job").seed
    except (LookupError, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"not a job ({type(error).__name__}: {error})") from None
    return ServedJob(seed=seed, tables=specs_of(tables, frozenset()), weighted=frozenset(columns.weights))


def known(content: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: content[key] for key in keys if key in content}
