"""The machine on which a figure was measured, and the file that keeps both."""

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "numba")


def write_result(name: str, **content: Any) -> None:
    """Writes `build/<name>.json`, which also names the machine."""
    file = Path(__file__).parents[1] / "build" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"machine": machine(), **content}, indent=1) + "\n")


def machine() -> dict[str, str | int]:
    """Processor, cores, versions and the commit; no host or user names."""
    facts: dict[str, str | int] = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    return facts | {name: version(name) for name in PACKAGES} | {"commit": commit()}


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def commit() -> str:
    """`unknown` outside a clone, and where git is not installed."""
    if shutil.which("git") is None:
        return "unknown"
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return asked.stdout.strip() or "unknown"
