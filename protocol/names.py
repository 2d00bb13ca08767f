"""What is said of a name that is not there."""

import difflib
from collections.abc import Collection, Sequence

MOST_LISTED = 12  # names of one sentence


def nearest(name: str, names: Collection[str]) -> str:
    """`, the nearest is price`, or nothing where none is near."""
    by_small = {other.lower(): other for other in names}
    close = difflib.get_close_matches(name.lower(), by_small, n=1)
    return f", the nearest is {by_small[close[0]]}" if close else ""


def listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_LISTED
    return ", ".join(names[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
