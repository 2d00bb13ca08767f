"""`time.monotonic` and `time.perf_counter` of two processes are one clock where `boot_id` is the same."""

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Of the host's kernel, containers included. Raises OSError."""
    return BOOT_ID.read_text().strip()
