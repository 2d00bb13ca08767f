"""What does harm to rows: stores that lose, keep or tear them, and bytes that change between the two processes."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowcast.prefetcher.stores.store import FINISHED, Keys, ReadTicket, Records, RowStore, Ticket
from rowcast.protocol.messages import RingRef, RowsBack, RowSpan, StepReady
from rowcast.protocol.transport.ring import RingWriter
from rowcast.runtime.arrays import I64
from tests.support.driver import InProcessRun
from tests.support.store_around import StoreAround
from tests.verify.targets import Target

Change = Callable[[Records, int], None]  # of all rows of a span, and which one is the target


class Harmful(StoreAround):
    """Another store, but for one row, with which subclasses have their way."""

    def __init__(self, store: RowStore, key: int) -> None:
        super().__init__(store)
        self._key = key


class ChangedRead:
    """The ticket of a read whose result is changed once it is done."""

    def __init__(self, ticket: ReadTicket, change: Callable[[], None]) -> None:
        self._ticket = ticket
        self._change = change

    @property
    def absent(self) -> Sequence[int] | I64:
        return self._ticket.absent

    def done(self) -> bool:
        """Called until it says yes, and not again."""
        if not self._ticket.done():
            return False
        self._change()
        return True


class LosesWrite(Harmful):
    """Says that it wrote the row, and did not, the time after it came home that many times."""

    def __init__(self, store: RowStore, key: int, after: int) -> None:
        super().__init__(store, key)
        self._left = after

    def write(self, keys: Keys, rows: Records) -> Ticket:
        kept = np.arange(len(keys))
        if (keys == self._key).any():
            kept = np.flatnonzero(keys != self._key) if self._left == 0 else kept
            self._left -= 1
        return self._store.write(keys[kept], rows[kept]) if len(kept) else FINISHED


class ReturnsOld(Harmful):
    """Once the row was written it gives what it gave first."""

    def __init__(self, store: RowStore, key: int) -> None:
        super().__init__(store, key)
        self._first: Records | None = None
        self._written = False

    def write(self, keys: Keys, rows: Records) -> Ticket:
        self._written |= bool((keys == self._key).any())
        return self._store.write(keys, rows)

    def read(self, keys: Keys, out: Records) -> ReadTicket:
        return ChangedRead(self._store.read(keys, out), lambda: self._change(keys, out))

    def _change(self, keys: Keys, out: Records) -> None:
        for place in np.flatnonzero(keys == self._key):
            if self._first is None:
                self._first = out[place].copy()
            elif self._written:
                self._spoil(out[place], self._first)

    def _spoil(self, row: Records, first: Records) -> None:
        row[:] = first


class Tears(ReturnsOld):
    """Once the row was written, half of what it gives is what it gave first."""

    def _spoil(self, row: Records, first: Records) -> None:
        row[: len(row) // 4] = first[: len(row) // 4]


def on_way_to_device(run: InProcessRun, target: Target, change: Change) -> None:
    """Changes a fetched row in the ring, after its StepReady was sent."""

    def harmful(message: StepReady) -> None:
        if message.step == target.step:
            change_span(run, run.rings.fetch_writer, message.payload, message.rows, target, change)
        run.trainer.cache.accept(message)

    run.trainer.conversation.listen({StepReady: harmful})


def on_way_home(run: InProcessRun, target: Target, change: Change) -> None:
    """Changes a victim in the ring, after its RowsBack was sent."""

    def harmful(message: RowsBack) -> None:
        if message.barrier is None and message.step == target.step:
            change_span(run, run.rings.of_trainer.back, message.payload, message.rows, target, change)
        run.prefetcher.writeback.accept(message)

    run.prefetcher.conversation.listen({RowsBack: harmful})


def change_span(
    run: InProcessRun,
    ring: RingWriter,
    payload: RingRef | None,
    spans: Sequence[RowSpan],
    target: Target,
    change: Change,
) -> None:
    """Has the span changed that holds the target, if it is among them."""
    width = run.groups[target.group].record_bytes
    for span in spans:
        if span.group == target.group and 0 <= target.place - span.start < span.count:
            assert payload is not None, "rows stand in a payload"
            content: npt.NDArray[np.uint8] = np.frombuffer(ring.payload(payload), np.uint8)
            rows = content[span.offset : span.offset + span.count * width].reshape(span.count, width)
            change(rows, target.place - span.start)


def flip_byte(rows: Records, row: int) -> None:
    rows[row, 5] ^= 16


def swap_with_next(rows: Records, row: int) -> None:
    other = (row + 1) % len(rows)
    rows[[row, other]] = rows[[other, row]]


def flip(rows: Tensor, row: int) -> None:
    """One bit of one row."""
    rows.view(torch.int32)[row, 1] ^= 1


def flip_all(rows: Tensor) -> None:
    """One bit of every row."""
    rows.view(torch.int32)[:, 1] ^= 1
