"""Passes pieces of the model state, in a bounded queue, to the thread that writes a checkpoint.

Each counter has one writing thread, and a deque needs no lock: neither thread ever waits for the other.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rowcast.prefetcher.stores.store import Keys, Records

QUEUE_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    group_index: int
    keys: Keys
    records: Records


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedDensePiece:
    content: bytes

    @property
    def nbytes(self) -> int:
        return len(self.content)


@dataclass(frozen=True, kw_only=True, slots=True)
class Complete:
    """The last item."""

    dense_checksum: str | None  # xxh3_64 of all dense pieces; None if there are none
    rows: Iterable[RowBlock]  # read as they are written

    @property
    def nbytes(self) -> int:
        return 0


Item = QueuedDensePiece | Complete


class WriteQueue:
    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._put_bytes = 0
        self._taken_bytes = 0

    def put(self, item: Item) -> bool:
        """Returns False while QUEUE_BYTES are waiting. A larger item is accepted when nothing waits."""
        waiting = self._put_bytes - self._taken_bytes
        if waiting and item.nbytes and waiting + item.nbytes > QUEUE_BYTES:
            return False
        self._put_bytes += item.nbytes
        self._items.append(item)
        return True

    def take(self) -> Item | None:
        if not self._items:
            return None
        item = self._items.popleft()
        self._taken_bytes += item.nbytes
        return item
