"""What a person whose script it is must see: single lines on stderr, as the script's standard output is its own."""

import sys


def tell(sentence: str) -> None:
    sys.stderr.write(f"rowcast: {sentence}\n")
    sys.stderr.flush()
