"""Finds the files of a job's data and splits their rows into training and evaluation.

Samples the contents of data files, so that a restart detects different data in files of the same sizes.

Checkpoints keep the checksums (`runtime/disk.py`), so this rule must never change. It depends only on the
files' number and sizes:

    blocks of a file     1024 // number of files, but from 2 to 16
    bytes of a block     64 KiB, or as many as keep all blocks within 64 MiB
"""

import glob
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from rowcast.job.formats import format_of
from rowcast.job.schema import Job
from rowcast.runtime.checkpoint_manifest import DataFile, Manifest, ManifestOfVersion3
from rowcast.runtime.disk import sampled_file
from rowcast.runtime.errors import ConfigError, DataError, listed
from rowcast.runtime.telemetry.format_numbers import plural

MOST_BLOCKS = 1024  # of all files
BLOCKS_OF_A_FILE = (2, 16)
BLOCK_BYTES = 64 * 2**10
MOST_BYTES = 64 * 2**20  # of all files


def sampled(paths: Sequence[Path]) -> tuple[DataFile, ...]:
    """Reads at most MOST_BYTES. Raises ConfigError if a file cannot be read."""
    if not paths:
        return ()
    least, most = BLOCKS_OF_A_FILE
    num_blocks = min(max(MOST_BLOCKS // len(paths), least), most)
    block_bytes = min(BLOCK_BYTES, max(MOST_BYTES // (len(paths) * num_blocks), 1))
    return tuple(sample(path, num_blocks, block_bytes) for path in paths)


def sample(path: Path, num_blocks: int, block_bytes: int) -> DataFile:
    try:
        nbytes, checksum = sampled_file(path, num_blocks, block_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    return DataFile(path=os.fsencode(path).decode("utf-8", "replace"), nbytes=nbytes, checksum=checksum)


Key = Literal["path", "eval_path"]
KEYS: tuple[Key, ...] = ("path", "eval_path")
UNSEEN = (".", "_")  # names that begin so belong to the programs that write data


def files_of(job: Job, key: Key) -> list[Path]:
    """Returns the files of data.path or data.eval_path, in reading order; none if the job has none. Raises as
    `data_files`."""
    known, path, data = format_of(job.data.format), getattr(job.data, key), job.data
    if not known.has_files or path is None:
        return []
    apart = data.path if key == "eval_path" else data.eval_path
    return data_files(path, f"data.{key}", known.file_names, by_name=data.by_name, apart=apart or "")


def data_files(path: str, key: str, pattern: str, *, by_name: bool, apart: str) -> list[Path]:
    """Returns the files that `path` names: a file, a glob, or a folder's files that match `pattern`. Numbers in their
    names decide the order, or `by_name` the names. The files of `apart` may lie in a sub-folder: they are read too.

    Raises ConfigError with the job file's `key` if there are none, or for something named that is not read.
    """
    named, where, lacking = Path(path), f"{key} = {path!r}", "no such file, folder or glob"
    try:
        if named.is_dir():
            entries, lacking = list(named.iterdir()), f"the folder holds no file whose name matches {pattern}"
        else:
            matches = [named] if named.exists() else [Path(match) for match in glob.glob(path, recursive=True)]
            entries, pattern = [match for match in matches if not ("**" in path and match.is_dir())], ".*"
        files = [entry for entry in entries if is_data(entry, pattern, where, Path(apart or os.devnull))]
    except OSError as error:
        raise ConfigError(f"{where}: {error.filename} cannot be read ({error.strerror})") from None
    if not files:
        raise ConfigError(f"{where}: {lacking}")
    if "**" in path and len(by_target := {file.resolve(): file for file in files}) < len(files):
        twice = next(file for file in files if by_target[file.resolve()] != file)
        raise ConfigError(
            f"{where}: {twice} and {by_target[twice.resolve()]} are one file; remove the link between them"
        )
    return sorted(files) if by_name else sorted(files, key=numbered)


def is_data(path: Path, pattern: str, where: str, apart: Path) -> bool:
    """Raises ConfigError, which begins with `where`, for files in a folder, and for a name of no regular file."""
    if path.is_dir():
        is_apart = path.name.startswith(UNSEEN) or apart.absolute().is_relative_to(path.absolute())
        if not is_apart and (within := file_within(path, pattern)):
            raise ConfigError(
                f"{where}: {within} lies in a sub-folder, whose files are not read; move them, or name all files by a "
                f"glob such as {path.parent / '**' / f'*{within.suffix}'}"
            )
        return False
    if not re.fullmatch(pattern, path.name):
        return False
    if not path.exists():
        raise ConfigError(
            f"{where}: {path} is a link to {os.readlink(path)}, which is gone; restore that file, or remove the link"
        )
    if not path.is_file():
        raise ConfigError(f"{where}: {path} is a FIFO, socket or device; give a file with its content, or remove it")
    return True


def file_within(folder: Path, pattern: str) -> Path | None:
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(UNSEEN)]
        for name in names:
            if re.fullmatch(pattern, name):
                return Path(path, name)
    return None


def numbered(path: Path) -> tuple[list[list[tuple[str, int]]], Path]:
    """Compares paths as their names do, but digits in a row as one number; of equal ones the names decide."""
    parts = [re.findall(r"([0-9]+)|([^0-9])", part) for part in path.parts]
    return [[(other or "0", int(digits or "0")) for digits, other in part] for part in parts], path


def with_recorded_rule(job: Job, checkpoint: Manifest) -> Job:
    """Returns the job with the `data.columns.value_rule` of the checkpoint's run."""
    columns, was = job.data.columns, checkpoint.job["data"]["columns"]
    rule = was.get("value_rule", columns.value_rule)
    return replace(job, data=replace(job.data, columns=replace(columns, value_rule=rule)))


def in_recorded_order(job: Job, checkpoint: Manifest) -> Job:
    """Returns the job with the `data.by_name` of the checkpoint's run: older versions read files in the order of their
    names. Only two files whose orders by number and by name differ can show it; without such files the job stays
    as it is."""
    if isinstance(checkpoint, ManifestOfVersion3) and not checkpoint.is_import:
        return ordered(job, by_name=True)
    recorded = [] if checkpoint.trained_on is None else [file.path for file in checkpoint.trained_on.files]
    places = {PurePath(path).name: place for place, path in reversed([*enumerate(recorded)])}  # files may have moved
    places |= {path: place for place, path in reversed([*enumerate(recorded)])}
    with suppress(ConfigError):  # the reader raises it too
        for first, second in (pair for key in KEYS for pair in pairwise(files_of(ordered(job, by_name=False), key))):
            here = [places.get(str(file), places.get(file.name)) for file in (first, second)]
            if first > second and here[0] is not None and here[1] is not None:
                return ordered(job, by_name=here[1] < here[0])
    return job


def ordered(job: Job, *, by_name: bool) -> Job:
    return replace(job, data=replace(job.data, by_name=by_name))


def files_text(job: Job) -> str:
    """`12 files, days/day_0 to days/day_11`; the format for data without files. Raises as `data_files`."""
    order = " in the order of their names" if job.data.by_name else ""
    followed = [f"files that arrive in {job.data.path}{order}"] if job.data.follow else []
    keys = KEYS[len(followed) :]
    texts = followed + [listed_files(getattr(job.data, key), files_of(job, key), order) for key in keys]
    return "; evaluation: ".join(dict.fromkeys(filter(None, texts))) or job.data.format


def listed_files(path: str, files: Sequence[Path], order: str) -> str:
    """Returns how many files a path names, the first, the last, and what a folder holds besides; "" for none."""
    if not files:
        return ""
    text = f"{plural(len(files), 'file')}{order}, {files[0]}" + (f" to {files[-1]}" if len(files) > 1 else "")
    inside = {file for file in Path(path).iterdir() if not file.is_dir()} if Path(path).is_dir() else set()
    if others := sorted(file.name for file in inside.difference(files) if not file.name.startswith(UNSEEN)):
        text += f" (left out: {plural(len(others), 'other')}, such as {others[0]})"
    return os.fsencode(text).decode("utf-8", "replace")


class NoRows(DataError):
    """The files have no row."""


def no_rows(paths: Sequence[Path]) -> NoRows:
    hold = "holds" if len(paths) == 1 else "hold"
    return NoRows(f"{listed([str(path) for path in paths], 1)} {hold} no row; give at least one file with rows")


class FileState(NamedTuple):
    """What differs, as a rule, if a file does."""

    nbytes: int
    mtime_ns: int
    inode: int
    ctime_ns: int = 0  # which no program can set back; records of earlier versions have none


def file_state(path: Path) -> FileState:
    """Raises ConfigError."""
    try:
        now = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    return FileState(now.st_size, now.st_mtime_ns, now.st_ino, now.st_ctime_ns)


def is_gzip(path: Path) -> bool:
    """Decides by the first bytes, whatever the name. Raises OSError."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def split_rows(num_rows: int, eval_fraction: float) -> tuple[range, range]:
    """Returns (train, eval): the last floor(num_rows * eval_fraction) rows are for evaluation."""
    num_train = num_rows - math.floor(num_rows * eval_fraction)
    return range(num_train), range(num_train, num_rows)


def cumulative(counts: list[int]) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]


def eval_path(job: Job) -> str | None:
    """Returns data.eval_path. Raises ConfigError if data.eval_fraction is given as well."""
    if job.data.eval_path is not None and job.data.eval_fraction > 0:
        raise ConfigError(
            "data.eval_path and data.eval_fraction are both given; remove one: either names the evaluation rows"
        )
    return job.data.eval_path
