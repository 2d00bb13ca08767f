"""A store that stands in front of another and hands everything on: the base of those that change one thing about it."""

from collections.abc import Iterator

from rowcast.prefetcher.stores.store import Keys, Records, Store, Ticket


class StoreInFront:
    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, keys: Keys, out: Records) -> Ticket:
        return self._store.read(keys, out)

    def write(self, keys: Keys, rows: Records, step: int | None) -> Ticket:
        return self._store.write(keys, rows, step)

    def hint(self, keys: Keys, needed_at_step: int) -> None:
        self._store.hint(keys, needed_at_step)

    def scan(self, table: int, block: int, *, changed: bool = False) -> Iterator[tuple[Keys, Records]]:
        return self._store.scan(table, block, changed=changed)

    def changed_keys(self, table: int) -> Keys:
        return self._store.changed_keys(table)

    @property
    def num_changed(self) -> int:
        return self._store.num_changed

    def settle(self) -> None:
        self._store.settle()

    def forget(self, keys: Keys) -> None:
        self._store.forget(keys)

    @property
    def host_bytes(self) -> int:
        return self._store.host_bytes

    @property
    def restored(self) -> bool:
        return self._store.restored

    def close_at(self, checkpoint: str) -> None:
        self._store.close_at(checkpoint)

    def close(self) -> None:
        self._store.close()
