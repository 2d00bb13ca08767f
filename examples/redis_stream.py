"""Writes the entries of a Redis stream as finished files, which a job with `data.follow` trains as they arrive.

    redis-cli XADD clicks '*' row '{"label": 1, "user": 7, "item": 3}'
    python -m examples.redis_stream redis://127.0.0.1:6379/0 clicks /data/arriving       # format = "jsonl"

A file is named after its last entry. So names ascend, and after a kill the next start reads on behind the newest file:
no entry is lost, and none is written twice. The file END, made by hand, ends the run.
"""

import os
import sys
from pathlib import Path
from time import sleep
from typing import Any

import redis

MOST_ROWS, EVERY_S = 10_000, 1.0


def next_file(server: Any, stream: str, folder: Path) -> Path | None:
    """Returns the new file; None if no entry has come since the newest one."""
    newest = max((path.stem for path in folder.glob("*.jsonl")), default="0-0")
    last = "-".join(str(int(part)) for part in newest.split("-"))
    entries = server.xrange(stream, min=f"({last}", count=MOST_ROWS)
    if not entries:
        return None
    milliseconds, number = entries[-1][0].decode().split("-")
    path = folder / f"{milliseconds:0>15}-{number:0>9}.jsonl"
    with path.with_suffix(".tmp").open("wb") as file:
        file.writelines(fields[b"row"] + b"\n" for _, fields in entries)
        os.fsync(file.fileno())
    return path.with_suffix(".tmp").rename(path)


if __name__ == "__main__":
    connected = redis.Redis.from_url(sys.argv[1])
    while True:
        if next_file(connected, sys.argv[2], Path(sys.argv[3])) is None:
            sleep(EVERY_S)
