"""Returns the boot id: processes with the same one have the same `time.monotonic` and `time.perf_counter`."""

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Returns the host kernel's boot id, the same in all its containers. Raises OSError."""
    return BOOT_ID.read_text().strip()
