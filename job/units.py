"""Reads sizes and durations of the job file."""

import re
from typing import Annotated

import msgspec

UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
Size = Annotated[str | int, msgspec.Meta(examples=["64MiB"])]


def parse_bytes(text: str | int) -> int:
    """`"64MiB"` -> bytes. Raises ValueError with a sentence."""
    if isinstance(text, int) and not isinstance(text, bool):
        value = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text if isinstance(text, str) else "")
        if match is None or match[2] not in UNITS:
            raise ValueError(
                f'{text!r} is not a size; write bytes with a unit, such as "64MiB" '
                '(cache.capacity also takes "20000 rows")'
            )
        value = int(min(float(match[1]) * UNITS[match[2]], 2**63))
    if not 0 < value < 2**63:
        raise ValueError(f"{text!r} must be more than 0 and less than 2**63 bytes")
    return value


def parse_rows(text: str | int) -> int | None:
    """`"20000 rows"` -> rows; None for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s+rows\s*", str(text))
    return int(match[1]) if match else None


def parse_seconds(text: str | float) -> float:
    """`"60s"`, `"500ms"`, `"5m"`, `"1h"` or a number of seconds -> seconds. Raises ValueError with a sentence."""
    if not isinstance(text, str):
        return float(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)\s*", text)
    if match is None:
        raise ValueError(f'{text!r} is not a duration; write a number and ms, s, m or h, such as "60s"')
    return float(match[1]) * {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2]]
