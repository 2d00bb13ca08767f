"""Defines the file by which a rank declares its shard of a checkpoint durable.

rank 3    row files ... | shard-003.json      waits until it sees the manifest
rank 0    row files ... |    waits for the files of all other ranks    | removes these, writes the manifest
"""

import re
from pathlib import Path

from rowcast.runtime.checkpoint_manifest import CHECKSUM, ShardLayers, check_position
from rowcast.runtime.errors import DataError
from rowcast.runtime.position import Position
from rowcast.runtime.sealed import Sealed, read_sealed

SHARD_VERSION = 2
SHARD_NAME = r"shard-[0-9]{3,}\.json"  # of `shard_name`
OF_A_RANK = re.compile(r".*-r([0-9]{3,})-[0-9]{5}\.safetensors|shard-([0-9]{3,})\.json(?:\.partial)?")


class ShardFile(Sealed, frozen=True, kw_only=True):
    number: int
    count: int
    run_id: str
    position: Position  # the checkpoint's
    after: str  # checksum of the manifest whose files its layers also name; "" if they name only new ones
    model_state: str  # xxh3_64 of the model state that its trainer holds, 16 hex digits
    shard: ShardLayers

    def __post_init__(self) -> None:
        check_position(self.position)
        if not 0 <= self.number < self.count:
            raise ValueError(f"shard {self.number} of {self.count} is impossible")
        if not CHECKSUM.fullmatch(self.model_state):
            raise ValueError(f"the checksum {self.model_state!r} of a model state is not 16 hex digits")


def shard_name(number: int) -> str:
    return f"shard-{number:03d}.json"


def writer_of(name: str, count: int) -> int:
    """Returns which rank of `count` writes files of this name. Files without a rank are rank 0's."""
    match = OF_A_RANK.fullmatch(name)
    number = 0 if match is None else int(match[1] or match[2])
    return number if number < count else 0


def read_shard_file(path: Path) -> ShardFile | None:
    """Reads a shard file; None if it does not exist yet. Raises DataError if it is unreadable or changed since it was
    written."""
    try:
        return read_sealed(path, {SHARD_VERSION: ShardFile}, "shard file")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: the shard file cannot be read ({error.strerror})") from None
