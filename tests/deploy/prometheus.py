"""promtool: where it comes from, and the tree's files for Prometheus as data."""

import fcntl
import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ROOT / "deploy" / "prometheus"
FETCHED = ROOT / "build" / "prometheus"  # the package, where this machine has not installed it
FETCH_TIMEOUT_S = 120.0


def program() -> str:
    """Its path. CI and root fetch Debian's package where it is missing; the test is skipped where that fails."""
    found = which()
    if found is None and (os.environ.get("CI") == "true" or os.geteuid() == 0):
        fetch_package()
        found = which()
    if found is None:
        pytest.skip(
            "promtool is not there and could not be fetched; install Debian's package `prometheus` to run this test"
        )
    return found


def which() -> str | None:
    return shutil.which(
        "promtool", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/bin", str(FETCHED / "usr" / "bin")])
    )


@functools.cache
def fetch_package() -> None:
    """Unpacks Debian's package into `build/` and installs nothing: it makes no user and starts no service. A process
    tries once, and one process at a time.
    """
    FETCHED.mkdir(parents=True, exist_ok=True)
    with (FETCHED / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (FETCHED / "usr" / "bin" / "promtool").exists():  # by another worker, while this one waited
            return
        if not done("apt-get", "download", "prometheus"):
            done("apt-get", "update")
            done("apt-get", "download", "prometheus")
        for package in FETCHED.glob("prometheus_*.deb"):
            done("dpkg-deb", "--extract", str(package), "unpacking")
            package.unlink()
        if (FETCHED / "unpacking" / "usr").exists():
            (FETCHED / "unpacking" / "usr").rename(FETCHED / "usr")  # at once: a program that is there is whole


def done(*command: str) -> bool:
    try:
        return (
            subprocess.run(command, cwd=FETCHED, capture_output=True, timeout=FETCH_TIMEOUT_S, check=False).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):  # no such command, or no network
        return False


def promtool(*arguments: str, stdin: str = "") -> str:
    """What it says; an assertion with that where it finds a fault."""
    ended = subprocess.run(
        [program(), *arguments],
        cwd=FILES,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, f"promtool {' '.join(arguments)}: {ended.stdout}{ended.stderr}"
    return ended.stdout


def read_yaml(name: str) -> Any:
    """One of the tree's files for Prometheus."""
    return yaml.safe_load((FILES / name).read_text())


def rules(name: str, kind: Literal["record", "alert"]) -> list[dict[str, Any]]:
    """The rules of one kind in a rule file."""
    return [rule for group in read_yaml(name)["groups"] for rule in group["rules"] if kind in rule]
