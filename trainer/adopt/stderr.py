"""Prints lines for the user on stderr, because standard output belongs to the script."""

import sys


def print_line(sentence: str) -> None:
    sys.stderr.write(f"rowcast: {sentence}\n")
    sys.stderr.flush()
