"""Files of mapped stores as an earlier process leaves them."""

from pathlib import Path

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.mapped_store import MappedStore, file_layout
from tests.stores.samples import GROUP, finish, keys_of, open_mapped, present, random_records

CHECKPOINT = "step-000000000100 0123abcd"
KEYS = keys_of((0, [0, 3, 39]), (2, [0, 299]), (3, [6]))
ROWS = random_records(len(KEYS))  # of KEYS
NBYTES = file_layout(GROUP)[1]


def rows_file(folder: Path) -> Path:
    return folder / f"{GROUP.name}.rows"


def leave_closed(folder: Path) -> Path:
    """A file that was closed at CHECKPOINT with ROWS in it."""
    store = open_mapped(folder)
    finish(store.write(KEYS, ROWS))
    store.close(CHECKPOINT)
    return rows_file(folder)


def assert_empty(store: MappedStore) -> None:
    assert not store.restored
    assert present(store) == {}
    store.close()


def reopened(folder: Path, checkpoint: str | None = CHECKPOINT, group: GroupSpec = GROUP) -> MappedStore:
    return open_mapped(folder, group, checkpoint, incarnation=2)
