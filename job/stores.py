"""Lists the stores of `store.kind` without importing them. A new one is a line here and the store's file."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreKind:
    module: str  # has open_store(job, group, incarnation, checkpoint); imported only when the store is used
    note: str = ""  # for docs/job-file.md
    in_memory: bool = True  # trained rows take the prefetcher's memory, and opening the store creates no files
    keys: tuple[str, ...] = ()  # the keys of [store] that it knows, beside `kind`
    has_tier: bool = False  # memory holds the rows that the planner chooses, as many as fit into store.memory
    full_size: bool = False  # its files are as large as the tables from the start


STORES = {
    "memory": StoreKind("rowcast.prefetcher.stores.memory_store"),
    "mapped": StoreKind(
        "rowcast.prefetcher.stores.mapped_store",
        note="tables in files, as large as the tables from the start",
        in_memory=False,
        keys=("path",),
        full_size=True,
    ),
    "tiered": StoreKind(
        "rowcast.prefetcher.stores.tiered_store",
        note="the rows that coming steps need in memory, the others in files that grow as rows are trained",
        in_memory=False,
        keys=("memory", "path", "disk"),
        has_tier=True,
    ),
    "redis": StoreKind(
        "rowcast.prefetcher.stores.redis_store",
        note="the rows that coming steps need in memory, the others on a Redis server ([redis.md](redis.md))",
        in_memory=False,
        keys=("memory", "url", "timeout"),
        has_tier=True,
    ),
}
