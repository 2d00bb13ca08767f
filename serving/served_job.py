"""Reads from the job in `version.json` what serving needs. The job of a newer publisher may have more keys."""

from dataclasses import dataclass
from typing import Any

import msgspec

from rowcast.job.checks import check_tables
from rowcast.job.embedding_tables import Table
from rowcast.job.formats import Columns
from rowcast.job.schema import JobSection
from rowcast.job.tables import TableSpec, specs_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedJob:
    seed: int
    tables: tuple[TableSpec, ...]
    weighted: frozenset[str]  # features that were trained with weights


class ServedTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=False):
    pass


def served_job(content: dict[str, Any]) -> ServedJob:
    """Raises ValueError."""
    try:
        tables: list[Table] = [*msgspec.convert(content["tables"], tuple[ServedTable, ...])]
        columns = Columns(weights=content["data"]["columns"]["weights"])
        check_tables(tables, columns)
        seed = JobSection(seed=content["job"]["seed"], run_dir="any").seed
    except (LookupError, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"not a job ({type(error).__name__}: {error})") from None
    return ServedJob(seed=seed, tables=specs_of(tables, frozenset()), weighted=frozenset(columns.weights))
