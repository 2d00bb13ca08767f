"""A control group that limits the memory of the processes in it, file pages included. Needs root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OLDER = MOUNT / "memory"  # where the first version of control groups is mounted


@contextmanager
def memory_group(limit: int) -> Iterator[list[str]]:
    """Gives what to put before a command so that it runs in the group. `limit` is in bytes."""
    older = OLDER.is_dir()
    folder = (OLDER if older else MOUNT) / f"rowcast-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if older else "memory.max")).write_text(str(limit))
    except OSError as error:
        raise SystemExit(
            f"{folder}: {error.strerror}; a limit of memory needs root and the memory controller"
        ) from None
    try:
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$0" "$@"']
    finally:
        folder.rmdir()
