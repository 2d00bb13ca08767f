"""Real processes under test: `prefetcher run`, `trainer run` and `rowcast.deploy.local`, started as a user starts them,
and what they leave.

Every process started here, and every process that one of them starts, carries a mark in its environment. By that mark
they are found and ended when the test is over, and one that outlives its parent is noticed.
"""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from prometheus_client.parser import text_string_to_metric_families

from rowcast.protocol.transport.endpoint import socket_path
from rowcast.runtime.checkpoint_manifest import Manifest, newest_checkpoint, read_manifest
from tests.support.jobs import job_content, write_job

Name = Literal["prefetcher", "trainer", "eval", "local", "train", "export", "simulate"]
COMMANDS: dict[Name, list[str]] = {
    "prefetcher": ["-m", "rowcast.prefetcher", "run"],
    "trainer": ["-m", "rowcast.trainer", "run"],
    "eval": ["-m", "rowcast.trainer", "eval"],
    "local": ["-m", "rowcast.deploy.local"],
    "train": ["-m", "rowcast", "train"],
    "export": ["-m", "rowcast.prefetcher", "export"],
    "simulate": ["-m", "rowcast.prefetcher", "simulate"],
}
ROOT = Path(__file__).parents[2]  # where `python -m` finds the project
END_TIMEOUT_S = 90.0
POLL_S = 0.02
MARK = "ROWCAST_TEST_MARK"


@dataclass(frozen=True, kw_only=True)
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def sentences(self) -> list[str]:
        """What the command said to the person who ran it, without "rowcast <process>: "."""
        return re.findall(r"^rowcast \w+: (.*)$", self.stderr, flags=re.MULTILINE)

    def refused(self, code: int) -> str:
        """The one sentence of a command that ended with `code`, and with no traceback."""
        assert self.code == code, f"exit code {self.code} instead of {code}:\n{self.stderr}"
        assert "Traceback" not in self.stderr, self.stderr
        assert len(self.sentences) == 1, f"{len(self.sentences)} sentences instead of 1:\n{self.stderr}"
        return self.sentences[0]

    def quiet(self) -> Self:
        """Checks that the command ended well and had nothing to complain of."""
        assert (self.code, self.sentences) == (0, []), f"exit code {self.code}:\n{self.stderr}"
        assert "Traceback" not in self.stderr, self.stderr
        return self


class Child(Protocol):
    """What is needed of a `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""

    def send_signal(self, sig: int) -> None: ...


Launch = Callable[[list[str], Path, Path, Mapping[str, str]], Child]  # arguments of Python, stdout, stderr, environment


def launch(arguments: list[str], out: Path, err: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip


class Process:
    """One started command, in a session of its own like a service manager's, away from this terminal. Its output
    goes to files, so that it never waits for a reader."""

    def __init__(
        self, arguments: list[str], folder: Path, environment: Mapping[str, str], launch: Launch = launch
    ) -> None:
        number = len(list(folder.glob("*.err")))
        self._out, self._err = (folder / f"{number}.{end}" for end in ("out", "err"))
        for file in (self._out, self._err):
            file.touch()  # one that is killed at once has opened neither
        self._process = launch(arguments, self._out, self._err, environment)
        self.pid = self._process.pid

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def insist(self, number: signal.Signals) -> None:
        """Signals it until it ends, as a signal within a second of the first is a part of that."""
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while self.running:
            assert time.monotonic() < deadline_s, f"process {self.pid} goes on:\n{self.stderr}"
            self.signal(number)
            time.sleep(0.5)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ended(self, timeout_s: float = END_TIMEOUT_S) -> Ended:
        """Waits for the end of the process."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {self.pid} still runs after {timeout_s:g} s:\n{self.stderr}") from None
        return Ended(code=code, stdout=self.stdout, stderr=self.stderr)

    def reap(self) -> None:
        """Once it was killed or has ended."""
        self._process.wait(END_TIMEOUT_S)

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = END_TIMEOUT_S) -> None:
        """Waits for `condition` while the process runs."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.running, f"process {self.pid} ended before {what}:\n{self.stderr}"
            assert time.monotonic() < deadline_s, f"no {what} within {timeout_s:g} s:\n{self.stderr}"
            time.sleep(POLL_S)

    def until_it_holds_signals(self) -> None:
        """Waits until SIGTERM does not end it any more."""
        bit = 1 << signal.SIGTERM - 1

        def holds() -> bool:
            return any(int(found, 16) & bit for found in re.findall(r"Sig(?:Blk|Cgt):\s*(\w+)", self.status))

        self.until(holds, "hold on SIGTERM")

    @property
    def status(self) -> str:
        return Path(f"/proc/{self.pid}/status").read_text()

    def until_logged(self, event: str) -> None:
        self.until(lambda: event in self.stderr, f"{event!r} in the log")

    def until_counted(self, name: str, least: float) -> None:
        """Waits until a metric, summed over its labels, is at least so much."""
        self.until_logged("serving metrics")
        self.until(lambda: self.metric(name) >= least, f"{name} >= {least:g}")

    def metric(self, name: str) -> float:
        try:
            _, text = self.asked("/metrics")
        except OSError:
            return 0.0
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == name)

    def asked(self, path: str) -> tuple[int, str]:
        """What it answers over HTTP: status and text. Raises OSError where it does not."""
        address = re.findall(r'event="serving metrics" address=(\S+)', self.stderr)[-1]
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode().strip()


class Session:
    """A job file, a run directory and the processes of one test. A context manager that ends what it has started."""

    def __init__(self, folder: Path, launch: Launch = launch) -> None:
        self.folder = folder
        self._launch = launch
        self.run_dir = folder / "run"
        self.config = folder / "job.toml"
        self._mark = uuid.uuid4().hex
        self._started: list[Process] = []
        self.write_job()

    def write_job(self, **sections: Any) -> None:
        write_job(self.config, job_content(self.run_dir, **sections))

    def start(self, name: Name, *options: str, **environment: str) -> Process:
        """Starts a command with this session's job file; `environment` is added to our own."""
        return self._start([*COMMANDS[name], f"--config={self.config}", *options], environment)

    def start_patched(self, name: Literal["prefetcher", "trainer"], patch: str, *options: str) -> Process:
        """`run`, after a line of Python that makes it another version or impatient."""
        line = f"{patch}; from rowcast.command_line.{name} import app; app()"
        return self._start(["-c", line, "run", f"--config={self.config}", *options], {})

    def start_module(self, module: str, *options: str, **environment: str) -> Process:
        """Any command, without this session's job file."""
        return self._start(["-m", module, *options], environment)

    def export(self, out: Path) -> Ended:
        return self._start([*COMMANDS["export"], f"--run={self.run_dir}", f"--out={out}"], {}).ended()

    def _start(self, arguments: list[str], environment: Mapping[str, str]) -> Process:
        process = Process(arguments, self.folder, {**os.environ, **environment, MARK: self._mark}, self._launch)
        self._started.append(process)
        return process

    def start_both(self, *prefetcher_options: str) -> tuple[Process, Process]:
        return self.start("prefetcher", *prefetcher_options), self.start("trainer")

    def start_training(self, counted: str = "rowcast_train_steps_total") -> tuple[Process, Process]:
        """Both processes, after the trainer has counted some steps."""
        prefetcher, trainer = self.start_both()
        trainer.until_counted(counted, 20)
        return prefetcher, trainer

    def manifest(self) -> Manifest:
        folder = newest_checkpoint(self.run_dir)
        assert folder is not None, f"no checkpoint in {self.run_dir}"
        return read_manifest(folder)

    def children(self) -> list[int]:
        """Process ids of what the started processes have started, and that still runs."""
        return sorted(self.alive() - {process.pid for process in self._started})

    def kill(self, pid: int) -> None:
        """Ends one of `children` at once."""
        assert pid in self.alive(), f"process {pid} is not ours"
        os.kill(pid, signal.SIGKILL)

    def until_alone(self, timeout_s: float) -> None:
        """Waits until no process of this session runs, also none that was started by another."""
        deadline_s = time.monotonic() + timeout_s
        while alive := self.alive():
            assert time.monotonic() < deadline_s, f"processes {sorted(alive)} still run after {timeout_s:g} s"
            time.sleep(POLL_S)

    def remains(self, *, killed: bool = False) -> list[str]:
        """What the processes have left although all of them have ended: processes, rings and sockets. The socket of a
        prefetcher that was `killed` stays until the next one takes it over.
        """
        # a killed process's children end on their own, but not before they are scheduled
        deadline_s = time.monotonic() + 5
        while self.alive() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        sockets = [] if killed else [path for path in self._sockets() if path.exists()]
        return [*(f"process {pid}" for pid in sorted(self.alive())), *map(str, [*self.rings(), *sockets])]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.reap()
        for path in [*self._sockets(), *self.rings()]:
            path.unlink(missing_ok=True)

    def rings(self) -> list[Path]:
        return [path for process in self._started for path in Path("/dev/shm").glob(f"rowcast-*-{process.pid}-*")]

    def _sockets(self) -> list[Path]:
        socket = socket_path(self.run_dir)
        return [socket, socket.with_suffix(".lock")]

    def alive(self) -> set[int]:
        """Processes with our mark that run (a zombie has none), and those started here, even forks without it."""
        marked = f"{MARK}={self._mark}".encode()
        found = {int(path.name) for path in Path("/proc").glob("[0-9]*") if marked in environment_of(path)}
        return found | {process.pid for process in self._started if process.running}


def proc_text(pid: int, name: str) -> str:
    """A file of /proc/<pid>; empty where that process has ended, as one may that was seen a moment ago."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def environment_of(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
