"""The test's end of `starter`: starts commands without their imports, and hears how they ended."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import processes
from tests.support.processes import ROOT, Child

COMMANDS = (
    ["-m", "rowcast.prefetcher"],
    ["-m", "rowcast.prefetcher.run.script"],
    ["-m", "rowcast.trainer"],
    ["-m", "tests.serving.reading"],
)
START_TIMEOUT_S = 120.0  # the first time, numba compiles


class Forked:
    """Has the face of a `subprocess.Popen`."""

    def __init__(self, pid: int, ended: threading.Condition, codes: Mapping[int, int]) -> None:
        self.pid = pid
        self._ended = ended
        self._codes = codes

    def poll(self) -> int | None:
        return self._codes.get(self.pid)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        with self._ended:
            if not self._ended.wait_for(lambda: self.pid in self._codes, timeout):
                raise subprocess.TimeoutExpired("forked", timeout or 0.0)
            return self._codes[self.pid]

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class Starter:
    """A context manager. `launch` is a `processes.Launch`; it starts other commands as `processes.launch` does."""

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}
        self._started: list[int] = []
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.support.fork_server"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, name="starter", daemon=True)
        self._reader.start()
        self._wait_for_start(1)  # the starter's own
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._reader.join()
        self._process.stdout.close()
        self._process.wait()

    def launch(self, arguments: list[str], out: Path, err: Path, environment: Mapping[str, str]) -> Child:
        if arguments[:2] not in COMMANDS:
            return processes.launch(arguments, out, err, environment)
        assert self._process.stdin is not None
        request = {"arguments": arguments, "out": str(out), "err": str(err), "environment": dict(environment)}
        with self._changed:
            number = len(self._started) + 1
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Forked(self._wait_for_start(number), self._changed, self._codes)

    def _wait_for_start(self, number: int) -> int:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._started) >= number, START_TIMEOUT_S):
                raise AssertionError(f"the starter did not start within {START_TIMEOUT_S:g} s")
            return self._started[number - 1]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._changed:
                if "started" in answer:
                    self._codes.pop(answer["started"], None)  # the number of one that has ended long ago may come again
                    self._started.append(answer["started"])
                else:
                    self._codes[answer["ended"]] = answer["code"]
                self._changed.notify_all()
