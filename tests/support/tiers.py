"""Tiered stores whose rows come and go all the time, as no plan would have it: hints may not change a bit."""

import random
import threading

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.store import ColdRows, Keys, ReadTicket, Records, RowStore, Ticket
from rowcast.prefetcher.stores.tier_loops import CLEAN, FIRST_SLOT, FREE, LOADING, SPILLING
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.protocol.plan import GroupPlan
from rowcast.trainer.kernels.choose import lookup_arrays
from tests.support.cold_dict import ColdDict

NO_KEYS = np.empty(0, np.int64)
NO_SLOTS = np.empty(0, np.int32)


def tier_plan(load: Keys = NO_KEYS, spill: Keys = NO_KEYS) -> GroupPlan:
    """The part of a plan that the memory tier looks at."""
    return GroupPlan(
        **lookup_arrays(NO_KEYS, NO_SLOTS).named(),
        fetch_slots=NO_SLOTS,
        fetch_keys=NO_KEYS,
        evict_keys=NO_KEYS,
        num_dirty=0,
        fill_after=None,
        load_keys=load,
        spill_keys=spill,
    )


def tiered(group: GroupSpec, num_slots: int, cold: ColdRows | None = None) -> TieredStore:
    store = TieredStore(group.name, group.record_bytes, TouchedRows(group, group.num_rows), cold or ColdDict())
    store.begin(num_slots)
    return store


class Restless(RowStore):
    """Before each read and write of `store`, stages rows that the dice choose, and lets the store work on some."""

    works_ahead = True

    def __init__(self, store: TieredStore, keys: Keys, seed: int) -> None:
        """`keys`: of all rows."""
        self.store = store
        self.numbers = store.numbers
        self._keys = keys
        self._chance = random.Random(seed)
        self._step = 0
        self._staging = threading.Lock()  # one thread at a time stages

    def read(self, keys: Keys, out: Records) -> ReadTicket:
        self._stir(keys)
        return self.store.read(keys, out)

    def write(self, keys: Keys, rows: Records) -> Ticket:
        self._stir(keys)
        return self.store.write(keys, rows)

    def close(self) -> None:
        self.store.close()

    def _stir(self, asked: Keys) -> None:
        with self._staging:
            for _ in range(self._chance.randrange(3)):
                some = self._some(asked if self._chance.random() < 0.5 else self._keys)
                self.store.stage(self._step, tier_plan(load=some, spill=self._some(self._keys)))
                self._step += 1
            home = self._step - self._chance.randrange(3) - 1
            for _ in range(self._chance.randrange(6)):
                self.store.advance(None if home < 0 else home)

    def _some(self, keys: Keys) -> Keys:
        chosen = self._chance.sample(range(len(keys)), self._chance.randrange(len(keys) + 1))
        return keys[sorted(chosen)]


def check_tier(store: TieredStore) -> None:
    """Raises AssertionError with both numbers if slots and whereabouts disagree."""
    from rowcast.prefetcher.stores.cold.redis_rows import RedisRows  # the device check runs without redis

    used = np.flatnonzero(store._states != FREE)
    free = store._free[: store._num_free]
    assert len(used) + len(free) == store.num_slots, (
        f"{len(used)} slots in use and {len(free)} free ones, but there are {store.num_slots}"
    )
    assert len(np.unique(free)) == len(free), f"{len(free)} free slots, but {len(np.unique(free))} different ones"
    assert (store._states[free] == FREE).all(), "a free slot has a row"
    moving = np.count_nonzero((store._states == LOADING) | (store._states == SPILLING))
    assert moving == 0, f"{moving} rows are loading or spilling, but no thread is at work"
    named = store._whereabouts[store._owners[used]]
    wrong = np.flatnonzero(named != FIRST_SLOT - used)
    assert not len(wrong), (
        f"slot {used[wrong[0]]} has row {store._owners[used[wrong[0]]]}, which is said to be at {named[wrong[0]]}"
    )
    all_rows = store._whereabouts[: store.numbers.count].astype(np.int64)
    in_slots = np.count_nonzero(all_rows > FIRST_SLOT - store.num_slots)
    assert in_slots == len(used), f"{in_slots} rows are in memory, but {len(used)} slots are in use"
    clean = used[store._states[used] == CLEAN]
    cold = all_rows[(all_rows > 0) & (all_rows <= FIRST_SLOT - store.num_slots)] - 1
    assert len(cold) == store._num_cold, f"{len(cold)} rows are cold, but {store._num_cold} were counted"
    places = np.concatenate([cold, store._homes[clean].astype(np.int64)])
    shares_places = isinstance(store.cold, RedisRows)  # a key and a place together are a row's
    assert shares_places or len(np.unique(places)) == len(places), (
        f"{len(places)} rows are cold, but at {len(np.unique(places))} places"
    )
