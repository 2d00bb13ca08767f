"""Reports the versions of rowcast, Python and the libraries."""

import platform
from importlib import metadata

from rowcast.runtime.telemetry.metrics import Process


def rowcast_version() -> str:
    """Returns the installed version; "uninstalled" if the source runs without an installation."""
    try:
        return metadata.version("rowcast")
    except metadata.PackageNotFoundError:
        return "uninstalled"


def versions(*distributions: str) -> dict[str, str]:
    named = {name: metadata.version(name) for name in distributions}
    return {"rowcast": rowcast_version(), **named, "python": platform.python_version()}


def build_info(process: Process, job_name: str) -> dict[str, str]:
    """Returns the labels of `rowcast_build_info`, in the order of the metrics table."""
    return {"process": process, "version": rowcast_version(), "python": platform.python_version(), "job_name": job_name}
