"""Names the keys of a run's rows on a Redis server: `rowcast:{<tag>}<generation>`, 256 for each generation.

The generation is random. A note in the run's table folder holds it, so that the next process deletes what a killed one
left. The note is on disk before a row is on the server.
"""

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rowcast.job.tables import GROUP_NAME
from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import get_logger

if TYPE_CHECKING:  # without a Redis client, notes are looked for all the same
    from rowcast.prefetcher.stores.cold.redis_servers import Command, Servers

NUM_HASHES = 2**8
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


def keys_of(generation: str) -> list[bytes]:
    return [f"rowcast:{{{tag:02x}}}{generation}".encode() for tag in range(NUM_HASHES)]


def pattern_of(generation: str) -> str:
    return f"rowcast:{{??}}{generation}"


def delete(servers: "Servers", generation: str) -> None:
    """Deletes with UNLINK, which frees the memory in the background."""
    commands: list[list[Command]] = [[] for _ in servers.nodes]
    for key in keys_of(generation):
        commands[servers.node_of(key)].append((b"UNLINK", key))
    servers.ask(commands)


def new_generation(servers: "Servers", server: str, path: Path) -> str:
    """Deletes the keys of an earlier process and returns a unique name. `server`: as in the job file.
    `path`: of the note. Raises ConfigError if it cannot be written, or what `Servers.ask` raises."""
    generation = secrets.token_hex(6)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        delete_earlier(servers, server, path)
        write_note(path, server, generation)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); make it writable") from None
    return generation


def delete_earlier(servers: "Servers", server: str, path: Path) -> None:
    """Deletes the keys that a note names, then the note, and warns of keys that may remain. Does nothing if there is no
    note, or it is damaged, or it was copied here with another run. Raises OSError, or what `Servers.ask` raises."""
    earlier, folder = read_note(path), path.parent.stat()
    if earlier is None or earlier.folder != folder.st_ino:
        return
    if earlier.server != server:
        warn_of("another Redis server", earlier)
    elif earlier.machine not in (None, machine_of(folder)):
        warn_of("Redis: this disk was in another machine, or is a copy of one there", earlier)
    else:
        delete(servers, earlier.name)
        path.unlink()


def warn_of(place: str, note: Note) -> None:
    get_logger().warning(
        f"rows of an earlier process may remain on {place}", server=note.server, keys=pattern_of(note.name)
    )
