"""A control group that limits the memory of the processes in it, file pages included. Needs root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OLDER = MOUNT / "memory"  # where the first version of control groups is mounted


@contextmanager
def memory_group(limit: int) -> Iterator[list[str]]:
    """Gives what to put before a command so that it runs in the group. `limit` is in bytes."""
    group = own_group()
    try:
        group.mkdir()
        set_limit(group, limit)
    except OSError as error:
        raise SystemExit(f"{group}: {error.strerror}; a limit of memory needs root and the memory controller") from None
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"']
    finally:
        group.rmdir()


def own_group() -> Path:
    """Returns the folder of this process's `memory_group`."""
    return (OLDER if OLDER.is_dir() else MOUNT) / f"rowcast-{os.getpid()}"


def set_limit(group: Path, limit: int) -> None:
    (group / ("memory.limit_in_bytes" if OLDER.is_dir() else "memory.max")).write_text(str(limit))


def used(group: Path) -> int:
    """Returns the bytes that the group holds, file pages included."""
    return int((group / ("memory.usage_in_bytes" if OLDER.is_dir() else "memory.current")).read_text())


def reclaim(group: Path) -> None:
    """Takes all file pages from the group that the kernel is ready to give up."""
    with suppress(OSError):  # the second version of control groups raises it if some pages stayed
        if OLDER.is_dir():
            (group / "memory.force_empty").write_text("0")
        else:
            (group / "memory.reclaim").write_text(str(used(group)))
