"""Opens, looks up, refreshes and prints a checksum: `python reader_alone.py VERSIONS RECEIVED [PACKAGE...]`.

Creates the file RECEIVED once the first version is open, then waits until there is a newer one. No PACKAGE may be
imported, as if it were not installed.
"""

import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

REFUSED = set(sys.argv[3:])


class Refuses(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        if fullname.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {fullname!r} here", name=fullname)


sys.meta_path.insert(0, Refuses())

from rowcast.serving import Model  # noqa: E402


def main() -> None:
    model = Model(sys.argv[1], check="all")
    seen = [model.version.number]
    Path(sys.argv[2]).touch()
    while not model.refresh():
        time.sleep(0.005)
    import numpy as np
    import xxhash

    rows = model.look_up({"user": [0, 5, 2999], "item": np.arange(700)})
    bags = [model.bags("item", [1, 2, 3], [0, 1, 3]), model.rows("site", [49])]
    dense = model.dense()["weight"]
    content = b"".join(np.ascontiguousarray(own).tobytes() for own in (*rows.values(), *bags, dense))
    sys.stdout.write(f"{[*seen, model.version.number]} {xxhash.xxh3_64_hexdigest(content)}\n")


if __name__ == "__main__":
    main()
