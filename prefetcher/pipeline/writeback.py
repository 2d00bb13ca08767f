"""Writes returned rows to the stores, and tracks the last plan with all rows written.

`RowsBack` carries no keys: its rows have the order of the plan's (or the barrier's) victims. This stage keeps the keys
from before the plan is sent until its last row is applied. It never waits for ring space or credit. It waits for a
different stage only when it would overwrite more rows of a checkpoint than can be set aside, until the checkpoint has
collected some. Collecting waits only for the disk.

Each row is checked before it is written. One that is not finite ends the run, so no store and no checkpoint holds it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rowcast.job.tables import GroupSpec, make_keys
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.readers.source import ascend_below
from rowcast.prefetcher.stores.memory_store import AllStores, Rows
from rowcast.prefetcher.stores.records import FiniteRows, first_fault
from rowcast.prefetcher.stores.store import Keys, Ticket
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.messages import Ask, Released, Returned, RingRef, RowsBack, Save
from rowcast.protocol.plan import barrier_stamp, plan_stamp
from rowcast.protocol.transport.ring import RingReader, release
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import Diverged, RemoteProtocolError


@dataclass(slots=True)
class Expected:
    """The rows to be returned for one plan or barrier."""

    plan: int | None
    barrier: int | None
    train_steps: int  # before it, so that they have trained these rows
    keys: tuple[Keys, ...]  # one per group, in the order of the rows
    applied: list[int] = field(default_factory=list)  # rows of each group that have arrived
    arrived_last: bool = False
    tickets_open: int = 0

    @property
    def name(self) -> str:
        return f"barrier {self.barrier}" if self.barrier is not None else f"plan {self.plan}"

    @property
    def complete(self) -> bool:
        return self.arrived_last and self.tickets_open == 0


@dataclass(slots=True)
class PendingWrite:
    tickets: list[Ticket]
    written: Callable[[], None]  # called once all of them are done
    is_alone: bool = False


class Writeback:
    """The fetcher's thread calls `expect`, the mail's `accept`, the write-back's the other methods in this order."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        stores: tuple[TrackedStore, ...],
        ring: RingReader,
        counters: PrefetcherCounters,
        send: Callable[[Released], None],
        first_train_step: int,
    ) -> None:
        self.applied_through: int | None = None  # rows of every plan up to this one are in the store
        self.applied_barriers = 0
        self.waits_for_checkpoint = False  # rows have arrived, but too many frozen rows are set aside to write them
        self._groups = groups
        self._finite = tuple(map(FiniteRows, groups))
        self._finite_through = first_train_step  # train steps after which every row was finite
        self._stores, self.all_stores = stores, AllStores(stores)
        self._pool = stores[0].numbers.pool
        self._ring = ring
        self._counters = counters
        self._send = send
        self._expected: deque[Expected] = deque()  # plans and barriers in order, including those that return no rows
        self.returned = 0  # the last `Returned` that is in the store
        self.asked: deque[Ask] = deque()  # whose rows may be read
        self.on_save: Callable[[Save], None] = lambda message: None  # all before it is in the store
        self._inbox: deque[RowsBack | Returned | Ask | Save] = deque()
        self._writing: deque[PendingWrite] = deque()

    @property
    def queued(self) -> int:
        return len(self._inbox) + len(self._writing)

    @property
    def has_arrived(self) -> bool:
        """Whether rows are in the ring whose write has not begun."""
        return bool(self._inbox)

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    def expect(self, plan: int | None, barrier: int | None, train_steps: int, keys: tuple[Keys, ...]) -> bool:
        """Must be called before the plan or barrier is sent. `train_steps`: before it. `keys` have the order of the
        rows. Returns whether a message will return any."""
        returns = barrier is not None or any(map(len, keys))
        self._expected.append(Expected(plan, barrier, train_steps, keys, [0] * len(keys), arrived_last=not returns))
        return returns

    def accept(self, message: RowsBack | Returned | Ask | Save) -> None:
        self._inbox.append(message)

    def write_arrived(self) -> bool:
        message = self._inbox[0] if self._inbox else None
        self.waits_for_checkpoint = isinstance(message, RowsBack) and not self._has_room(message)
        # a row that a script has returned may come back again at once, so it is written alone
        is_alone = not isinstance(message, RowsBack) or any(own.is_alone for own in self._writing)
        if message is None or self.waits_for_checkpoint or (is_alone and self._writing):
            return False
        self._inbox.popleft()
        if isinstance(message, Ask):
            self.asked.append(message)
            return True
        if isinstance(message, Save):
            self.on_save(message)
            return True
        step = self._counters.step_of(message.plan) if isinstance(message, RowsBack) else None
        with self._counters.timed("write_back", step):
            self._apply(message) if isinstance(message, RowsBack) else self._write_returned(message)
        return True

    def _write_returned(self, message: Returned) -> None:
        group, keys = rows_of_table(self._groups, message.table, message.rows)
        if len(message.records) != len(keys) * group.record_bytes:
            raise RemoteProtocolError(f"{len(keys)} rows of table {message.table} came in {len(message.records)} bytes")
        rows = np.frombuffer(message.records, np.uint8).reshape(len(keys), group.record_bytes)
        ticket = self._stores[group.index].write(keys, rows)

        def written() -> None:
            self.returned = message.number

        self._writing.append(PendingWrite([ticket], written, is_alone=True))

    def _has_room(self, message: RowsBack) -> bool:
        counts = [0] * len(self._groups)
        for span in message.rows:
            if span.group < len(counts):  # other spans are refused later
                counts[span.group] += span.count
        return all(store.has_room(count) for store, count in zip(self._stores, counts, strict=True))

    def _apply(self, message: RowsBack) -> None:
        waiting = list(self._expected)  # a copy: the fetcher's thread appends
        expected = next((e for e in waiting if not e.arrived_last), None)
        if expected is None or (expected.plan, expected.barrier) != (message.plan, message.barrier):
            due = "none" if expected is None else f"those of {expected.name}"
            raise RemoteProtocolError(
                f"rows came back for plan {message.plan}, barrier {message.barrier}; expected {due}"
            )
        stamp = plan_stamp(message.plan or 0, message.piece)
        if message.barrier is not None:
            stamp = barrier_stamp(message.barrier, message.piece)
        crash_point("rows not written")
        tickets = (
            []
            if message.payload is None
            else self._write_spans(expected, message, self._ring.view(message.payload, stamp))
        )
        expected.tickets_open += 1
        expected.arrived_last = message.last
        if message.last and expected.applied != [len(keys) for keys in expected.keys]:
            raise RemoteProtocolError(
                f"rows of {expected.name} ended after {expected.applied} of {[len(k) for k in expected.keys]} a group"
            )
        self._counters.rows_back(message)
        self._writing.append(PendingWrite(tickets, partial(self._written, expected, message.payload)))

    def _write_spans(
        self, expected: Expected, message: RowsBack, payload: "np.ndarray[tuple[int], np.dtype[np.uint8]]"
    ) -> list[Ticket]:
        found: list[Rows] = []
        for span in message.rows:
            if span.group >= len(self._groups):
                raise RemoteProtocolError(
                    f"rows of group {span.group} came back, but there are {len(self._groups)} groups"
                )
            width = self._groups[span.group].record_bytes
            keys = expected.keys[span.group][span.start : span.start + span.count]
            if (
                span.start != expected.applied[span.group]
                or len(keys) != span.count
                or span.offset + span.count * width > len(payload)
            ):
                raise RemoteProtocolError(
                    f"rows {span.start}+{span.count} of group {span.group} came back out of order in {expected.name}"
                )
            rows = payload[span.offset : span.offset + span.count * width].reshape(span.count, width)
            found.append((span.group, keys, rows))
            expected.applied[span.group] += span.count
        with self.all_stores.counted(found):
            self._require_finite(expected, found)
            return self.all_stores.write(found)

    def _require_finite(self, expected: Expected, rows: Sequence[Rows]) -> None:
        if fault := first_fault(self._finite, rows, self._pool):
            first, last = self._finite_through, expected.train_steps - 1
            when = f"train step {last}" if first >= last else f"one of train steps {first} to {last}"
            raise Diverged(
                f"{fault} since {when}: training diverged; lower optimizer.sparse.lr, or look in the model for a "
                "gradient that is not finite though the loss is, as of a square root at 0"
            )

    def release_written(self) -> bool:
        progress = False
        for writing in list(self._writing):
            writing.tickets = [ticket for ticket in writing.tickets if not ticket.done()]
            if not writing.tickets:
                self._writing.remove(writing)
                writing.written()
                progress = True
        return progress

    def _written(self, expected: Expected, ref: RingRef | None) -> None:
        expected.tickets_open -= 1
        crash_point("rows written")
        if ref is not None:
            release(self._ring, ref, self._send)

    def note_home(self) -> bool:
        """Notes plans and barriers whose last row is in the store: rows that depended on them may now be read."""
        progress = False
        while self._expected and self._expected[0].complete:
            expected = self._expected.popleft()
            if expected.barrier is None:
                self.applied_through = expected.plan
            else:
                self.applied_barriers = expected.barrier + 1
                self._finite_through = expected.train_steps
            progress = True
        return progress


def rows_of_table(groups: tuple[GroupSpec, ...], table: int, rows: bytes) -> tuple[GroupSpec, Keys]:
    """The group of a table, and the keys of its rows. Raises RemoteProtocolError."""
    found = [(group, own) for group in groups for own in group.tables if own.index == table]
    numbers = np.frombuffer(rows, np.int64)
    if not found or not ascend_below(found[0][1].num_embeddings, numbers):
        raise RemoteProtocolError(
            f"{len(numbers)} rows of table {table} travel, which do not ascend in a table of the job"
        )
    return found[0][0], make_keys(table, numbers)
