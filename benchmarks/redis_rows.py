"""What do rows on Redis cost to write and to read?

Method: rows of 80, 272 and 528 bytes are written once, then random ones of them read and written in turn, 10,000 a
call. Medians of wall time and of this process's processor time; memory as the servers count it. Start a server, or a
cluster, with nothing on disk, and give its URL; the rows are deleted at the end.

    redis-server --save "" &
    python -m benchmarks.redis_rows redis://127.0.0.1:6379
"""

import argparse
import os
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.machine import machine
from rowcast.job.server_url import PASSWORD, ServerUrl, parse_server_url
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.cold.redis_rows import RedisRows

RECORD_BYTES = (80, 272, 528)
BATCH = 10_000


def measure(url: ServerUrl, record_bytes: int, num_rows: int, rounds: int) -> str:
    random = np.random.default_rng(0)
    group = GroupSpec(
        index=0,
        name="benchmark",
        tables=(),
        embedding_dim=1,
        parts=(),
        record_bytes=record_bytes,
        feature_positions=(),
    )
    records = random.integers(0, 256, (BATCH, record_bytes), np.uint8)
    out, places = np.empty_like(records), np.empty(num_rows, np.uint32)
    seconds: dict[str, list[float]] = {name: [] for name in ("read", "read cpu", "write", "write cpu")}
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(RedisRows.open(group, url, Path(folder), password=os.environ.get(PASSWORD), timeout_s=60.0)) as rows,
    ):
        before = used_memory(rows)
        for first in range(0, num_rows, BATCH):
            keys = np.arange(first, first + BATCH)
            places[keys] = rows.write(keys, records)
        memory = (used_memory(rows) - before) / num_rows
        for _ in range(rounds):
            keys = np.sort(random.choice(num_rows, BATCH, replace=False))
            began = time.perf_counter(), time.process_time()
            rows.read(keys, places[keys], out)
            middle = time.perf_counter(), time.process_time()
            places[keys] = rows.write(keys, records)
            end = time.perf_counter(), time.process_time()
            for name, (since, until) in {"read": (began, middle), "write": (middle, end)}.items():
                seconds[name].append(until[0] - since[0])
                seconds[f"{name} cpu"].append(until[1] - since[1])
        servers = len(rows._servers.nodes)
    us = " | ".join(f"{statistics.median(times) / BATCH * 1e6:.2f}" for times in seconds.values())
    return f"| {record_bytes} | {servers} | {us} | {memory:.0f} |"


def used_memory(rows: RedisRows) -> int:
    return sum(int(node.client.info("memory")["used_memory"]) for node in rows._servers.nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", help="of servers or clusters")
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    print(machine(), "load", os.getloadavg()[0])
    print("| bytes a row | servers | us a row: read | of these cpu here | write | of these cpu here | memory a row |")
    print("|---|---|---|---|---|---|---|")
    for record_bytes in RECORD_BYTES:
        for url in arguments.urls:
            print(measure(parse_server_url(url), record_bytes, arguments.rows, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
