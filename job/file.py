"""Reads a job file (TOML or JSON), applies `--set` overrides, and adapts it to one pair of several."""

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rowcast.job.checks import check_whole
from rowcast.job.embedding_tables import Table
from rowcast.job.named_code import from_file
from rowcast.job.schema import CRITEO_KAGGLE_CARDINALITIES, Job
from rowcast.job.section import decode, without_removed
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.run_directory import Role, note_refusal, pair_folder


def load_job(path: str | Path, overrides: tuple[str, ...] = ()) -> Job:
    """Reads and checks a job file; `overrides` are `section.key=value` in TOML's notation. Raises ConfigError."""
    content = read_content(Path(path))
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


def with_values(job: Job, values: Mapping[str, Mapping[str, Any]]) -> Job:
    """Returns the job with other values in some sections, checked as a whole. Raises ConfigError."""
    content = msgspec.to_builtins(job)
    for section, changed in values.items():
        content[section] = {**content[section], **changed}
    return parse_job(content, "simulate")


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
    if not equals:
        raise ConfigError(f"--set {override}: write section.key=value")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    set_key(content, name.strip(), value)


def set_key(content: dict[str, Any], name: str, value: Any) -> None:
    """`name`: section.key. Raises ConfigError."""
    *sections, key = name.split(".")
    if not sections:
        raise ConfigError(f"{name} is no section.key, such as optimizer.sparse.lr")
    for section in sections:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            raise ConfigError(
                f"{name}: {section} is not a section; only section.key can be set, and [[tables]] in the file"
            )
    content[key] = value


def parse_job(content: dict[str, Any], source: str = "job") -> Job:
    """Checks the content of a job file. Raises ConfigError with one sentence that names the key."""
    try:
        job = decode(Job, content)
        job = msgspec.structs.replace(job, tables=resolve_tables(job), tables_from=None)
        if job.data.follow:
            job = msgspec.structs.replace(job, lookahead=job.lookahead.of_arriving_data())
        check_whole(job)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    return job


def parse_manifest_job(content: Mapping[str, Any], source: str) -> Job:
    """Like `parse_job`, for the job that a manifest of this version or an earlier one holds: code that it names is not
    imported. Raises ConfigError, also if a training script has written the manifest."""
    refuse_script(content, source)
    return from_file(parse_job(without_removed(content), source))


def refuse_script(content: Mapping[str, Any], source: str) -> None:
    """`content`: the job in a manifest. Raises ConfigError if a training script has written the manifest."""
    if not content:
        raise ConfigError(
            f"{source}: a training script has written it by rowcast.save, so there is no job; the script goes on by "
            "rowcast.restore, and `rowcast export`, `verify`, `publish` and serving read it"
        )


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
    names = ("embedding_dim", "dtype", "pooling", "init", "linear", "placement")
    shared = {name: getattr(job.tables_from, name) for name in names}
    return [
        Table(name=f"t_cat_{i}", num_embeddings=rows, features=[f"cat_{i}"], **shared)
        for i, rows in enumerate(cardinalities)
    ]


# one pair of prefetcher and trainer, among several on a host or in a run directory


def with_ports_of_pair(job: Job, rank: int) -> Job:
    """`job` with the ports of a rank, which count from those in the file: of metrics two for each rank of a host, of
    the link one."""
    local = rank % job.ranks.on_host
    metrics, transport = job.metrics, job.transport
    moved = {name: port_above(getattr(metrics, name), 2 * local) for name in ("prefetcher", "trainer")}
    if transport.is_tcp:
        transport = msgspec.structs.replace(transport, endpoint=port_above(transport.endpoint, local))
    return msgspec.structs.replace(job, metrics=msgspec.structs.replace(metrics, **moved), transport=transport)


def port_above(address: str, ports: int) -> str:
    """Adds to the port, except to 0, which means any free port."""
    host, _, given = address.rpartition(":")
    port = given.removesuffix("+")
    return address if int(port) == 0 else f"{host}:{int(port) + ports}{given.removeprefix(port)}"


def with_tables_of_pair(job: Job, rank: int) -> Job:
    """`job` for the stores of a rank: its run directory and its store.path are the pair's folders."""
    count, store = job.ranks.count, job.store
    if (path := getattr(store, "path", None)) is not None:
        store = msgspec.structs.replace(store, path=str(pair_folder(Path(path), rank, count)))
    own = msgspec.structs.replace(job.job, run_dir=str(pair_folder(job.run_dir, rank, count)))
    return msgspec.structs.replace(job, job=own, store=store)
