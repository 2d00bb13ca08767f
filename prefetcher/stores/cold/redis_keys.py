"""Names the keys of a run's rows on a Redis server: `rowcast:{<tag>}<generation>`, 256 for each generation.

The generation is random. A note in the run's folder holds it, so that the next process deletes what a killed one left.
"""

import secrets
from pathlib import Path

from rowcast.prefetcher.stores.cold.redis_note import Note, machine_of, read_note, write_note
from rowcast.prefetcher.stores.cold.redis_servers import Command, Servers
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import get_logger

NUM_HASHES = 2**8


def keys_of(generation: str) -> list[bytes]:
    return [f"rowcast:{{{tag:02x}}}{generation}".encode() for tag in range(NUM_HASHES)]


def pattern_of(generation: str) -> str:
    return f"rowcast:{{??}}{generation}"


def delete(servers: Servers, generation: str) -> None:
    """Deletes with UNLINK, which frees the memory in the background."""
    commands: list[list[Command]] = [[] for _ in servers.nodes]
    for key in keys_of(generation):
        commands[servers.node_of(key)].append((b"UNLINK", key))
    servers.ask(commands)


def new_generation(servers: Servers, server: str, path: Path) -> str:
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


def delete_earlier(servers: Servers, server: str, path: Path) -> None:
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
