"""Keeps the rows of coming steps in bounded memory and all others in a cold tier, on disk or on a server.

The planner decides what is in memory: each plan names the rows that enter and the rows that leave once the step's rows
are home. This store moves them ahead of the fetcher. The memory includes the rows of the device.

A row is nowhere (never written), at a place in the cold tier, or in a slot of the memory, in one of these states:

    EMPTY       the row was never written; the slot is kept for it
    LOADING     the bytes are in the cold tier, and on their way to the slot
    CLEAN       the same bytes are in the slot and in the cold tier
    DIRTY       only the slot has the bytes
    SPILLING    the bytes are in the slot, and on their way to the cold tier

    from                      when                              to                                   thread
    nowhere                   its plan is staged                EMPTY                                staging
    cold                      its plan is staged                LOADING                              staging
    LOADING                   its bytes were read               CLEAN                                staging
    LOADING                   the read has failed               cold                                 staging
    EMPTY, CLEAN, LOADING     it is written                     DIRTY; a place is freed              write-back
    DIRTY, SPILLING           it is written                     DIRTY                                write-back
    EMPTY, CLEAN              it leaves                         nowhere, cold                        staging
    DIRTY                     it leaves                         SPILLING                             staging
    SPILLING                  its bytes were written            cold                                 staging
    SPILLING                  the write has failed              DIRTY                                staging
    DIRTY, was SPILLING       its older bytes were written      DIRTY; their place is freed          staging
    nowhere, cold             it is written                     cold, at another place               write-back
    ... and got a slot meanwhile                                as above; the new place is freed     write-back
    cold, CLEAN, LOADING      the cold tier moves it            the same, at another place           staging, write-back

Each transition holds the lock; I/O on the cold tier happens between two transitions, without it. A reader takes a hold
on the cold tier before looking up places. A row is late if it should be in memory when it is read and is not. A late
cold row is read from the cold tier at once; a LOADING one is awaited.
"""

import threading
from collections import deque
from typing import NamedTuple

import numpy as np

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.stores.cold.segment_file import SegmentFile
from rowcast.prefetcher.stores.memory_store import StoredRows
from rowcast.prefetcher.stores.store import (
    FINISHED,
    NOWHERE,
    ColdRows,
    Finished,
    Keys,
    Moved,
    Places,
    ReadTicket,
    Records,
    RowStore,
    StoreCounts,
)
from rowcast.prefetcher.stores.tier_budget import MOST_SLOTS, disk_shares
from rowcast.prefetcher.stores.tier_loops import (
    ABSENT_ROW,
    COLD,
    FIRST_SLOT,
    FREE,
    UNWRITTEN,
    WAITING,
    cold_places,
    leave,
    leave_after,
    loaded,
    not_loaded,
    not_spilled,
    slots_to_read,
    slots_to_write,
    spilled,
    take_places,
    take_slots,
)
from rowcast.prefetcher.stores.touched_rows import TouchedRows, reserved
from rowcast.protocol.plan import GroupPlan
from rowcast.runtime.arrays import I64, U32, Bytes
from rowcast.runtime.crash_points import crash_point

AT_ONCE_BYTES = 4 * 2**20  # read from or written to the cold tier in one call


def open_store(job: Job, group: GroupSpec) -> "TieredStore":
    share = disk_shares(job, group_specs(job))[group.index]
    places = NOWHERE - 1 - min(group.num_rows, MOST_SLOTS)
    cold = SegmentFile.open(group, job.table_folder, share.nbytes, places)
    limit = "but store.disk has room, or store.memory an index, for {most}; raise it"
    return TieredStore(group.name, group.record_bytes, TouchedRows(group, share.num_rows, limit), cold)


class StagedPlan(NamedTuple):
    step: int
    load_keys: Keys
    spill_keys: Keys


class Leaving(NamedTuple):
    step: int  # once its rows are home
    slots: I64


class TieredRead:
    """The ticket of a read with rows still loading."""

    def __init__(self, store: "TieredStore", keys: Keys, numbers: I64, out: Records, waiting: I64, absent: I64) -> None:
        self.absent = absent
        self._store, self._keys, self._numbers, self._out = store, keys, numbers, out
        self._waiting = waiting

    def done(self) -> bool:
        if len(self._waiting):
            self._waiting = self._store.read_left(self._keys, self._numbers, self._out, self._waiting)
        return not len(self._waiting)


class TieredStore(RowStore):
    works_ahead = True

    def __init__(self, name: str, record_bytes: int, numbers: TouchedRows, cold: ColdRows) -> None:
        """`name`: the group's. No row has a slot until `begin`. Takes over `cold`, unused so far."""
        assert cold.most <= NOWHERE - 1, f"the cold tier of group {name} has {cold.most} places, at most {NOWHERE - 1}"
        self.numbers: TouchedRows = numbers
        self.cold = cold
        # Counters, written under the lock: see StoreCounts.
        self._memory_reads = self._cold_reads = self._untouched_reads = 0
        self._loaded = self._untouched_loaded = self._spilled = self._dropped = self._late = 0
        self._num_cold = 0  # rows that are cold and not in memory
        self._name, self._record_bytes = name, record_bytes
        self._at_once = max(1, AT_ONCE_BYTES // record_bytes)
        self._lock = threading.Lock()
        self._closed = False
        self._whereabouts: U32 = reserved(-(-numbers.most // 2)).view(np.uint32)[: numbers.most]
        self._plans: deque[StagedPlan] = deque()  # the planning thread appends
        self._has_begun = False  # the first plan
        self._num_seen = 0  # its rows that have a slot
        self._leaving: deque[Leaving] = deque()
        self._make_slots(0)
        cold.attach(self._places_of, self._settle)

    def _make_slots(self, num_slots: int) -> None:
        self.rows: StoredRows = StoredRows(num_slots, self._record_bytes)
        self._states: Bytes = np.full(num_slots, FREE, np.uint8)
        self._homes: U32 = np.zeros(num_slots, np.uint32)  # place of a row that is LOADING or CLEAN
        self._slot_keys: I64 = np.zeros(num_slots, np.int64)
        self._owners: I64 = np.zeros(num_slots, np.int64)  # row numbers
        self._leaves_after: I64 = np.zeros(num_slots, np.int64)  # a step, or STAYS
        self._free: I64 = np.arange(num_slots - 1, -1, -1)
        self._num_free = num_slots

    @property
    def num_slots(self) -> int:
        return len(self._states)

    @property
    def num_in_memory(self) -> int:
        """Slots in use."""
        return len(self._states) - self._num_free

    # any thread

    def read(self, keys: Keys, out: Records) -> ReadTicket:
        self._check_open(len(keys))
        numbers = self.numbers.of(keys)
        found, _ = self._copy(numbers, out)
        if not found.any():
            return FINISHED
        absent = np.flatnonzero(found == ABSENT_ROW)
        with self._lock:
            self._untouched_reads += len(absent)
        missing = np.flatnonzero(found > ABSENT_ROW)
        if not len(missing):
            return Finished(absent)
        cold_keys, plans = keys[found == COLD], list(self._plans)  # a copy: other threads append and pop
        num_named = sum(int(np.isin(cold_keys, plan.load_keys).sum()) for plan in plans)
        with self._lock:
            self._late += int(np.count_nonzero(found == WAITING)) + num_named
        return TieredRead(self, keys, numbers, out, self.read_left(keys, numbers, out, missing), absent)

    def read_left(self, keys: Keys, numbers: I64, out: Records, left: I64) -> I64:
        """Reads the rows at the positions `left`; all were written. Returns those still LOADING."""
        records: Records = np.empty((len(left), self._record_bytes), np.uint8)
        with self.cold.hold():
            found, places = self._copy(numbers[left], records)
            cold = np.flatnonzero(found == COLD)
            if len(cold):
                bytes_of: Records = np.empty((len(cold), self._record_bytes), np.uint8)
                self.cold.read(keys[left[cold]], places[cold], bytes_of)
                records[cold] = bytes_of
                with self._lock:
                    self._cold_reads += len(cold)
        assert not (found == ABSENT_ROW).any(), f"a row of group {self._name} that was written has no bytes"
        here = found != WAITING
        out[left[here]] = records[here]
        still: I64 = left[~here]
        return still

    def _copy(self, numbers: I64, out: Records) -> tuple[Bytes, U32]:
        """Copies rows that are in memory. Returns each row's finding, and the place of cold ones."""
        found, places = np.empty(len(numbers), np.uint8), np.empty(len(numbers), np.uint32)
        slots = np.empty(len(numbers), np.int64)
        with self._lock:
            slots_to_read(numbers, self._whereabouts, self._states, found, places, slots)
            self._memory_reads += len(slots) - self.rows.read(slots, out, self.numbers.pool)
        return found, places

    # the write-back's thread

    def write(self, keys: Keys, rows: Records) -> Finished:
        return self.write_numbered(keys, self.numbers.added(keys), rows)

    def write_numbered(self, keys: Keys, numbers: I64, rows: Records) -> Finished:
        self._check_open(len(keys))
        with self._lock:
            left = self._overwrite(keys, numbers, rows)
        for start in range(0, len(left), self._at_once):
            own = left[start : start + self._at_once]
            self._write_cold(keys[own], numbers[own], rows[own])
        return FINISHED

    def _overwrite(self, keys: Keys, numbers: I64, rows: Records) -> I64:
        """Writes rows that have a slot; under the lock. Returns the positions of the others."""
        slots, left, outdated = (np.empty(len(keys), np.int64) for _ in range(3))
        places = np.empty(len(keys), np.uint32)
        num_left, num_outdated = slots_to_write(
            numbers, self._whereabouts, self._states, self._homes, slots, left, outdated, places
        )
        self.rows.write(slots, rows, self.numbers.pool)
        if num_outdated:
            self.cold.free(keys[outdated[:num_outdated]], places[:num_outdated])
        return left[:num_left]

    def _write_cold(self, keys: Keys, numbers: I64, rows: Records) -> None:
        places = self.cold.write(keys, rows)
        with self._lock:
            left = self._overwrite(keys, numbers, rows)  # the others got a slot meanwhile
            before = self._whereabouts[numbers[left]]
            self._whereabouts[numbers[left]] = places[left] + np.uint32(1)
            had_place = before != UNWRITTEN
            self._num_cold += len(left) - int(np.count_nonzero(had_place))
            freed = places.copy()
            freed[left] = before - np.uint32(1)
            is_freed = np.ones(len(keys), np.bool_)
            is_freed[left] = had_place
            if is_freed.any():
                self.cold.free(keys[is_freed], freed[is_freed])

    # the planning thread

    def stage(self, step: int, plan: GroupPlan) -> None:
        self._plans.append(StagedPlan(step, plan.load_keys, plan.spill_keys))

    # the staging thread

    def advance(self, home_through: int | None) -> bool:
        return self._let_leave(home_through) or self._load_next() or self.cold.tidy()

    def _let_leave(self, home_through: int | None) -> bool:
        if home_through is None or not self._leaving or self._leaving[0].step > home_through:
            return False
        leaving = self._leaving.popleft()
        for start in range(0, len(leaving.slots), self._at_once):
            self._leave(leaving.slots[start : start + self._at_once], leaving.step)
        return True

    def _leave(self, slots: I64, step: int) -> None:
        spilling = np.empty(len(slots), np.int64)
        with self._lock:
            free_before = self._num_free
            self._num_free, num_spilling, num_clean = leave(
                slots,
                step,
                self._whereabouts,
                self._states,
                self._homes,
                self._leaves_after,
                self._owners,
                self._free,
                self._num_free,
                spilling,
            )
            self._dropped += self._num_free - free_before
            self._num_cold += num_clean
            spilling = spilling[:num_spilling]
            keys = self._slot_keys[spilling]
            records: Records = np.empty((num_spilling, self._record_bytes), np.uint8)
            self.rows.read(spilling, records, self.numbers.pool)
        if num_spilling:
            self._spill(spilling, keys, records)

    def _spill(self, slots: I64, keys: Keys, records: Records) -> None:
        try:
            places = self.cold.write(keys, records)
        except BaseException:
            with self._lock:
                not_spilled(slots, self._states)
            raise
        crash_point("rows spilled")
        overtaken = np.empty(len(slots), np.int64)
        with self._lock:
            self._spilled += len(slots)
            free_before = self._num_free
            self._num_free, num_overtaken = spilled(
                slots, places, self._whereabouts, self._states, self._owners, self._free, self._num_free, overtaken
            )
            self._num_cold += self._num_free - free_before
            if num_overtaken:
                again = overtaken[:num_overtaken]
                self.cold.free(keys[again], places[again])

    def _load_next(self) -> bool:
        """Gives rows of the next plan the free slots, and loads the cold ones."""
        if not self._plans:
            return False
        plan = self._plans[0]
        if not self._has_begun:  # before any load, which may wait for these
            spilled = np.sort(plan.spill_keys)
            if len(spilled):
                numbers, slots = self.numbers.of(spilled), np.empty(len(spilled), np.int64)
                with self._lock:
                    count = leave_after(numbers, plan.step, self._whereabouts, self._leaves_after, slots)
                self._leaving.append(Leaving(plan.step, slots[:count]))
            self._has_begun = True
        keys = plan.load_keys[self._num_seen : self._num_seen + self._at_once]
        num_seen = self._load(keys) if len(keys) else 0
        self._num_seen += num_seen
        if self._num_seen < len(plan.load_keys):
            return num_seen > 0
        self._plans.popleft()
        self._num_seen, self._has_begun = 0, False
        return True

    def _load(self, keys: Keys) -> int:
        """Loads cold rows. Returns how many rows have a slot now."""
        numbers, loading = self.numbers.added(keys), np.empty(len(keys), np.int64)
        with self.cold.hold():
            with self._lock:
                free_before = self._num_free
                num_seen, self._num_free, num_loading = take_slots(
                    keys,
                    numbers,
                    self._whereabouts,
                    self._states,
                    self._homes,
                    self._leaves_after,
                    self._slot_keys,
                    self._owners,
                    self._free,
                    self._num_free,
                    loading,
                )
                loading = loading[:num_loading]
                slots = FIRST_SLOT - self._whereabouts[numbers[loading]].astype(np.int64)
                places = self._homes[slots]
                self._untouched_loaded += free_before - self._num_free - num_loading
                self._num_cold -= num_loading
            if num_loading:
                self._load_cold(keys[loading], slots, places)
        return num_seen

    def _load_cold(self, keys: Keys, slots: I64, places: Places) -> None:
        records: Records = np.empty((len(keys), self._record_bytes), np.uint8)
        try:
            self.cold.read(keys, places, records)
        except BaseException:
            with self._lock:
                free_before = self._num_free
                self._num_free = not_loaded(
                    slots, self._whereabouts, self._states, self._homes, self._owners, self._free, self._num_free
                )
                self._num_cold += self._num_free - free_before
            raise
        crash_point("rows loaded")
        with self._lock:
            loaded(slots, self._states)
            self.rows.write(slots, records, self.numbers.pool)
            self._loaded += len(keys)

    def counts(self) -> StoreCounts:
        cold = self.cold
        return StoreCounts(
            memory_rows=self.num_in_memory,
            cold_rows=self._num_cold,
            memory_reads=self._memory_reads,
            cold_reads=self._cold_reads,
            untouched_reads=self._untouched_reads,
            loaded=self._loaded,
            untouched_loaded=self._untouched_loaded,
            spilled=self._spilled,
            dropped=self._dropped,
            late=self._late,
            bytes_read=cold.bytes_read,
            bytes_written=cold.bytes_written,
            read_seconds=cold.read_seconds,
            index_bytes=self.numbers.nbytes + 4 * self.numbers.count,
            disk_used_bytes=cold.used_bytes,
            disk_garbage_bytes=cold.garbage_bytes,
        )

    # called by the cold tier, from `write` and `tidy`

    def _places_of(self, keys: Keys) -> Places:
        numbers, places = self._numbers_of(keys), np.empty(len(keys), np.uint32)
        with self._lock:
            cold_places(numbers, self._whereabouts, self._states, self._homes, NOWHERE, places)
        return places

    def _settle(self, moved: Moved) -> None:
        numbers, freed = self._numbers_of(moved.keys), np.empty(len(moved.keys), np.uint32)
        with self._lock:
            take_places(numbers, moved.old, moved.new, self._whereabouts, self._states, self._homes, freed)
            self.cold.free(moved.keys, freed)

    def _numbers_of(self, keys: Keys) -> I64:
        """`keys`: in any order."""
        order = np.argsort(keys)
        numbers = np.empty(len(keys), np.int64)
        numbers[order] = self.numbers.of(keys[order])
        return numbers

    # all threads at rest

    def begin(self, memory_rows: int) -> None:
        self._check_open(0)
        self._plans.clear()
        self._leaving.clear()
        self._num_seen, self._has_begun = 0, False
        self._leaves_after[:] = 0
        for start in range(0, self.num_slots, self._at_once):
            self._leave(np.arange(start, min(start + self._at_once, self.num_slots)), 0)
        assert not self.num_in_memory, (
            f"{self.num_in_memory} of {self.num_slots} rows of group {self._name} stay in memory, expected none"
        )
        assert self.cold.most + memory_rows < FIRST_SLOT, (
            f"group {self._name} has {self.cold.most} cold places and {memory_rows} slots, below {FIRST_SLOT} together"
        )
        if memory_rows != self.num_slots:
            self._make_slots(memory_rows)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.cold.close()
            self._whereabouts = np.empty(0, np.uint32)
            self._make_slots(0)

    def _check_open(self, num_rows: int) -> None:
        assert not self._closed, f"the store of group {self._name} is closed, but {num_rows} rows were requested"
