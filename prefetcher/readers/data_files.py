"""Finds the files of a job's data and splits their rows into training and evaluation."""

import glob
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError


def data_files(path: str, key: str, pattern: str) -> list[Path]:
    """Returns the files that `path` names, in name order: a file, a glob, or a folder's files that match `pattern`.

    Raises ConfigError with the job file's `key` if there are none.
    """
    named = Path(path)
    if named.is_file():
        return [named]
    if named.is_dir():
        found = sorted(file for file in named.iterdir() if file.is_file() and re.fullmatch(pattern, file.name))
        if not found:
            raise ConfigError(f"{key} = {path!r}: the folder holds no file whose name matches {pattern}")
        return found
    found = sorted(file for file in map(Path, glob.glob(path)) if file.is_file())
    if not found:
        raise ConfigError(f"{key} = {path!r}: no such file, folder or glob")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSpan:
    """Consecutive rows of a data set, counted over all files."""

    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def is_gzip(path: Path) -> bool:
    """Decides by the first bytes, whatever the name. Raises OSError."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def split_rows(num_rows: int, eval_fraction: float) -> tuple[FileSpan, FileSpan]:
    """Returns (train, eval): the last floor(num_rows * eval_fraction) rows are for evaluation."""
    num_train = num_rows - math.floor(num_rows * eval_fraction)
    return FileSpan(start=0, stop=num_train), FileSpan(start=num_train, stop=num_rows)


def cumulative(counts: list[int]) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]


def eval_path(job: Job) -> str | None:
    """Returns data.eval_path. Raises ConfigError if data.eval_fraction is given as well."""
    if job.data.eval_path is not None and job.data.eval_fraction > 0:
        raise ConfigError(
            "data.eval_path and data.eval_fraction are both given; remove one: either names the evaluation rows"
        )
    return job.data.eval_path
