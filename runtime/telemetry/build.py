"""Which versions run."""

import platform
from importlib import metadata

from rowcast.runtime.telemetry.metrics import Process


def rowcast_version() -> str:
    """The installed version; "uninstalled" where the source is run without being installed."""
    try:
        return metadata.version("rowcast")
    except metadata.PackageNotFoundError:
        return "uninstalled"


def versions(*distributions: str) -> dict[str, str]:
    """Versions of rowcast, Python and the installed `distributions`, for the report."""
    named = {name: metadata.version(name) for name in distributions}
    return {"rowcast": rowcast_version(), **named, "python": platform.python_version()}


def build_info(process: Process, job_name: str) -> dict[str, str]:
    """Labels of `rowcast_build_info`, in the order of the metrics table."""
    return {"process": process, "version": rowcast_version(), "python": platform.python_version(), "job_name": job_name}
