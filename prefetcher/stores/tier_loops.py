"""Compiled loops over the tiered store's memory slots and the whereabouts of its rows.

Where a row is, u32 by its number:

    0                            nowhere: it was never written
    1 + place                    in the cold tier
    2**32 - 1 - slot             in a slot of the memory; the slot's state adds the rest
"""

import numpy as np

from rowcast.prefetcher.stores.row_loops import ROWS_AHEAD, Positions
from rowcast.prefetcher.stores.store import ABSENT
from rowcast.runtime.arrays import I64, U32, Bytes
from rowcast.runtime.compiled import compiled_loop, compiled_part, prefetch

FREE, EMPTY, LOADING, CLEAN, DIRTY, SPILLING = range(6)  # states of a slot: tiered_store.py
COPIED, ABSENT_ROW, WAITING, COLD = range(4)  # what a read has found about a row

UNWRITTEN = np.uint32(0)
FIRST_SLOT = 2**32 - 1
STAYS = -1  # instead of the step after which a slot's row leaves
NUMBERS_AHEAD = 2 * ROWS_AHEAD


@compiled_part
def slot_of(where: np.uint32) -> int:
    return FIRST_SLOT - np.int64(where)  # type: ignore[return-value]


@compiled_part
def ask_for_rows(i: int, numbers: I64, whereabouts: U32, states: Bytes) -> None:
    """Prefetches what a row a few positions after row i needs."""
    if i + NUMBERS_AHEAD < len(numbers) and numbers[i + NUMBERS_AHEAD] >= 0:
        prefetch(whereabouts, numbers[i + NUMBERS_AHEAD])
    if i + ROWS_AHEAD < len(numbers) and numbers[i + ROWS_AHEAD] >= 0:
        prefetch(states, slot_of(whereabouts[numbers[i + ROWS_AHEAD]]))


@compiled_loop
def slots_to_read(numbers: I64, whereabouts: U32, states: Bytes, found: Bytes, places: U32, slots: I64) -> None:
    """Sets each row's finding, the place of cold ones, and the slot of those that are in memory, ABSENT for others."""
    for i in range(len(numbers)):
        ask_for_rows(i, numbers, whereabouts, states)
        where = whereabouts[numbers[i]] if numbers[i] >= 0 else UNWRITTEN
        slot = slot_of(where)
        slots[i] = ABSENT
        if where == UNWRITTEN:
            found[i] = ABSENT_ROW
        elif slot >= len(states):
            found[i] = COLD
            places[i] = where - np.uint32(1)
        elif states[slot] == EMPTY:
            found[i] = ABSENT_ROW
        elif states[slot] == LOADING:
            found[i] = WAITING
        else:
            found[i], slots[i] = COPIED, slot


@compiled_loop
def slots_to_write(
    numbers: I64,
    whereabouts: U32,
    states: Bytes,
    homes: U32,
    slots: I64,
    left: Positions,
    outdated: Positions,
    places: U32,
) -> tuple[int, int]:
    """Makes slots DIRTY whose rows are written. Sets the slot of each row, ABSENT without one; `left` to the positions
    of rows without one, and `outdated` and `places` to the positions and places of rows whose cold copy is now older.
    Returns the counts of both."""
    num_left = num_outdated = 0
    for i in range(len(numbers)):
        ask_for_rows(i, numbers, whereabouts, states)
        slot = slot_of(whereabouts[numbers[i]])
        slots[i] = ABSENT
        if slot >= len(states):
            left[num_left] = i
            num_left += 1
            continue
        if states[slot] == CLEAN or states[slot] == LOADING:
            outdated[num_outdated], places[num_outdated] = i, homes[slot]
            num_outdated += 1
        states[slot], slots[i] = DIRTY, slot
    return num_left, num_outdated


@compiled_loop
def take_slots(
    keys: I64,
    numbers: I64,
    whereabouts: U32,
    states: Bytes,
    homes: U32,
    leaves_after: I64,
    slot_keys: I64,
    owners: I64,
    free: I64,
    num_free: int,
    loading: Positions,
) -> tuple[int, int, int]:
    """Gives each row a slot until none is free; a row that has one keeps it. Sets `loading` to the positions of cold
    rows. Returns how many rows are done, how many slots are free, and how many rows are loading."""
    num_loading = 0
    for i in range(len(keys)):
        where = whereabouts[numbers[i]]
        slot = slot_of(where)
        if slot < len(states):
            leaves_after[slot] = STAYS
            continue
        if num_free == 0:
            return i, num_free, num_loading
        num_free -= 1
        slot = free[num_free]
        slot_keys[slot], owners[slot], leaves_after[slot] = keys[i], numbers[i], STAYS
        whereabouts[numbers[i]] = np.uint32(FIRST_SLOT - slot)
        if where == UNWRITTEN:
            states[slot] = EMPTY
        else:
            states[slot], homes[slot] = LOADING, where - np.uint32(1)
            loading[num_loading] = i
            num_loading += 1
    return len(keys), num_free, num_loading


@compiled_loop
def loaded(slots: I64, states: Bytes) -> None:
    """Makes slots CLEAN whose rows were read. The slots of rows written meanwhile become ABSENT."""
    for i in range(len(slots)):
        if states[slots[i]] == LOADING:
            states[slots[i]] = CLEAN
        else:
            slots[i] = ABSENT


@compiled_loop
def not_loaded(slots: I64, whereabouts: U32, states: Bytes, homes: U32, owners: I64, free: I64, num_free: int) -> int:
    """Makes rows cold again that could not be read. Returns how many slots are free."""
    for i in range(len(slots)):
        if states[slots[i]] == LOADING:
            whereabouts[owners[slots[i]]] = homes[slots[i]] + np.uint32(1)
            states[slots[i]] = FREE
            free[num_free] = slots[i]
            num_free += 1
    return num_free


@compiled_loop
def leave_after(numbers: I64, step: int, whereabouts: U32, leaves_after: I64, slots: I64) -> int:
    """Marks these rows to leave after a step, and sets `slots` to their slots. Returns how many have one."""
    found = 0
    for i in range(len(numbers)):
        slot = slot_of(whereabouts[numbers[i]]) if numbers[i] >= 0 else len(leaves_after)
        if slot < len(leaves_after):
            leaves_after[slot] = step
            slots[found] = slot
            found += 1
    return found


@compiled_loop
def leave(
    slots: I64,
    step: int,
    whereabouts: U32,
    states: Bytes,
    homes: U32,
    leaves_after: I64,
    owners: I64,
    free: I64,
    num_free: int,
    spilling: I64,
) -> tuple[int, int, int]:
    """Frees slots whose rows leave after `step`, if the cold tier has their bytes or they have none; sets `spilling` to
    the others. Returns how many slots are free, how many rows must be written, and how many became cold."""
    num_spilling = num_cold = 0
    for i in range(len(slots)):
        slot = slots[i]
        if leaves_after[slot] != step or states[slot] == FREE:
            continue
        if states[slot] == DIRTY:
            states[slot] = SPILLING
            spilling[num_spilling] = slot
            num_spilling += 1
            continue
        if states[slot] == CLEAN:
            whereabouts[owners[slot]] = homes[slot] + np.uint32(1)
            num_cold += 1
        else:
            whereabouts[owners[slot]] = UNWRITTEN
        states[slot] = FREE
        free[num_free] = slot
        num_free += 1
    return num_free, num_spilling, num_cold


@compiled_loop
def spilled(
    slots: I64,
    places: U32,
    whereabouts: U32,
    states: Bytes,
    owners: I64,
    free: I64,
    num_free: int,
    overtaken: Positions,
) -> tuple[int, int]:
    """Frees slots whose rows were written to the cold tier; sets `overtaken` to the positions of rows written again
    meanwhile. Returns how many slots are free, and how many rows were overtaken."""
    num_overtaken = 0
    for i in range(len(slots)):
        if states[slots[i]] != SPILLING:
            overtaken[num_overtaken] = i
            num_overtaken += 1
            continue
        whereabouts[owners[slots[i]]] = places[i] + np.uint32(1)
        states[slots[i]] = FREE
        free[num_free] = slots[i]
        num_free += 1
    return num_free, num_overtaken


@compiled_loop
def not_spilled(slots: I64, states: Bytes) -> None:
    for i in range(len(slots)):
        if states[slots[i]] == SPILLING:
            states[slots[i]] = DIRTY


@compiled_loop
def cold_places(numbers: I64, whereabouts: U32, states: Bytes, homes: U32, nowhere: int, places: U32) -> None:
    """Sets each row's place in the cold tier, also of the copy of a row in memory; `nowhere` without one."""
    for i in range(len(numbers)):
        where = whereabouts[numbers[i]] if numbers[i] >= 0 else UNWRITTEN
        slot = slot_of(where)
        if where == UNWRITTEN:
            places[i] = nowhere
        elif slot >= len(states):
            places[i] = where - np.uint32(1)
        else:
            places[i] = homes[slot] if states[slot] == CLEAN or states[slot] == LOADING else nowhere


@compiled_loop
def take_places(numbers: I64, old: U32, new: U32, whereabouts: U32, states: Bytes, homes: U32, freed: U32) -> None:
    """Moves the rows still at their old place to the new one. Sets `freed` to each row's unused place of the two."""
    for i in range(len(numbers)):
        where = whereabouts[numbers[i]] if numbers[i] >= 0 else UNWRITTEN
        slot = slot_of(where)
        freed[i] = new[i]
        if where == UNWRITTEN:
            continue
        if slot >= len(states):
            if where - np.uint32(1) == old[i]:
                whereabouts[numbers[i]], freed[i] = new[i] + np.uint32(1), old[i]
        elif (states[slot] == CLEAN or states[slot] == LOADING) and homes[slot] == old[i]:
            homes[slot], freed[i] = new[i], old[i]
