"""Opens a tiered store whose cold rows lie on a Redis server or cluster."""

import os
from importlib import import_module

from rowcast.job.schema import Job
from rowcast.job.server_url import PASSWORD, parse_server_url
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.stores.tier_budget import disk_shares
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.runtime.errors import ConfigError


def open_store(job: Job, group: GroupSpec, incarnation: int, checkpoint: str | None) -> TieredStore:
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
    num_rows = disk_shares(job, group_specs(job))[group.index].num_rows
    cold = RedisRows.open(
        group,
        parse_server_url(job.store.url),
        job.table_folder,
        password=os.environ.get(PASSWORD),
        timeout_s=job.store.timeout_seconds,
    )
    limit = "but store.memory has room for an index of {most}; raise it"
    return TieredStore(group.name, group.record_bytes, TouchedRows(group, num_rows, limit), cold)
