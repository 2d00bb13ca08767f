"""How often a test repeats: a few times in `make test`, many in `make soak`."""

import os


def count(test: int, soak: int) -> int:
    """`soak` where the environment has ROWCAST_SOAK=1, else `test`."""
    return soak if os.environ.get("ROWCAST_SOAK") == "1" else test
