"""Reads a job file (TOML or JSON), applies `--set` overrides, and checks the sections together."""

import tomllib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rowcast.job.batch_arrays import check_batch_arrays
from rowcast.job.embedding_tables import Table
from rowcast.job.formats import Columns
from rowcast.job.model_inputs import check_model_inputs
from rowcast.job.removed import without_removed
from rowcast.job.row_optimizers import ROW_OPTIMIZERS
from rowcast.job.schema import CRITEO_KAGGLE_CARDINALITIES, MAX_TABLES, Job
from rowcast.job.section import decode
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import group_specs, rows_in
from rowcast.job.units import parse_bytes
from rowcast.runtime.errors import ConfigError, nearest
from rowcast.runtime.run_directory import Role, note_refusal


def load_job(path: Path, overrides: tuple[str, ...] = ()) -> Job:
    """Reads and checks a job file; `overrides` are `section.key=value` in TOML's notation. Raises ConfigError."""
    content = read_content(path)
    for override in overrides:
        apply_override(content, override)
    return parse_job(content, str(path))


def load_own_job(role: Role, path: Path, overrides: tuple[str, ...]) -> Job:
    """Like `load_job`, for a process with a peer. If only its `overrides` are refused, a waiting peer ends with it."""
    try:
        return load_job(path, overrides)
    except ConfigError as error:
        with suppress(ConfigError):
            run_dir = load_job(path, tuple(own for own in overrides if own.startswith("job.run_dir="))).run_dir
            note_refusal(run_dir, role, error)
        raise


def read_content(path: Path) -> dict[str, Any]:
    """Parses a job file: JSON if its name ends in .json, else TOML. Raises ConfigError."""
    language = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text(encoding="utf-8")
        return msgspec.json.decode(text, type=dict[str, Any]) if language == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the job file ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a {language} file ({error})") from None


def apply_override(content: dict[str, Any], override: str) -> None:
    """Sets one `section.key=value`; a value that is not TOML is taken as a string. Raises ConfigError."""
    name, equals, text = override.partition("=")
    *sections, key = name.strip().split(".")
    if not equals or not sections:
        raise ConfigError(f"--set {override}: write section.key=value")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for section in sections:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            raise ConfigError(f"--set {override}: {section} is not a section; only section.key=value can be set")
    content[key] = value


def parse_job(content: dict[str, Any], source: str = "job") -> Job:
    """Checks the content of a job file. Raises ConfigError with one sentence that names the key."""
    try:
        job = decode(Job, content)
        job = msgspec.structs.replace(job, tables=resolve_tables(job), tables_from=None)
        check_whole(job)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    return job


def parse_manifest_job(content: Mapping[str, Any], source: str) -> Job:
    """Like `parse_job`, for the job that a manifest of this version or an earlier one names."""
    return parse_job(without_removed(content), source)


def resolve_tables(job: Job) -> list[Table]:
    if job.tables_from is None:
        return job.tables
    if job.tables:
        raise ValueError("give either [[tables]] or [tables_from], not both")
    cardinalities = job.tables_from.cardinalities
    if cardinalities is None:
        if job.data.synthetic.preset is None:
            raise ValueError("tables_from: cardinalities = [...] is missing")
        cardinalities = [max(1, round(rows * job.data.synthetic.scale)) for rows in CRITEO_KAGGLE_CARDINALITIES]
    shared = {name: getattr(job.tables_from, name) for name in ("embedding_dim", "dtype", "pooling", "init", "linear")}
    return [
        Table(name=f"t_cat_{i}", num_embeddings=rows, features=[f"cat_{i}"], **shared)
        for i, rows in enumerate(cardinalities)
    ]


def check_tables(tables: list[Table], columns: Columns) -> dict[str, Table]:
    """Returns the table of each feature. Raises ValueError for tables and columns that do not fit together."""
    if not tables:
        raise ValueError("no tables; give [[tables]] or [tables_from]")
    if len(tables) > MAX_TABLES:
        raise ValueError(f"{len(tables)} tables are more than {MAX_TABLES}")
    features = [feature for table in tables for feature in table.features]
    for kind, names in (("table", [table.name for table in tables]), ("feature", features)):
        for name in sorted(name for name, count in Counter(names).items() if count > 1):
            raise ValueError(f"{kind} {name} appears more than once in [[tables]]")
    by_feature = {feature: table for table in tables for feature in table.features}
    hashed = [] if isinstance(columns.hash, bool) else columns.hash
    for key, features in (("weights", list(columns.weights)), ("lists", list(columns.lists)), ("hash", hashed)):
        for feature in features:
            if feature not in by_feature:
                near = nearest(feature, by_feature)
                raise ValueError(
                    f"data.columns.{key}: feature {feature} has no table{near}; add it to a table's features"
                )
    for feature in columns.weights:
        if by_feature[feature].pooling == "mean":
            raise ValueError(
                f'data.columns.weights: feature {feature} is pooled by mean; a weighted mean is refused, use "sum"'
            )
    return by_feature


def check_whole(job: Job) -> None:
    """Checks the sections together. Raises ValueError."""
    by_feature = check_tables(job.tables, job.data.columns)
    check_batch_arrays(job.data, by_feature)
    check_model_inputs(job)
    for table in job.tables:
        if job.model.compile and table.pooling == "none":
            raise ValueError(
                f'model.compile: table {table.name} has pooling = "none", so every batch has another shape and '
                "would be compiled again; remove model.compile"
            )
    if job.model.compile and job.data.batch_size % job.ranks.num_parts:
        raise ValueError(
            f"model.compile: data.batch_size = {job.data.batch_size} is not a multiple of ranks.parts = "
            f"{job.ranks.num_parts}, so parts would have two shapes; change one of them, or remove model.compile"
        )
    for table in job.tables:
        if table.linear and any(state.per_row for state in ROW_OPTIMIZERS[job.optimizer.sparse.kind].states):
            raise ValueError(
                f"table {table.name} has linear = true, but {job.optimizer.sparse.kind} keeps one state for a row as a "
                'whole; set optimizer.sparse.kind = "adagrad"'
            )
        if table.linear and job.optimizer.sparse.clip_rows is not None:
            raise ValueError(
                f"table {table.name} has linear = true, but optimizer.sparse.clip_rows takes the norm of a row as a "
                "whole; remove one of them"
            )
    if job.optimizer.sparse.master and all(table.dtype == "fp32" for table in job.tables):
        raise ValueError(
            "optimizer.sparse.master = true keeps fp32 weights beside rounded ones, but every table has "
            'dtype = "fp32"; remove it, or set dtype = "bf16"'
        )
    kinds = {(table.width, table.dtype) for table in job.tables}
    if job.cache.capacity_rows is not None and len(kinds) > 1:
        raise ValueError(
            f'cache.capacity: "{job.cache.capacity}" counts rows, but the tables have rows of {len(kinds)} widths or '
            'dtypes; give bytes, such as "64MiB"'
        )
    if isinstance(job.store, StoreWithTier) and job.cache.policy != "lookahead":
        raise ValueError(
            f'store.kind = "{job.store.kind}" chooses the rows in memory by cache.policy = "lookahead", not '
            f'"{job.cache.policy}"; remove cache.policy, or set another store.kind'
        )
    check_group_shares(job)


def check_group_shares(job: Job) -> None:
    """Checks that cache.groups names known groups and gives each at least a row, all within cache.capacity."""
    if not job.cache.groups:
        return
    groups = {group.name: group for group in group_specs(job)}
    for name, share in job.cache.groups.items():
        if name not in groups:
            raise ValueError(f"cache.groups: {name} is no group of this job; it has {', '.join(groups)}")
        if rows_in(groups[name], share) < 1:
            raise ValueError(
                f"cache.groups.{name} = {share!r} is less than one row of {groups[name].record_bytes} bytes; give more"
            )
    taken = sum(rows_in(groups[name], share) * groups[name].record_bytes for name, share in job.cache.groups.items())
    rows, (first, *_) = job.cache.capacity_rows, groups.values()
    capacity = parse_bytes(job.cache.capacity) if rows is None else rows * first.record_bytes
    if taken > capacity:
        raise ValueError(
            f"cache.groups: the named groups take {taken} bytes, more than cache.capacity = {job.cache.capacity!r} "
            f"({capacity} bytes); give them less or raise it to {taken} bytes or more"
        )
