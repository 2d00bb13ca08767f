"""Implements `--verify`: follows the checksums of sampled rows, and ends the run at the first difference.

    store ----- read ----> ring, staging ----> slot        (1) given    the store returns what was written last
      ^                                         |          (2) filled   the slot holds what the store returned
      |                                     train steps
      |                                         v          (3) returned the store receives what was in the slot
    store <---- write ---- ring, staging <---- slot        (4) dropped  a clean victim is what it was when it was filled
                                                           (5) kept     at a barrier: unread rows are what was written

A row is sampled by a hash of its key, always or never, so its whole life is followed. What a train step itself does to
a dirty row is not checked: `examples/plain_loop.py` shows whether that is exact, but nothing can be lost on the way.

Three threads call. They share the ledger and the open visits, under one lock that is held for look-ups only, never
while a thread waits:

    fetcher     `open_*` before a plan is sent; `rows_read` when its bytes are in the ring, `plan_read` before the last
                piece is announced; `read_back` at a barrier
    write-back  `rows_home` before the store receives the bytes
    mail        `reported` when the trainer's checksums come, before `StepDone`

An entry of the ledger has one writer at a time, as its row is in one place at a time (E2): a row is read only after
`RowsBack` was applied, hence noted; it is sent to the trainer only after it was noted as read; and it comes home only
after that. A clean victim's value is looked up when its plan is announced: earlier reads are noted by then, and no
later write can have come, as it needs this plan's eviction first. The thread that brings a visit's last missing part
compares it: the mail's thread, or the write-back's before it says that the rows are applied. So a step that is done and
home is verified, and a checkpoint, which waits for both and for `read_back`, holds verified rows.

A verifier lives as long as its attempt: a restore changes rows, and a cold cache has nothing to compare.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters, VerifyKind
from rowcast.prefetcher.pipeline.row_observer import RowObserver, SlotArrays
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.prefetcher.verify.checksum_loops import SAMPLE_RANGE, find_sampled, row_checksums
from rowcast.prefetcher.verify.in_flight import GroupVisit, SampledRows, Visit, new_visit
from rowcast.prefetcher.verify.ledger import NEVER_WRITTEN, Ledger
from rowcast.prefetcher.verify.mismatch import Difference, mismatch_message
from rowcast.prefetcher.verify.read_back import ReadBack
from rowcast.protocol.messages import RowChecksums
from rowcast.protocol.plan import BarrierPlan, StepPlan
from rowcast.protocol.row_checksum import barrier_name, checksums_of, column_constants, fetched_name, victims_name
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import DataError, RemoteProtocolError

Visited = tuple[int | None, int | None]  # step, barrier
REPORTED: tuple[VerifyKind, ...] = ("filled", "returned", "dropped")  # of each group, in the order of its samples


class Verifier(RowObserver):
    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        stores: tuple[TrackedStore, ...],
        share: float,
        counters: PrefetcherCounters,
    ) -> None:
        """`share`: share of the rows, above 0 and up to 1."""
        self._groups = groups
        self._threshold = round(share * SAMPLE_RANGE)
        self._constants = [column_constants(group.record_floats) for group in groups]
        self._counters = counters
        self._ledger = Ledger()
        self._visits: dict[Visited, Visit] = {}
        self._lock = threading.Lock()
        self._read_back = ReadBack(groups, stores)

    # the fetcher's thread

    def open_plan(self, plan: StepPlan) -> SlotArrays:
        visits, arrays = [], {}
        for index, group in enumerate(plan.groups):
            fetched, victims = self._sample(group.fetch_keys), self._sample(group.evict_keys)
            dirty = int(np.searchsorted(victims, group.num_dirty))
            arrays[fetched_name(index)] = group.fetch_slots[fetched]
            arrays[victims_name(index)] = group.evict_slots[victims]
            keys = group.evict_keys
            visits.append(
                GroupVisit(
                    fetched=new_sample(group.fetch_keys, fetched),
                    dirty=new_sample(keys, victims[:dirty]),
                    clean=new_sample(keys, victims[dirty:]),
                )
            )
        self._open(new_visit(plan.step, None, visits))
        return arrays

    def open_barrier(self, barrier: BarrierPlan) -> SlotArrays:
        visits, arrays = [], {}
        for index, move in enumerate(barrier.dirty):
            dirty = self._sample(move.keys)
            arrays[barrier_name(index)] = move.slots[dirty]
            none = np.empty(0, np.int64)
            visits.append(
                GroupVisit(
                    fetched=new_sample(move.keys, none),
                    dirty=new_sample(move.keys, dirty),
                    clean=new_sample(move.keys, none),
                )
            )
        self._open(new_visit(barrier.after_step, barrier.barrier, visits))
        return arrays

    def rows_read(self, step: int, group: int, start: int, rows: Records) -> None:
        visit = self._visit(step, None)
        if visit is None:
            return
        sample = visit.groups[group].fetched
        part, found = self._followed(sample, group, start, rows)
        with self._lock:
            self._check_given(sample.keys[part], found, step)
            sample.expect(part, found)

    def plan_read(self, step: int) -> None:
        visit = self._visit(step, None)
        if visit is None:
            return
        with self._lock:
            for group in visit.groups:
                entries = self._ledger.look_up(group.clean.keys)
                assert entries.known.all(), (
                    f"{int((~entries.known).sum())} clean victims of step {step} were never read"
                )
                group.clean.expect(slice(None), entries.checksums)

    @property
    def must_read_back(self) -> bool:
        return self._ledger.num_unread > 0

    def read_back(self, step: int | None) -> bool:
        if not self._read_back.active:
            self._read_back.begin(self._ledger.unread_keys())
        arrived = self._read_back.advance()
        if arrived is None:
            return False
        group, keys, rows = arrived
        found = self._checksums(group, rows, np.arange(len(keys)))
        with self._lock:
            self._check_given(keys, found, step, kind="kept")
        return True

    # the write-back's thread

    def rows_home(self, step: int | None, barrier: int | None, group: int, start: int, rows: Records) -> None:
        visit = self._visit(step, barrier)
        if visit is None:
            return
        sample = visit.groups[group].dirty
        part, found = self._followed(sample, group, start, rows)
        with self._lock:
            sample.expect(part, found)
            self._ledger.taken(sample.keys[part], found, step)
            self._compare_complete(visit)

    # the mail's thread

    def reported(self, message: RowChecksums) -> None:
        with self._lock:
            visit = self._visits.get((message.step, message.barrier))
            if visit is None:
                raise RemoteProtocolError(
                    f"checksums came for step {message.step}, barrier {message.barrier}, which are complete"
                )
            visit.report(message.start, checksums_of(message))
            self._compare_complete(visit)

    # any

    def _open(self, visit: Visit) -> None:
        if len(visit.reported):
            with self._lock:
                self._visits[visit.step, visit.barrier] = visit

    def _visit(self, step: int | None, barrier: int | None) -> Visit | None:
        """Returns None if nothing of it is sampled, or everything sampled was compared."""
        with self._lock:
            return self._visits.get((step, barrier))

    def _sample(self, keys: Keys) -> I64:
        positions = np.empty(len(keys), np.int64)
        return positions[: find_sampled(keys, self._threshold, positions)]

    def _followed(self, sample: SampledRows, group: int, start: int, rows: Records) -> tuple[slice, I64]:
        part = sample.within(start, len(rows))
        return part, self._checksums(group, rows, sample.positions[part] - start)

    def _checksums(self, group: int, rows: Records, positions: I64) -> I64:
        found = np.empty(len(positions), np.int64)
        row_checksums(rows.view(np.int32), positions, self._constants[group], found)
        return found

    def _check_given(self, keys: I64, found: I64, step: int | None, kind: VerifyKind = "given") -> None:
        entries = self._ledger.look_up(keys)
        wrong = np.flatnonzero(entries.known & (entries.checksums != found))
        if len(wrong):
            first = int(wrong[0])
            since = None if entries.steps[first] == NEVER_WRITTEN else int(entries.steps[first])
            raise DataError(
                mismatch_message(self._groups, Difference(kind, int(keys[first]), step, since, len(wrong), len(keys)))
            )
        self._ledger.given(keys, found)
        self._counters.rows_verified[kind] += len(keys)

    def _compare_complete(self, visit: Visit) -> None:
        if not visit.complete:
            return
        start = 0
        for group in visit.groups:
            for kind, sample in zip(REPORTED, group.samples, strict=True):
                self._compare(kind, sample, visit.reported[start : start + len(sample)], visit.step)
                start += len(sample)
        del self._visits[visit.step, visit.barrier]

    def _compare(self, kind: VerifyKind, sample: SampledRows, reported: I64, step: int | None) -> None:
        wrong = np.flatnonzero(sample.checksums != reported)
        if len(wrong):
            raise DataError(
                mismatch_message(
                    self._groups, Difference(kind, int(sample.keys[wrong[0]]), step, None, len(wrong), len(sample))
                )
            )
        self._counters.rows_verified[kind] += len(sample)


def row_observer(
    groups: tuple[GroupSpec, ...], stores: tuple[TrackedStore, ...], share: float, counters: PrefetcherCounters
) -> RowObserver:
    """`share`: share of the rows that are followed; without any, nothing is."""
    return Verifier(groups, stores, share, counters) if share else RowObserver()


def new_sample(keys: Sequence[Any] | I64, positions: I64) -> SampledRows:
    return SampledRows(np.asarray(keys)[positions], positions, np.zeros(len(positions), np.int64))


def warm_up_checks() -> None:
    keys, ledger = np.arange(2), Ledger()
    find_sampled(keys, 1, np.empty(2, np.int64))
    ledger.given(keys, keys)
    words = np.zeros((2, 4), np.int32)
    for _ in ("writable, as read from a store", "read-only, as it came home"):
        row_checksums(words, keys, column_constants(4), np.empty(2, np.int64))
        words.flags.writeable = False
