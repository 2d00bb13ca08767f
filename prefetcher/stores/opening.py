"""The store that a job asks for."""

from pathlib import Path

from prefetcher.stores.base import Store
from prefetcher.stores.mapped import MappedStore
from prefetcher.stores.memory import MemoryStore
from protocol.job import Job
from protocol.tables import GroupSpec


def open_store(job: Job, group: GroupSpec, *, incarnation: int, checkpoint: str | None) -> Store:
    """`checkpoint`: identity of the one that the run goes on from; where the store is not `restored`, its rows are to be written into it.

    Raises ConfigError.
    """
    if job.store.kind == "memory":
        return MemoryStore(group, job.job.seed)
    folder = job.run_dir / "tables" if job.store.path is None else Path(job.store.path)
    return MappedStore.open(group, job.job.seed, folder, incarnation=incarnation, checkpoint=checkpoint)
