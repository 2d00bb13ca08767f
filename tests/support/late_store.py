"""Wraps a store so that its operations finish late and out of order, as on a slow device."""

import random
from collections.abc import Callable, Sequence

from rowcast.prefetcher.stores.store import Keys, ReadTicket, Records, RowStore, StoreCounts, Ticket
from rowcast.protocol.plan import GroupPlan
from rowcast.runtime.arrays import I64


class LateTicket:
    def __init__(self, chance: random.Random, operation: Callable[[], Ticket]) -> None:
        self._chance = chance
        self._operation: Callable[[], Ticket] | None = operation
        self._ticket: Ticket | None = None  # of the operation, once begun

    def done(self) -> bool:
        """Starts the operation only now, at random, so that no caller can rely on an earlier start."""
        if self._operation is not None and self._chance.random() < 0.3:
            self._ticket = self._operation()
            self._operation = None
        return self._ticket is not None and self._ticket.done()


class LateRead(LateTicket):
    def __init__(self, chance: random.Random, read: Callable[[], ReadTicket]) -> None:
        super().__init__(chance, self._begin)
        self._read = read

    def _begin(self) -> ReadTicket:
        self._begun = self._read()
        return self._begun

    @property
    def absent(self) -> Sequence[int] | I64:
        return self._begun.absent


class LateStore(RowStore):
    """Delays reads and writes of `store` by a number of polls that a seed decides."""

    def __init__(self, store: RowStore, seed: int) -> None:
        self.delayed = store
        self._chance = random.Random(seed)
        self.numbers, self.works_ahead = store.numbers, store.works_ahead

    def read(self, keys: Keys, out: Records) -> LateRead:
        return LateRead(self._chance, lambda: self.delayed.read(keys, out))

    def write(self, keys: Keys, rows: Records) -> LateTicket:
        return LateTicket(self._chance, lambda: self.delayed.write(keys, rows))

    def begin(self, memory_rows: int) -> None:
        self.delayed.begin(memory_rows)

    def stage(self, step: int, plan: GroupPlan) -> None:
        self.delayed.stage(step, plan)

    def advance(self, home_through: int | None) -> bool:
        return self.delayed.advance(home_through)

    def counts(self) -> StoreCounts | None:
        return self.delayed.counts()

    def close(self) -> None:
        self.delayed.close()
