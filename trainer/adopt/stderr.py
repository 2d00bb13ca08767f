"""Prints lines for the user on stderr, because standard output belongs to the script."""

from rowcast.runtime.errors import printable
from rowcast.runtime.telemetry.lasting_output import write_error_line


def print_line(sentence: str) -> None:
    write_error_line(f"rowcast: {printable(sentence)}")
