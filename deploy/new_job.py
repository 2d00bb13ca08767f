"""`rowcast.new`: the job that `rowcast new` proposes for files or for a frame in memory, in Python."""

import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from hashlib import file_digest
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq
from rich.console import Console

from rowcast.analysis.new.new import proposed, written
from rowcast.analysis.new.roles import Wish
from rowcast.analysis.show import AnalysisProgress
from rowcast.deploy.frames import FRAME, arrow_table, names_of
from rowcast.job.file import parse_job, set_key
from rowcast.runtime.errors import ConfigError, DataError, advice

FRAMES = Path("runs")  # beside the run directories that `new` proposes


class NewJob:
    """A proposed job. Printed, it shows the role of each column, and why.

    text         the job file: TOML, with a reason for every choice
    content()    the same as a dict, with what was changed since: `job["data.epochs"] = 3`
    """

    def __init__(self, text: str, roles: str) -> None:
        self.text, self._roles = text, roles
        self._content = tomllib.loads(text)

    def __repr__(self) -> str:
        return self._roles

    def __setitem__(self, key: str, value: Any) -> None:
        """Changes a key of the job. Raises ConfigError."""
        set_key(content := self.content(), key, value)
        parse_job(content, "the new job")
        self._content = content

    def content(self) -> dict[str, Any]:
        return deepcopy(self._content)


def new(
    data: Any,
    label: str = "",
    *,
    dense: Sequence[str] = (),
    ids: Sequence[str] = (),
    names: Sequence[str] = (),
    lists: Mapping[str, str] | None = None,
) -> NewJob:
    """Returns the job that `rowcast new` proposes, with the options of these names.

    data: a file, folder or glob, or a frame as for `Run.predict`. A frame is written to `runs/frame-<checksum>.parquet`
    first, since the prefetcher reads files. Raises ConfigError and DataError."""
    path = str(data) if isinstance(data, str | Path) else str(file_of(data))
    wish = Wish(label=label, dense=[*dense], ids=[*ids])
    text, summary = proposed(path, wish, names, dict(lists or {}), AnalysisProgress())
    return NewJob(text, written(summary, Console(file=StringIO(), highlight=False)).rstrip())


def file_of(frame: Any) -> Path:
    """Writes a frame under a name that its content decides. Returns where. Raises ConfigError and DataError."""
    names = names_of(frame)
    if others := [name for name in names if not isinstance(name, str)]:
        raise DataError(f"{FRAME} has a column called {others[0]!r}; give every column a name of text")
    table = arrow_table(frame, names).replace_schema_metadata(None)
    try:
        FRAMES.mkdir(exist_ok=True)
        with TemporaryDirectory(prefix=".frame-", dir=FRAMES) as folder:
            pq.write_table(table, written := Path(folder) / "frame")
            with written.open("rb") as file:
                checksum = file_digest(file, "sha256").hexdigest()[:16]
            return written.rename(FRAMES / f"frame-{checksum}.parquet")
    except OSError as error:
        raise ConfigError(
            f"{FRAME} cannot be written to {FRAMES.absolute()} ({error.strerror}); "
            f"{advice(error.errno, 'work in another folder')}"
        ) from None
    except pa.ArrowException as error:
        raise DataError(
            f"{FRAME} cannot be written as Parquet ({error}); correct it, or leave the column out"
        ) from None
