"""Names of earlier versions that are gone. Whoever removes a key, a kind or an option adds its line here.

"store.kind = mapped"      a value of a key
"prefetcher.background"    a key, or a section with its keys
"run --verify"             an option of a subcommand
"verify"                   a subcommand
"""

from collections.abc import Iterable, Mapping
from typing import Any

LAST_COMMIT = "4c36c62"  # has all of them
NO_VERIFY = "checksums cover rows on disk and on Redis, and `make exact` tests a machine"
NO_TRACES = "the data is read again, which gives the same batches"
NO_HOT_ROWS = "look-ahead keeps the rows that are needed next, whichever are hot (docs/orders.md)"
REMOVED = {  # name -> what replaces it
    "simulate --rates": "`simulate --ranks` counts rows and bytes, and `rowcast estimate` models a step's time",
    "run --verify": NO_VERIFY,
    "run --verify-share": NO_VERIFY,
    "train --verify": NO_VERIFY,
    "timeline --plot": "open timeline.json at https://ui.perfetto.dev",
    "profile": f"{NO_HOT_ROWS}; `simulate` tells the hit ratios, and `advise` the curve",
    "data.order": NO_HOT_ROWS,
    "data.hot": NO_HOT_ROWS,
    "cache.pin": NO_HOT_ROWS,
    "advise --samples": "--max-steps reads the first steps, and the whole run is surer",
    "estimate --plot": "the line of the bottleneck names the critical path's tasks",
    "estimate --advised": "`rowcast advise` prints the sections; put them into the job file or give them by --vary",
    "estimate --compare": "`rowcast estimate --run` prints the same ms of each task as `--rates`",
    "store.kind = mapped": 'store.kind = "tiered" keeps the rows of coming steps in store.memory, the others on disk',
    "run --save-trace": NO_TRACES,
    "simulate --save-trace": NO_TRACES,
    "simulate --trace": NO_TRACES,
}


def gone(names: Iterable[str]) -> str | None:
    """One sentence for the first of the names that is gone; None if all are alive."""
    found = next((name for name in names if name in REMOVED), None)
    return None if found is None else f"{found} is gone: {REMOVED[found]}; commit {LAST_COMMIT} has it"


def refuse_removed(content: Mapping[str, Any], path: str) -> None:
    """Checks a section of a job file. Raises ValueError."""
    for key, value in content.items():
        name = f"{path}.{key}" if path else key
        if sentence := gone((name, f"{name} = {value}")):
            raise ValueError(sentence)


def removed_option(subcommand: str, arguments: Iterable[str]) -> str | None:
    """The sentence for a command line that names a subcommand or an option which is gone; None for any other."""
    options = (argument.partition("=")[0] for argument in arguments)
    return gone((subcommand, *(f"{subcommand} {option}" for option in options)))


def without_removed(content: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The job of an earlier version's manifest. A section whose kind is gone is left out, so it has its defaults."""
    kept = {}
    for key, value in content.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            if gone(f"{name}.{inner} = {own}" for inner, own in value.items()):
                continue
            value = without_removed(value, name)
        if name not in REMOVED:
            kept[key] = value
    return kept
