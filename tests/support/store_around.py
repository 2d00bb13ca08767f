"""A store around another one, for tests that change or note some of its calls."""

from rowcast.prefetcher.stores.store import Keys, ReadTicket, Records, RowStore, Ticket


class StoreAround(RowStore):
    def __init__(self, store: RowStore) -> None:
        self._store = store

    def read(self, keys: Keys, out: Records) -> ReadTicket:
        return self._store.read(keys, out)

    def write(self, keys: Keys, rows: Records) -> Ticket:
        return self._store.write(keys, rows)

    def close(self) -> None:
        self._store.close()
