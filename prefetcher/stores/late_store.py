"""A store whose operations finish late and out of order, as those of a slow device do. It holds nothing itself: it delays another store."""

import random
from collections.abc import Callable

from rowcast.prefetcher.stores.store import Keys, Records, Store, Ticket
from rowcast.prefetcher.stores.wrapper import StoreInFront


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


class LateStore(StoreInFront):
    """Delays reads and writes of `store` by a number of polls that a seed decides."""

    def __init__(self, store: Store, seed: int) -> None:
        super().__init__(store)
        self._chance = random.Random(seed)

    def read(self, keys: Keys, out: Records) -> LateTicket:
        return LateTicket(self._chance, lambda: self._store.read(keys, out))

    def write(self, keys: Keys, rows: Records, step: int | None) -> LateTicket:
        return LateTicket(self._chance, lambda: self._store.write(keys, rows, step))
