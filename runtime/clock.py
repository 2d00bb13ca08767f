"""Tells whether two processes share `time.monotonic` and `time.perf_counter`: they do if `boot_id` is the same."""

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The host kernel's boot id, the same in all its containers. Raises OSError."""
    return BOOT_ID.read_text().strip()
