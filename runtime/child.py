"""Waits for a child process, ends it, and describes how it ended."""

import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rowcast.runtime.other_process import stat_of


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path | None  # None if it writes to our stderr
    log_start: int = 0  # bytes of earlier processes

    @property
    def code(self) -> int | None:
        """Returns the exit code as a shell reports it; None while the process runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped the process; a debugger's hold does not count."""
        found = stat_of(self.process.pid)
        return found is not None and found.state == "T"

    def signal(self, number: int) -> None:
        if self.code is None:
            self.process.send_signal(number)

    def ended_within(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self, seconds: float) -> None:
        """Waits up to `seconds` for the process to end, then sends SIGTERM, and after `seconds` more SIGKILL."""
        if not self.ended_within(seconds):
            self.signal(signal.SIGTERM)
            if not self.ended_within(seconds):
                self.signal(signal.SIGKILL)
                self.ended_within(seconds)

    def describe_exit(self) -> str:
        """Describes how the process ended. Call it only after the end."""
        who, code = f"the {self.name} (process {self.process.pid})", self.process.returncode
        if code < 0:
            return f"{who} {killed_by(-code)}"
        if self.log is None:
            return f"{who} ended with code {code}; its error is above"
        return f"{who} ended with code {code}: {self.last_line(self.log)} [{self.log}]"

    def last_line(self, log: Path) -> str:
        """Returns the last error in the log, or the last line: a process of another run may write to it as well."""
        try:
            text = log.read_bytes()[self.log_start :].decode(errors="replace")
        except OSError as error:
            return f"its log cannot be read ({error.strerror})"
        lines = text.strip().splitlines()
        return "".join(([line for line in lines if line.startswith(f"rowcast {self.name}: ")] or lines)[-1:])


def killed_by(number: int) -> str:
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    return f"was killed by {name}" + (
        "; unless you sent it, the machine ran out of memory" if name == "SIGKILL" else ""
    )
