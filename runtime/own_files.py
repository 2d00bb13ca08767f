"""Recognizes files that rowcast wrote, so that no other is removed; opens files that others may have put there."""

import errno
import os
import re
import stat
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO


def is_own_file(path: Path, names: re.Pattern[str]) -> bool:
    """Returns whether it is a file with such a name, not a link. True for a file that is gone. Raises OSError."""
    try:
        return names.fullmatch(path.name) is not None and stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True


def own_files_in(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """Lists rowcast's files in a folder; none if the folder is a link or does not exist. Raises OSError."""
    if not folder.is_dir() or folder.is_symlink():
        return []
    return [path for path in sorted(folder.iterdir()) if is_own_file(path, names)]


def partial_of(path: Path) -> Path:
    """Returns a name beside `path` for a file that becomes it once it is whole: no other file has it, nor another
    writer."""
    return path.with_name(f"{path.name}.{token_hex(4)}.partial")


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError if it is no regular file; never waits for the other end of a pipe."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - the caller closes it
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a regular file", str(path))
