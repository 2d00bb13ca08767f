"""How much processor time do the checksums of rows on Redis take, over that of the calls which move the rows?

    python -m benchmarks.redis_checksums

Starts a redis-server of its own. The calls' processor time is only part of a step's, so the share of a step is less.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.stores.cold.redis_rows import RedisRows
from rowcast.prefetcher.stores.cold.segments import seal, whole_pages
from tests.support import jobs
from tests.support.redis_server import RedisServer

ROWS, ROUNDS = 20_000, 21
DIMS = (8, 32, 64)  # with Adagrad


def median_us(work: Callable[[], object]) -> float:
    """The processor time of this process for a row, in us."""
    seconds = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        work()
        seconds.append(time.process_time() - began_s)
    return float(np.median(seconds[1:])) / ROWS * 1e6


def measure(group: GroupSpec, server: RedisServer, folder: Path) -> str:
    keys = np.random.default_rng(0).permutation(ROWS)
    records = np.random.default_rng(1).integers(0, 256, (ROWS, group.record_bytes), np.uint8)
    with closing(RedisRows.open(group, server.url, folder, password=None, timeout_s=60.0)) as rows:
        places = rows.write(keys, records)
        values = np.zeros((ROWS, 1 + group.record_bytes // 8), np.uint64)

        def both() -> None:
            words = values.view(np.int32)
            seal(values, words, rows._constants, rows._identities(keys, places))
            assert whole_pages(values, words, rows._constants, rows._identities(keys, places)) == ROWS

        checks = median_us(both)
        calls = median_us(lambda: rows.write(keys, records)) + median_us(lambda: rows.read(keys, places, records))
    share = 100 * checks / calls
    return f"{group.record_bytes:6} bytes: {checks:.3f} us of {calls:.2f} us for a row written and read: {share:.2f} %"


def main() -> None:
    sparse = {"kind": "adagrad", "lr": 0.1}
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder) / "server") as server:
        for dim in DIMS:
            job = jobs.job(tables=[jobs.table("t", ROWS, dim)], optimizer={"sparse": sparse})
            print(measure(group_specs(job)[0], server, Path(folder) / str(dim)))


if __name__ == "__main__":
    main()
