"""Names that rowcast had: what replaces each, and the last commit that had it."""

LAST_COMMIT = "4c36c62"
REPLACED = {
    "simulate --rates": "`simulate --ranks` counts rows and bytes, and `prefetcher estimate` models a step's time",
}


def removed(name: str) -> str | None:
    """Returns what to say of a name that rowcast had; None for any other."""
    instead = REPLACED.get(name)
    return None if instead is None else f"{name} was removed: {instead}; the last commit that had it is {LAST_COMMIT}"
