"""Writes hints for errors about an unknown name: the nearest known name, or a list of names."""

import difflib
from collections.abc import Collection, Sequence

MOST_LISTED = 12  # names in one sentence


def closest(name: str, names: Collection[str]) -> str | None:
    """Returns the name that was most likely meant; None if none is near."""
    by_small = {other.lower(): other for other in names}
    found = difflib.get_close_matches(name.lower(), by_small, n=1)
    return by_small[found[0]] if found else None


def nearest(name: str, names: Collection[str]) -> str:
    """Returns `, the nearest is price`, or "" if none is near."""
    found = closest(name, names)
    return "" if found is None else f", the nearest is {found}"


def instead(names: Sequence[str], others: Sequence[str]) -> str:
    """Returns `int_1 instead of int_0`: what only one of two lists has."""
    pairs = ((names, others), (others, names))
    return " instead of ".join(listed([name for name in own if name not in other]) or "none" for own, other in pairs)


def listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_LISTED
    return ", ".join(names[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
