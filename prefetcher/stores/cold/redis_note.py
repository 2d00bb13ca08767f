"""Writes and reads the note that tells the next process of a run which rows a killed one left on a Redis server.

The note is in the run's table folder. It is on disk before a row is on the server.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from rowcast.job.tables import GROUP_NAME
from rowcast.runtime.checkpoint_manifest import write_durably

NAME = re.compile(rf"{GROUP_NAME}\.redis")
MACHINE_ID = Path("/etc/machine-id")


class Note(msgspec.Struct, frozen=True, kw_only=True):
    server: str  # "host:port", as in the job file
    name: str  # the generation
    folder: int  # inode of the note's folder: a copy of a run must not delete the original's keys
    machine: str | None = None  # `machine_of` the folder: a copy of a whole disk has the same inodes


def note_path(folder: Path, group: str) -> Path:
    return folder / f"{group}.redis"


def write_note(path: Path, server: str, generation: str) -> None:
    """Raises OSError."""
    folder = path.parent.stat()
    note = Note(server=server, name=generation, folder=folder.st_ino, machine=machine_of(folder))
    write_durably(path, msgspec.json.encode(note))


def read_note(path: Path) -> Note | None:
    """None if there is none, or it is damaged. Raises OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Note)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def machine_of(folder: os.stat_result) -> str:
    """Returns the id of the machine that has the disk; "" for a network folder, and where machines have no id."""
    if os.major(folder.st_dev) == 0:  # no block device: a network file system, which several machines may mount
        return ""
    with suppress(OSError):
        return MACHINE_ID.read_text().strip()
    return ""
