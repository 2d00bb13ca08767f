"""Output that cannot be written never ends a run: every error of a write, on every stream."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rowcast.runtime.telemetry.format_numbers import LOST, LastingStream
from rowcast.runtime.telemetry.logs import (
    get_logger,
    make_lasting,
    open_log,
    open_missing_descriptors,
    print_line,
    setup_logging,
)
from rowcast.trainer.report.progress import write
from tests.support.processes import ROOT

pytestmark = pytest.mark.usefixtures("own_logs")
ERRNOS = ("ENOSPC", "EDQUOT", "EFBIG", "EPIPE", "EIO", "EBADF", "EINVAL")


class Raw(io.RawIOBase):
    """Takes what is written, or raises an error."""

    def __init__(self, number: int) -> None:
        self.number, self.taken = number, b""

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        self.taken += bytes(content)
        return len(content)


def text_file(raw: Raw, *, line_buffering: bool) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=line_buffering)


def log(stream: str) -> None:
    setup_logging("trainer")
    get_logger().info("a line")


WRITERS: dict[str, Callable[[str], object]] = {
    "log": log,
    "line of a script": lambda stream: print_line("a line"),
    "progress or summary": lambda stream: write(__import__("rich.console").console.Console(), "a line\n"),
    "print of a model": lambda stream: print("a line", file=getattr(sys, stream), flush=True),
}


@pytest.mark.parametrize("name", ERRNOS)
@pytest.mark.parametrize("writer", WRITERS)
def test_no_error_of_a_write_leaves_it_and_the_line_is_counted(
    name: str, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, stream = Raw(getattr(errno, name)), "stdout" if writer.startswith("p") else "stderr"
    monkeypatch.setattr(LOST, "lines", 0)
    monkeypatch.setattr(sys, stream, text_file(raw, line_buffering=stream == "stderr"))
    make_lasting(stream)  # type: ignore[arg-type]
    for lines in (1, 2):
        WRITERS[writer](stream)
        assert LOST.lines == lines
    raw.number = 0  # there is space again
    WRITERS[writer](stream)
    assert raw.taken.endswith(b"a line\n") or b'event="a line"' in raw.taken
    assert LOST.lines == 2


def test_a_line_of_a_script_without_stderr_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOST, "lines", 0)
    monkeypatch.setattr(sys, "stderr", None)
    print_line("a line")
    setup_logging("trainer")
    get_logger().warning("another")
    assert LOST.lines == 2


def test_a_closed_file_and_a_text_that_it_cannot_encode_are_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOST, "lines", 0)
    ascii_only = LastingStream(io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    ascii_only.write("é\n")
    closed = io.StringIO()
    closed.close()
    LastingStream(closed).write("a line\n")
    assert LOST.lines == 2


def test_a_log_that_cannot_be_opened_is_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(tmp_path, "ab") as file:
        file.write(b"lost\n")
    assert (
        capsys.readouterr().err
        == f"rowcast: the log {tmp_path} cannot be written (Is a directory); its lines are lost\n"
    )


def test_missing_descriptors_become_dev_null_in_children_too() -> None:
    script = "from rowcast.runtime.telemetry.logs import *; import os, subprocess; open_missing_descriptors(); "
    script += "links = [os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)]; "
    script += "child = subprocess.run('readlink /proc/$$/fd/2 >&3', shell=True, pass_fds=[3]); "
    script += "os.write(3, ' '.join(links).encode())"
    read_end, write_end = os.pipe()
    command = 'exec "$0" -c "$1" 3>&$2 <&- >&- 2>&-'
    subprocess.run(
        ["bash", "-c", command, sys.executable, script, str(write_end)], pass_fds=[write_end], cwd=ROOT, check=True
    )
    os.close(write_end)
    with open(read_end) as pipe:
        assert pipe.read().split() == ["/dev/null"] * 4
    open_missing_descriptors()  # none is missing here
