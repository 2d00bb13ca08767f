"""Which clock the processes of a host share: `time.monotonic` and `time.perf_counter` of two processes agree where `boot_id` does."""

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Of the host's kernel, containers included. Raises OSError."""
    return BOOT_ID.read_text().strip()
