"""Deletes rows on servers that killed prefetchers left, and whose folders no prefetcher of this start opens.

    <run_dir>/tables/             of a run of one rank
              rank-003/tables/    of one of several
                       <group>.redis     names rows on a server, deleted from there

Each prefetcher cleans its folder. The process that holds the run directory cleans folders of a different `ranks.count`
before it starts prefetchers of ranks. If the lock of such a folder shows a prefetcher at work, it leaves the folder to
the next start.
"""

from contextlib import ExitStack
from pathlib import Path

from rowcast.job.schema import TABLES, Job
from rowcast.prefetcher.stores.cold import redis_note
from rowcast.prefetcher.stores.redis_store import delete_left_keys
from rowcast.runtime.disk import own_files_in
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.run_directory import RunDirectory, unused_pair_folders
from rowcast.runtime.telemetry.logs import get_logger


def remove_left_keys(job: Job, folder: Path) -> None:
    """`folder`: of a pair, locked by this process. Raises RowcastError if a server of the job does not answer."""
    notes = own_files_in(folder / TABLES, redis_note.NAME)
    if notes:
        delete_left_keys(job, notes)


def remove_left_tables(job: Job) -> None:
    """Raises as `remove_left_keys` does."""
    for folder in unused_pair_folders(job.run_dir, job.ranks.count):
        if not own_files_in(folder / TABLES, redis_note.NAME):
            continue
        with ExitStack() as stack:
            try:
                if folder != job.run_dir:
                    stack.enter_context(RunDirectory(folder, "prefetcher"))
            except ConfigError as error:
                get_logger().warning("tables of another ranks.count stay until the next start", because=str(error))
            else:
                remove_left_keys(job, folder)
