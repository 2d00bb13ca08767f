"""Opens a tiered store whose cold rows lie on a Redis server or cluster."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rowcast.job.schema import Job
from rowcast.job.server_url import PASSWORD, parse_server_url
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.stores.tier_budget import disk_shares
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.runtime.telemetry.logs import get_logger

if TYPE_CHECKING:
    from rowcast.prefetcher.stores.cold.redis_rows import RedisRows


def open_store(job: Job, group: GroupSpec, incarnation: int, checkpoint: str | None) -> TieredStore:
    cold = open_rows(job, group, job.table_folder)
    get_logger().info("rows go to Redis", group=group.name, servers=cold.server_names, keys=cold.keys)
    num_rows = disk_shares(job, group_specs(job))[group.index].num_rows
    limit = "but store.memory has room for an index of {most}; raise it"
    return TieredStore(group.name, group.record_bytes, TouchedRows(group, num_rows, limit), cold)


@contextmanager
def trial_rows(job: Job, group: GroupSpec) -> "Iterator[RedisRows]":
    """Rows for a trial, beside those of any run. They are deleted, after a failure too if the server answers again."""
    with TemporaryDirectory() as folder:
        try:
            with closing(open_rows(job, group, Path(folder))) as rows:
                yield rows
        except RowcastError:
            with suppress(RowcastError):
                open_rows(job, group, Path(folder)).close()  # what the first one has left, by its note
            raise


def open_rows(job: Job, group: GroupSpec, folder: Path) -> "RedisRows":
    """See `RedisRows.open`."""
    for package in ("redis", "hiredis"):
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise ConfigError(
                f'store.kind = "{job.store.kind}" needs the package {package}, which is not installed; pip install '
                "'rowcast[redis]'"
            ) from None
    from rowcast.prefetcher.stores.cold.redis_rows import RedisRows

    assert job.store.url is not None, "a store on a server has a URL"
    return RedisRows.open(
        group,
        parse_server_url(job.store.url),
        folder,
        password=os.environ.get(PASSWORD),
        timeout_s=job.store.timeout_seconds,
    )
