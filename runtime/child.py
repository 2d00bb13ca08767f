"""A process that was started from here, and what to say of its end."""

import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path | None  # None: its stderr is ours

    @property
    def code(self) -> int | None:
        """As a shell has it; None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        if self.code is None:
            self.process.send_signal(number)

    def ended_within(self, seconds: float) -> bool:
        """Waits for its end."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def see_out(self, seconds: float) -> None:
        """Waits for the end of one that knows of it; after so many seconds it is asked, and then killed."""
        if not self.ended_within(seconds):
            self.signal(signal.SIGTERM)
            if not self.ended_within(seconds):
                self.signal(signal.SIGKILL)
                self.ended_within(seconds)

    def obituary(self) -> str:
        """Of one that has ended."""
        who, code = f"the {self.name} (process {self.process.pid})", self.process.returncode
        if code < 0:
            return f"{who} was killed by {signal.Signals(-code).name}; if nobody sent it, the machine ran out of memory"
        if self.log is None:
            return f"{who} ended with code {code}; why stands above"
        return f"{who} ended with code {code}: {last_line(self.log)} [{self.log}]"


def last_line(log: Path) -> str:
    return "".join(log.read_text(errors="replace").strip().splitlines()[-1:])
