"""Those who start commands and stop them: `timeout`, a service manager, a shell in a terminal."""

import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.processes import ROOT, Session

LONG_S = "3600"
LOOK_S = 0.05
CTRL_C = b"\x03"


def under_timeout(
    arguments: list[str], out: Path, err: Path, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """GNU `timeout`. A signal for it does what its own time-out does: it signals its child, and then its group."""
    command = ["timeout", "--preserve-status", LONG_S, sys.executable, *arguments]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen(
            command, stdout=stdout, stderr=stderr, cwd=ROOT, env=environment, start_new_session=True
        )


def signal_all(session: Session, number: signal.Signals) -> None:
    """As a service manager signals a control group, whatever process groups and sessions there are in it."""
    for pid in session.alive():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Terminal:
    """A terminal that shows one command; its stderr is a file. A context manager."""

    def __init__(self) -> None:
        self._master, self._slave = pty.openpty()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read)

    def launch(
        self, arguments: list[str], out: Path, err: Path, environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        return self._launch([sys.executable, *arguments], err, environment)

    def launch_pair(
        self, arguments: list[str], out: Path, err: Path, environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Starts the trainer as told, and its prefetcher in the background of the same shell."""
        trainer = shlex.join([sys.executable, *arguments])
        prefetcher = trainer.replace("rowcast.trainer", "rowcast.prefetcher")
        return self._launch(["sh", "-c", f"{prefetcher} & exec {trainer}"], err, environment)

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def close(self) -> None:
        """Idempotent."""
        self._closing.set()
        self._reader.join()

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _launch(self, command: list[str], err: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        with err.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=self._slave, stdout=self._slave, stderr=stderr, cwd=ROOT, env={**environment, "TERM": "xterm"},
                start_new_session=True, preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
            )  # fmt: skip
        os.close(self._slave)
        return process

    def _read(self) -> None:
        while not self._closing.is_set():
            with suppress(OSError):  # nobody has the other end
                if select.select([self._master], [], [], LOOK_S)[0] and not os.read(self._master, 65536):
                    return
        os.close(self._master)
