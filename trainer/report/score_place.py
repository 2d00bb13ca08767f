"""Where scores may be written. `rowcast score` checks this first, without the memory that pyarrow takes."""

import os
from pathlib import Path

from rowcast.runtime.errors import ConfigError

SUFFIXES = (".csv", ".parquet")


def check_place(path: Path, option: str) -> None:
    """Raises ConfigError unless a new file of a known format can be there."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{option} = {str(path)!r}: the name must end in {' or '.join(SUFFIXES)}")
    if os.path.lexists(path):
        raise ConfigError(f"{option} = {str(path)!r} exists; remove it, or give another name")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} = {str(path)!r}: the folder {path.parent} does not exist; make it")
