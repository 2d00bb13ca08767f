"""Copies what the newest version changed into a server that speaks the Redis protocol, for readers in other languages.

    python -m examples.publish_redis served redis://127.0.0.1:6379/0

    clicks:<table>:<row>    f32 [width], little-endian        a row that was never trained is missing
    clicks:dense            the dense weights, as safetensors
    clicks:version          the number of the version, written last

A reader here can see rows of two versions while a copy runs; mapped files switch all at once.
"""

import sys
from pathlib import Path

import redis

from rowcast.serving import Model
from rowcast.serving.version_file import DENSE_NAME, version_name

PREFIX = "clicks"


def publish(folder: str, url: str) -> int:
    """Returns how many rows were written. Versions that were left out since the last copy are copied too."""
    server = redis.Redis.from_url(url)
    now = Model(folder).now()
    done, count = int(server.get(f"{PREFIX}:version") or 0), 0
    versions = [own for own in now.versions if own.file.number > done]
    for own in reversed(versions):
        for table in own.file.tables:
            for rows, values in now.rows_of(own, table.name):
                keys = (f"{PREFIX}:{table.name}:{row}" for row in rows.tolist())
                server.mset(dict(zip(keys, map(bytes, values), strict=True)))
                count += len(rows)
    server.set(f"{PREFIX}:dense", (Path(folder) / version_name(now.version.number) / DENSE_NAME).read_bytes())
    server.set(f"{PREFIX}:version", now.version.number)
    return count


if __name__ == "__main__":
    print(publish(sys.argv[1], sys.argv[2]), "rows")
