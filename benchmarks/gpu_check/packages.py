"""Which packages are here; imports none of them, so that all that are missing are named before the first import."""

import re
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

NEEDED = (
    "torch", "numpy", "numba", "llvmlite", "pyarrow", "pyzmq", "msgspec", "structlog", "typer", "xxhash",
    "prometheus-client", "safetensors", "rich", "matplotlib",
)  # fmt: skip
OPTIONAL = ("triton", "fbgemm-gpu", "torchrec")


def packages() -> dict[str, Any]:
    """Versions; what a run needs and this machine lacks would otherwise be missed in the middle of another part."""
    missing = sorted({need for name in NEEDED for need in (name, *needs_of(name)) if installed(need) is None})
    return {**{name: installed(name) for name in (*NEEDED, *OPTIONAL)}, "missing": missing, "passed": not missing}


def needs_of(name: str) -> list[str]:
    """What an installed package needs on every machine, and what that needs."""
    if installed(name) is None:
        return []
    own = [re.split(r"[^\w.-]", need)[0] for need in requires(name) or [] if ";" not in need]
    return [need for first in own for need in (first, *needs_of(first))]


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
