"""Recognizes files that rowcast wrote by their names, so that no other file is ever removed."""

import re
import stat
from pathlib import Path


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
