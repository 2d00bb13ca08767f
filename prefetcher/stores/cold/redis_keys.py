"""Names the keys of a run's rows on a Redis server: `rowcast:{<tag>}<generation>`, 256 for each generation.

The generation is random. A note in the run's folder holds it, so that the next process deletes what a killed one left.
"""

import secrets
from pathlib import Path

import msgspec

from rowcast.prefetcher.stores.cold.redis_servers import Command, Servers
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import get_logger

NUM_HASHES = 2**8


class Note(msgspec.Struct, frozen=True, kw_only=True):
    server: str
    name: str  # the generation
    folder: int  # inode of the note's folder, since a copy of a run must not delete the keys of the original


def keys_of(generation: str) -> list[bytes]:
    return [f"rowcast:{{{tag:02x}}}{generation}".encode() for tag in range(NUM_HASHES)]


def pattern_of(generation: str) -> str:
    return f"rowcast:{{??}}{generation}"


def delete(servers: Servers, generation: str) -> None:
    """UNLINK frees the memory in the server's background."""
    commands: list[list[Command]] = [[] for _ in servers.nodes]
    for key in keys_of(generation):
        commands[servers.node_of(key)].append((b"UNLINK", key))
    servers.ask(commands)


def new_generation(servers: Servers, server: str, path: Path) -> str:
    """Deletes the keys of an earlier process, and returns a name that nobody else has. `server`: as the job has it.
    `path`: of the note. Raises ConfigError if it cannot be written, or what `Servers.ask` raises."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        delete_earlier(servers, server, path)
        note = Note(server=server, name=secrets.token_hex(6), folder=path.parent.stat().st_ino)
        path.write_bytes(msgspec.json.encode(note))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); make it writable") from None
    return note.name


def delete_earlier(servers: Servers, server: str, path: Path) -> None:
    """Does nothing if there is no note, it is damaged, or it came here with a copy of another run."""
    try:
        earlier = msgspec.json.decode(path.read_bytes(), type=Note)
    except (FileNotFoundError, msgspec.DecodeError):
        return
    if earlier.folder != path.parent.stat().st_ino:
        return
    if earlier.server == server:
        delete(servers, earlier.name)
    else:
        get_logger().warning(
            "rows of an earlier process may remain on another Redis server",
            server=earlier.server,
            keys=pattern_of(earlier.name),
        )
