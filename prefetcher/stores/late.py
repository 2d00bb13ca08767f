"""A store whose operations finish late and out of order, as those of a slow device do. It holds nothing itself: it delays another store."""

import random
from collections.abc import Callable, Iterator

from prefetcher.stores.base import Keys, Records, Store, Ticket


class LateTicket:
    def __init__(self, chance: random.Random, operation: Callable[[], Ticket]) -> None:
        self._chance = chance
        self._operation: Callable[[], Ticket] | None = operation
        self._ticket: Ticket | None = None  # of the operation, once it was begun

    def done(self) -> bool:
        """Begins the operation only now, when the dice say so: nobody may rely on it having happened earlier."""
        if self._operation is not None and self._chance.random() < 0.3:
            self._ticket = self._operation()
            self._operation = None
        return self._ticket is not None and self._ticket.done()


class LateStore:
    """Delays reads and writes of `store` by a number of polls that a seed decides."""

    def __init__(self, store: Store, seed: int) -> None:
        self._store = store
        self._chance = random.Random(seed)

    def read(self, keys: Keys, out: Records) -> LateTicket:
        return LateTicket(self._chance, lambda: self._store.read(keys, out))

    def write(self, keys: Keys, rows: Records, step: int | None) -> LateTicket:
        return LateTicket(self._chance, lambda: self._store.write(keys, rows, step))

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
