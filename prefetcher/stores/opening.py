"""The store that a job asks for."""

from pathlib import Path

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.mapped_store import MappedStore
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import Store


def open_store(job: Job, group: GroupSpec, *, incarnation: int, checkpoint: str | None) -> Store:
    """`checkpoint`: identity of the one that the run goes on from; where the store is not `restored`, its rows are to be written into it.

    Raises ConfigError.
    """
    if job.store.kind == "memory":
        return MemoryStore(group, job.job.seed)
    folder = job.run_dir / "tables" if job.store.path is None else Path(job.store.path)
    return MappedStore.open(group, job.job.seed, folder, incarnation=incarnation, checkpoint=checkpoint)
