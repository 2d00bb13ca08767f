"""Finds how a job differs from the one that made a checkpoint, in everything that decides the results.

A checkpoint keeps its whole job, defaults included, and a checksum of each data file. Both are compared one by one, so
that a refusal names what differs, and so that jobs of two versions can be compared:

    a key that was added since      had what is its default now
    a default that has changed      differs: the checkpoint has the old one
    a key that was removed since    differs if it was set
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePath
from typing import Any

import msgspec

from rowcast.job.embedding_tables import Table
from rowcast.job.file import refuse_script
from rowcast.job.schema import Job, digest
from rowcast.job.section import Section, default_of, defaults_of_other_kinds, keys_of
from rowcast.job.types import shown
from rowcast.runtime.checkpoint_manifest import (
    DataFile,
    Manifest,
    ManifestOfVersion3,
    TrainingData,
    newest_checkpoint,
    readable,
)
from rowcast.runtime.errors import ConfigError, Mismatch, instead, listed
from rowcast.runtime.run_directory import RunDirectory

# where the data is and how often it is read, but of files their order; which rank owns a table; what a run keeps
NOT_COUNTED = {"data.path", "data.by_name", "data.eval_path", "data.epochs", "data.copies", "placement"}
NOT_COUNTED |= {"data.columns.value_rule", "data.copies_limit"}
# what becomes of invalid ids, of a run that would have ended at the first one: it has trained none
UNUSED = ("data.on_invalid_id", "error")
# what must be unchanged even before the first step: the rows and their first values
OF_ROWS = ("table", "job.seed", "optimizer.sparse.kind", "optimizer.sparse.master")
# which samples are trained, and when: an evaluation may have others
ONLY_OF_TRAINING = (
    *("data.batch_size", "data.eval_fraction", "data.shuffle", "data.on_invalid_id"),
    *("data.columns.label", "data.columns.label_values", "data.columns.delimiter", "data.columns.lists"),
    "data.columns.names",
    *("data.synthetic", "data.options", "data.follow"),
)
MOST_NAMED = 3  # differing in a sentence


def check_belongs(checkpoint: Manifest, job: Job, data: TrainingData) -> None:
    """Raises Mismatch, which names the first differing, if the job cannot continue from this checkpoint."""
    differing = differing_settings(checkpoint, job) or list(data_differences(checkpoint, data))
    if differing:
        raise Mismatch(
            f"the checkpoint after {checkpoint.train_steps} train steps in {job.run_dir} is of another job: "
            f"{first_of(differing)}; use the job file and the data that made it, or set another job.run_dir, and add "
            f"--from {job.run_dir} to train its model on new data"
        )


def check_can_evaluate(checkpoint: Manifest, job: Job, dense_names: Sequence[str]) -> None:
    """Raises Mismatch, which names the first differing, for another model than the checkpoint's, or other columns."""
    differing = [
        difference for difference in differing_settings(checkpoint, job) if not is_only_of_training(difference)
    ]
    differing += of_dense(checkpoint.trained_on, dense_names)
    if differing:
        raise Mismatch(
            f"the checkpoint after {checkpoint.train_steps} train steps in {job.run_dir} is of another model: "
            f"{first_of(differing)}; evaluate it with the job file that made it, on any data with its columns"
        )


def refuse_finished(directory: RunDirectory, job: Job, max_steps: int | None) -> None:
    """Raises ConfigError if the run is complete and this job would train no further step; names changed settings."""
    completion, newest = directory.completion(), newest_checkpoint(directory.path)
    if completion is None or completion.leaves_more(job.data.epochs, job.eval.patience, max_steps):
        return
    manifest = None if newest is None else readable(newest)
    if manifest is not None and (differing := differing_settings(manifest, job)):
        raise ConfigError(
            f"the run in {directory.path} finished after {completion.train_steps} train steps, and "
            f"{first_of(differing)}; to train another model with this, add --set job.run_dir=ANOTHER; to train it in "
            "place of this one, add --fresh"
        )
    directory.refuse_complete(job.data.epochs, job.eval.patience, max_steps)


def differing_settings(checkpoint: Manifest, job: Job) -> list[str]:
    refuse_script(checkpoint.job, f"the checkpoint after {checkpoint.train_steps} train steps in {job.run_dir}")
    differing = list(setting_differences(checkpoint.job, job))
    return (
        [difference for difference in differing if difference.startswith(OF_ROWS)]
        if checkpoint.is_import
        else differing
    )


def is_only_of_training(difference: str) -> bool:
    key = difference.partition(" ")[0]
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in ONLY_OF_TRAINING)


def first_of(differing: Sequence[str]) -> str:
    return listed(differing, MOST_NAMED, "; ")


# settings


def setting_differences(was: Mapping[str, Any], job: Job) -> Iterator[str]:
    """`was`: the job of a checkpoint, as its manifest has it."""
    yield from of_tables(was["tables"], job.tables)
    for name, section in (("model", job.model), ("optimizer", job.optimizer), ("data", job.data)):
        yield from of_section(f"{name}.", was[name], section)
    yield from of_value("job.seed", was["job"]["seed"], job.job.seed)
    yield from of_value("ranks.parts", num_parts(was), job.ranks.num_parts)
    yield from of_value("ranks.gradients", was["ranks"].get("gradients", "fp32"), job.ranks.gradients)


def of_tables(was: Sequence[Mapping[str, Any]], now: Sequence[Table]) -> Iterator[str]:
    for i, (before, name) in enumerate(zip_longest((table["name"] for table in was), (table.name for table in now))):
        if before != name:
            yield from of_value(f"tables[{i}].name", before, name)
            return
    for own, table in zip(was, now, strict=True):
        yield from of_section(f'table "{table.name}": ', own, table)


def of_section(prefix: str, was: Mapping[str, Any], now: Section) -> Iterator[str]:
    keys, others = keys_of(type(now)), defaults_of_other_kinds(now)
    for name, field in keys.items():
        key, value = f"{prefix}{name}", getattr(now, name)
        before = was[name] if name in was else msgspec.to_builtins(default_of(field))
        if isinstance(value, Section) and isinstance(before, Mapping):
            yield from of_section(f"{key}.", before, value)
        elif not {key, name} & NOT_COUNTED and (key, before) != UNUSED:
            yield from of_value(key, before, msgspec.to_builtins(value))
    for name in sorted(was.keys() - keys.keys()):
        if name in others:
            yield from of_value(f"{prefix}{name}", was[name], others[name])
        elif was[name] is not None:
            yield f"{prefix}{name} was {described(was[name])}, and this version has no such key"


def of_value(key: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in sorted(before.keys() | now.keys()):
            yield from of_value(f"{key}.{name}", before.get(name), now.get(name))
    elif as_json(before) != as_json(now):
        yield f"{key} is {described(now)}, and was {described(before)}"


def as_json(value: Any) -> bytes:
    """As a manifest has it, where 1 and 1.0 are two things."""
    return msgspec.json.encode(value, order="sorted")


def described(value: Any) -> str:
    return "not set" if value is None else shown(value)


def num_parts(was: Mapping[str, Any]) -> int:
    parts: int = was["ranks"]["parts"] or was["ranks"]["count"]
    return parts


# data


def data_differences(checkpoint: Manifest, data: TrainingData) -> Iterator[str]:
    was = checkpoint.trained_on
    if isinstance(checkpoint, ManifestOfVersion3):
        if not checkpoint.is_import and checkpoint.training_digest != digest_of_version_3(checkpoint.job, data):
            yield "the size of a data file differs"
    elif was is not None:
        if not checkpoint.job["data"].get("follow"):  # otherwise the decoders compare each file as they open it
            yield from of_files(was.files, data.files)
        yield from of_dense(was, data.dense_columns)


def of_dense(was: TrainingData | None, names: Sequence[str]) -> Iterator[str]:
    """By position they would go to one another's weights, without an error."""
    if was is not None and len(was.dense_columns) == was.num_dense and was.dense_columns != tuple(names):
        yield f"the dense columns are {instead(names, was.dense_columns)}"


def of_files(was: Sequence[DataFile], now: Sequence[DataFile]) -> Iterator[str]:
    pairs = [*zip_longest(was, now)]
    same_sizes = all(before is not None and file is not None and before.nbytes == file.nbytes for before, file in pairs)
    for before, file in pairs:
        if file is None:
            yield f"the data file {before.path} is missing"
        elif before is None:
            yield f"{file.path} is new"
        elif before.nbytes != file.nbytes:
            yield f"{named(file, before)} has {file.nbytes:,} bytes, and had {before.nbytes:,} before"
        elif same_sizes and before.checksum != file.checksum:  # of other files, samples are taken in other places
            yield f"{named(file, before)} has the same size as before, but other contents"


def named(file: DataFile, before: DataFile) -> str:
    is_same = PurePath(file.path).name == PurePath(before.path).name
    return file.path if is_same else f"{file.path} ({before.path} before)"


def digest_of_version_3(was: Mapping[str, Any], data: TrainingData) -> str:
    """Replaces `TrainingData` in manifests of version 3, with only the sizes of the data."""
    kept = {name: was[name] for name in ("tables", "model", "optimizer")}
    left_out = {*NOT_COUNTED, "data.order", "data.hot"}
    settings = {name: value for name, value in was["data"].items() if f"data.{name}" not in left_out}
    parts, sizes = num_parts(was), [file.nbytes for file in data.files]
    return digest([kept, settings, was["job"]["seed"], sizes, *([parts] if parts > 1 else [])])
