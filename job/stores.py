"""Lists the stores of `store.kind` without importing them. A new one is a line here and the store's file."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreKind:
    module: str  # has open_store(job, group, incarnation, checkpoint); imported only when the store is used
    note: str = ""  # for docs/job-file.md
    in_memory: bool = True  # trained rows take the prefetcher's memory, and opening the store creates no files
    has_path: bool = False  # store.path names the folder of its files
    has_url: bool = False  # store.url names its server
    full_size: bool = False  # its files are as large as the tables from the start


STORES = {
    "memory": StoreKind("rowcast.prefetcher.stores.memory_store"),
    "mapped": StoreKind(
        "rowcast.prefetcher.stores.mapped_store",
        note="tables in files, as large as the tables from the start",
        in_memory=False,
        has_path=True,
        full_size=True,
    ),
}
