"""How often a test repeats: a few times in `make test-all`, many in `make soak`, and fewer in `make quick` if slow."""

import os


def count(test: int, soak: int, quick: int | None = None) -> int:
    """`soak` where the environment has ROWCAST_SOAK=1, `quick` where it has ROWCAST_QUICK=1, else `test`."""
    if os.environ.get("ROWCAST_QUICK") == "1" and quick is not None:
        return quick
    return soak if os.environ.get("ROWCAST_SOAK") == "1" else test
