"""Opens files that others may have put there: never waits for the other end of a pipe."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading. Raises OSError if it is no regular file."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file
