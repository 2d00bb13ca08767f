"""What does it cost a reader to open a changed version, with all that it checks?

Method: a run without training whose checkpoints have all rows of its tables, and then every 20th row twice. A reader at
the second version refreshes to the third, again and again: the least and the median processor time. The tables are one
of 10^6 rows, and 26 of 300. To compare two commits, take turns; each makes a folder of its own.

    python -m benchmarks.serving_opening FOLDER
"""

import argparse
import shutil
import statistics
import time
from pathlib import Path

import numpy as np

from rowcast.prefetcher.checkpoints.writer import RowBlock
from rowcast.serving.model import Model
from tests.serving.served_run import ServedRun, Tables, publish, serving_job

TABLES: dict[str, Tables] = {
    "one of 1,000,000 rows": (("t", 1_000_000, 16, {}),),
    "26 of 300 rows": tuple((f"t{number}", 300, 16, {}) for number in range(26)),
}
EVERY, TURNS = 20, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    for number, (name, tables) in enumerate(TABLES.items()):
        folder = given.folder / str(number)
        if not folder.exists():
            versions(folder, tables)
        times = opened(folder / "served")
        print(f"{name}: least {1e3 * min(times):.2f} ms, median {1e3 * statistics.median(times):.2f} ms of {TURNS}")


class LargeRun(ServedRun):
    """Writes rows without keeping them."""

    every = 1

    def blocks(self) -> list[RowBlock]:
        found = []
        for index, group in enumerate(self.groups):
            for table in group.tables:
                rows = np.arange(0, table.num_embeddings, self.every, dtype=np.int64)
                records = self.rng.normal(size=(len(rows), group.record_floats)).astype(np.float32).view(np.uint8)
                found.append((index, (table.index << 48) + rows, records))
        return found


def versions(folder: Path, tables: Tables) -> None:
    run = LargeRun(serving_job(folder / "run", tables))
    for number in (1, 2, 3):
        run.every = 1 if number == 1 else EVERY
        run.step += 10
        run.checkpoint()
        publish(run, folder / "served", "int8")
        shutil.copy(folder / "served" / "CURRENT", folder / f"CURRENT of {number}")


def opened(served: Path) -> list[float]:
    """Returns the processor time of each refresh, in s."""
    times = []
    for _ in range(TURNS):
        shutil.copy(served.parent / "CURRENT of 2", served / "CURRENT")
        model = Model(served)
        shutil.copy(served.parent / "CURRENT of 3", served / "CURRENT")
        began_s = time.process_time()
        assert model.refresh()
        times.append(time.process_time() - began_s)
    return times


if __name__ == "__main__":
    main()
