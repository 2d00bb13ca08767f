"""Output that never ends a run: lines that stdout, stderr or a log cannot take are dropped and counted.

A disk is full, a quota or a file's largest size is reached, a terminal or a pipe is closed, or there never was a
descriptor. Each line is tried, so a log goes on once there is space again.
"""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, TextIO, cast

from rowcast.runtime.errors import printable

# ValueError: the file was closed, or cannot encode the text; AttributeError: it was closed before this process began
UNWRITABLE = (OSError, ValueError, AttributeError)


@dataclass(slots=True)
class Lost:
    lines: int = 0


LOST = Lost()  # of this process


class LastingStream:
    """A text stream that takes every write, and flushes each line."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            self._file.write(text)
            if "\n" in text:
                self._file.flush()
        except UNWRITABLE:
            LOST.lines += text.count("\n")
        return len(text)

    def flush(self) -> None:
        with suppress(*UNWRITABLE):
            self._file.flush()


def open_missing_descriptors() -> None:
    """Opens /dev/null in place of missing standard descriptors, so that no file of ours gets their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number, which is this


def make_lasting(name: Literal["stdout", "stderr"]) -> None:
    """Makes this process's `sys.stdout` or `sys.stderr` a LastingStream."""
    open_missing_descriptors()
    found = getattr(sys, name) or open(("stdout", "stderr").index(name) + 1, "w", closefd=False)  # noqa: SIM115 - stays open
    setattr(sys, name, cast(TextIO, LastingStream(found)))


def open_log(path: Path, mode: Literal["ab", "wb"]) -> BinaryIO:
    """Opens /dev/null instead, and says so on stderr, if `path` cannot be opened."""
    try:
        return path.open(mode)
    except OSError as error:
        print_line(f"the log {path} cannot be written ({error.strerror}); its lines are lost")
        return Path(os.devnull).open(mode)


def write_error_line(line: str) -> None:
    LastingStream(sys.stderr).write(f"{line}\n")


def print_line(sentence: str) -> None:
    """For the user of a training script, to whom stdout belongs."""
    write_error_line(f"rowcast: {printable(sentence)}")
