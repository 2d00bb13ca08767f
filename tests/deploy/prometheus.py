"""A real Prometheus under test: where it comes from, and a server that scrapes processes with the tree's files."""

import fcntl
import functools
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import pytest
import yaml

from rowcast.runtime.telemetry.metrics import Process
from tests.support.processes import POLL_S
from tests.support.tcp_run import free_port

ROOT = Path(__file__).parents[2]
FILES = ROOT / "deploy" / "prometheus"
FETCHED = ROOT / "build" / "prometheus"  # the package, where this machine has not installed it
FETCH_TIMEOUT_S = 120.0
START_TIMEOUT_S = 20.0
INTERVAL = "1s"  # between scrapes, and between evaluations of rules


def program(name: Literal["prometheus", "promtool"]) -> str:
    """Its path. CI and root fetch Debian's package where it is missing; the test is skipped where that fails."""
    found = which(name)
    if found is None and (os.environ.get("CI") == "true" or os.geteuid() == 0):
        fetch_package()
        found = which(name)
    if found is None:
        pytest.skip(
            f"{name} is not there and could not be fetched; install Debian's package `prometheus` to run this test"
        )
    return found


def which(name: str) -> str | None:
    return shutil.which(
        name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/bin", str(FETCHED / "usr" / "bin")])
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
        [program("promtool"), *arguments],
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


class Series(NamedTuple):
    labels: Mapping[str, str]
    value: float


class Prometheus:
    """Scrapes every second with the tree's configuration and rules. Use as a context manager."""

    def __init__(self, folder: Path, targets: Mapping[Process, str], at_once: Collection[str]) -> None:
        """`targets`: "host:port" of each. `at_once`: alerts that fire after a second, whatever their `for` is."""
        self._folder = folder
        self._url = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        self._write("prometheus.yml", configuration(targets))
        self._write("alerts.yml", impatient(read_yaml("alerts.yml"), at_once))
        shutil.copy(FILES / "rules.yml", folder)

    def _write(self, name: str, content: Any) -> None:
        (self._folder / name).write_text(yaml.safe_dump(content))

    def __enter__(self) -> Self:
        command = [
            program("prometheus"),
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            "--log.level=warn",
        ]
        address = self._url.removeprefix("http://")
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--web.listen-address={address}"], cwd=self._folder, stdout=log, stderr=log
            )
        self.until(self._answers, "answer", START_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()  # its storage is not needed any more
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def query(self, expr: str) -> list[Series]:
        """The value of an expression now, NaN left out."""
        with urllib.request.urlopen(
            f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}", timeout=10
        ) as answer:
            found = [
                Series(series["metric"], float(series["value"][1])) for series in json.load(answer)["data"]["result"]
            ]
        return [series for series in found if series.value == series.value]

    def firing(self) -> set[str]:
        return {series.labels["alertname"] for series in self.query('ALERTS{alertstate="firing"}')}

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 40.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self._process is not None
            assert self._process.poll() is None, f"Prometheus has ended:\n{self._log}"
            assert time.monotonic() < deadline_s, f"no {what} within {timeout_s:g} s:\n{self._log}"
            time.sleep(5 * POLL_S)

    @property
    def _log(self) -> str:
        return (self._folder / "log").read_text()


def configuration(targets: Mapping[Process, str]) -> Any:
    content = read_yaml("prometheus.yml")
    content["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    for group in content["scrape_configs"][0]["static_configs"]:
        group["targets"] = [targets[group["labels"]["role"]]]
    return content


def impatient(content: Any, at_once: Collection[str]) -> Any:
    for group in content["groups"]:
        for rule in group["rules"]:
            if rule["alert"] in at_once:
                rule["for"] = INTERVAL
    return content
