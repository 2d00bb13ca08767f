"""Links between the prefetchers of ranks in one process and one thread, whose messages arrive when the dice say so."""

import random
from collections import deque
from collections.abc import Sequence


class KeyNetwork:
    """What connects `count` prefetchers; the messages of a pair keep their order."""

    def __init__(self, count: int, seed: int) -> None:
        self.links = [InProcessLinks(self, number) for number in range(count)]
        self._chance = random.Random(seed)
        self._delay = self._chance.choice((0.0, 0.3, 0.9))

    def is_late(self) -> bool:
        return self._chance.random() < self._delay


class InProcessLinks:
    """Implements `KeyLinks`."""

    def __init__(self, network: KeyNetwork, number: int) -> None:
        self.awaited: tuple[int, ...] = ()
        self.sent: list[bytes] = []
        self._network, self._number = network, number
        self._arriving: dict[int, deque[bytes]] = {}

    def send(self, rank: int, message: bytes) -> None:
        self.sent.append(message)
        self._network.links[rank]._arriving.setdefault(self._number, deque()).append(message)

    def receive(self) -> tuple[int, bytes] | None:
        for rank, messages in self._arriving.items():
            if messages and not self._network.is_late():
                return rank, messages.popleft()
        return None

    def awaits(self, ranks: Sequence[int]) -> None:
        self.awaited = tuple(ranks)
