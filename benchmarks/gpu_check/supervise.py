"""Runs one part of the check in a process of its own, so that no part can harm another or this program.

passed         no item failed
failed         an item found a defect, or raised an error
left out       no item ran for lack of time
not here       no item is possible on this machine; the file has the reasons
crashed        the process ended by a signal, or before it was through
out of time    the process did not end by itself and was killed
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu_check.findings import nothing

GRACE_S = 10.0  # a part ends by itself in time; after this much longer it is killed
END_S = 3.0  # between the request to end and the end
LAST_LINES, LAST_BYTES = 15, 4000  # of what a process said
HARM = ("failed", "crashed", "out of time")


def run_part(command: Sequence[str], findings: Path, limit_s: float) -> dict[str, Any]:
    """`command` writes `findings` (see findings.py) and should end within `limit_s`."""
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s + GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
        last = last_lines(said)
    found = read(findings)
    status = status_of(found, code)
    how = {} if status not in ("crashed", "out of time") else {**ending(code, limit_s), "last_lines": last}
    return {"status": status, **how, "took_s": round(time.monotonic() - began_s, 1), **found}


def status_of(found: dict[str, Any], code: int | None) -> str:
    """`code`: of the process, negative after a signal; None if it had to be killed."""
    if code is None:
        return "out of time"
    if code != 0 or not found.get("ended"):
        return "crashed"
    if any(item.get("passed") is False for item in found["items"].values()):
        return "failed"
    return "passed" if found["items"] else "left out" if found["left_out"] else "not here"


def ending(code: int | None, limit_s: float) -> dict[str, Any]:
    if code is None:
        return {"limit_s": round(limit_s + GRACE_S, 1)}
    return {"exit_code": code} if code >= 0 else {"signal": signal.Signals(-code).name}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that it started. One that the kernel cannot end at once is left behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)


def last_lines(said: IO[bytes]) -> list[str]:
    end = said.seek(0, os.SEEK_END)
    said.seek(max(0, end - LAST_BYTES))
    return said.read().decode(errors="replace").splitlines()[-LAST_LINES:]


def read(findings: Path) -> dict[str, Any]:
    """What the process has written so far."""
    try:
        found: dict[str, Any] = json.loads(findings.read_text())
    except FileNotFoundError:
        return nothing()
    return found
