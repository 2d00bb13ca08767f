"""Opens a tiered store with cold rows on Redis, and deletes rows that killed prefetchers left on its servers.

    <run_dir>/tables/             of a run of one rank
              rank-003/tables/    of one of several
                       <group>.redis     names rows on a server, deleted from there

Each prefetcher cleans its folder. The process that holds the run directory cleans folders of a different `ranks.count`
before it starts prefetchers of ranks. If the lock of such a folder shows a prefetcher at work, it leaves the folder to
the next start.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rowcast.job.schema import TABLES, Job
from rowcast.job.stores import PASSWORD, Redis, parse_server_url
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.stores.cold.redis_keys import NAME, delete_earlier
from rowcast.prefetcher.stores.tier_budget import disk_shares
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.runtime.disk import own_files_in
from rowcast.runtime.errors import ConfigError, RowcastError
from rowcast.runtime.run_directory import RunDirectory, unused_pair_folders
from rowcast.runtime.telemetry.logs import get_logger

if TYPE_CHECKING:
    from rowcast.prefetcher.stores.cold.redis_rows import RedisRows


def open_store(job: Job, group: GroupSpec) -> TieredStore:
    cold = open_rows(job, group, job.table_folder)
    get_logger().info("rows go to Redis", group=group.name, servers=cold.server_names, keys=cold.keys)
    num_rows = disk_shares(job, group_specs(job))[group.index].num_rows
    limit = "but store.memory has room for an index of {most}; raise it"
    return TieredStore(group.name, group.record_bytes, TouchedRows(group, num_rows, limit), cold)


@contextmanager
def trial_rows(job: Job, group: GroupSpec) -> "Iterator[RedisRows]":
    """Opens rows for a trial, separate from any run's. Deletes them at the end, after a failure too if the server
    answers again."""
    with TemporaryDirectory() as folder:
        try:
            with closing(open_rows(job, group, Path(folder))) as rows:
                yield rows
        except RowcastError:
            with suppress(RowcastError):
                open_rows(job, group, Path(folder)).close()  # deletes what the first one left, by its note
            raise


def open_rows(job: Job, group: GroupSpec, folder: Path) -> "RedisRows":
    """See `RedisRows.open`."""
    check_packages(job)
    from rowcast.prefetcher.stores.cold.redis_rows import RedisRows

    assert isinstance(job.store, Redis)
    return RedisRows.open(
        group,
        parse_server_url(job.store.url),
        folder,
        password=os.environ.get(PASSWORD),
        timeout_s=job.store.timeout_seconds,
    )


def remove_left_keys(job: Job, folder: Path) -> None:
    """Deletes the rows that killed processes of a run left on the job's servers, and the notes that name them. Warns of
    rows elsewhere. `folder`: of a pair, locked by this process. Raises ConfigError, or StoreLost if a server of the job
    does not answer."""
    notes = own_files_in(folder / TABLES, NAME)
    if not notes:
        return
    if not isinstance(job.store, Redis):
        for path in notes:
            get_logger().warning("rows of an earlier process may remain on a Redis server", note=str(path))
        return
    check_packages(job)
    from rowcast.prefetcher.stores.cold.redis_servers import Servers

    url = parse_server_url(job.store.url)
    with closing(Servers(url, os.environ.get(PASSWORD), job.store.timeout_seconds)) as servers:
        servers.open()
        for path in notes:
            delete_earlier(servers, f"{url.host}:{url.port}", path)


def remove_left_tables(job: Job) -> None:
    """Raises as `remove_left_keys` does."""
    for folder in unused_pair_folders(job.run_dir, job.ranks.count):
        if not own_files_in(folder / TABLES, NAME):
            continue
        with ExitStack() as stack:
            try:
                if folder != job.run_dir:
                    stack.enter_context(RunDirectory(folder, "prefetcher"))
            except ConfigError as error:
                get_logger().warning("tables of another ranks.count stay until the next start", because=str(error))
            else:
                remove_left_keys(job, folder)


def check_packages(job: Job) -> None:
    for package in ("redis", "hiredis"):
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise ConfigError(
                f'store.kind = "{job.store.kind}" needs the package {package}, which is not installed; pip install '
                "'rowcast[redis]'"
            ) from None
