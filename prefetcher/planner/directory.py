"""The directory: every row that the planner tracks, and the slot of each resident row.

A row is tracked while it is resident or some batch of the horizon touches it; so memory follows the slots and the horizon, never the
tables. A tracked row has an *entry*, which it keeps as long as it is tracked; a hash with linear probing leads from its key to its entry.
It is asked once for each distinct row, when a batch enters the horizon; planning goes by entries and never hashes.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefetcher.compiled import compiled
from prefetcher.planner.grouping import I32, I64, SPREAD

Records = npt.NDArray[np.void]

NONE = -1  # no slot, no entry, no step: only inside the planner's arrays
ENTRY = np.dtype(
    [
        ("key", np.int64),
        ("occurrence", np.int64),  # last place of the row in the horizon's ring; older than its head: not in the horizon
        ("last_use", np.int64),  # last planned step that touches the row since its fill
        ("slot", np.int32),  # NONE: not resident
        ("dirty", np.int32),  # 1: trained since its fill or the last barrier
        ("before", np.int32),  # neighbours in the queue of rows with the same next use; `after` also chains unused entries
        ("after", np.int32),
    ],
    align=True,
)
CELL = np.dtype([("key", np.int64), ("entry", np.int32)], align=True)
FIRST_UNUSED, NUM_TRACKED = 0, 1  # places in `state`
INITIAL_ENTRIES = 1024


class Directory(NamedTuple):
    """Arrays that compiled loops change; they never grow there, so a caller makes room before."""

    entries: Records  # ENTRY, a power of two of them
    cells: Records  # CELL, twice as many: at least every second one is free
    state: I64  # [2]


def new_directory(num_entries: int = INITIAL_ENTRIES) -> Directory:
    """`num_entries` must be a power of two below 2**31."""
    entries = np.zeros(num_entries, ENTRY)
    entries["slot"] = entries["before"] = entries["occurrence"] = NONE
    entries["after"] = np.arange(1, num_entries + 1)
    entries["after"][-1] = NONE
    cells = np.zeros(2 * num_entries, CELL)
    cells["entry"] = NONE
    return Directory(entries, cells, np.zeros(2, np.int64))


def with_room(directory: Directory, num_new: int) -> Directory:
    """The same directory, or a larger copy with the same entries, in which `num_new` more rows can be tracked."""
    num_entries = len(directory.entries)
    needed = int(directory.state[NUM_TRACKED]) + num_new
    if needed <= num_entries:
        return directory
    while num_entries < needed:
        num_entries *= 2
    assert num_entries < 2**31, f"{needed} tracked rows do not fit int32"
    grown = new_directory(num_entries)
    tracked = tracked_entries(directory)
    copy_entries(directory, grown, tracked)
    return grown


def tracked_entries(directory: Directory) -> I32:
    """The entries in use, ascending."""
    entries: I32 = directory.cells["entry"]
    return np.sort(entries[entries != NONE])


def resident_entries(directory: Directory) -> I32:
    tracked = tracked_entries(directory)
    slots: I32 = directory.entries["slot"][tracked]
    resident: I32 = tracked[slots != NONE]
    return resident


def check_directory(directory: Directory, num_slots: int, num_used: int) -> None:
    """Key -> entry -> slot is one to one, and the slots in use are exactly 0 to `num_used` - 1. Raises AssertionError."""
    tracked = tracked_entries(directory)
    unused = num_unused(directory)
    assert len(tracked) == directory.state[NUM_TRACKED], f"{len(tracked)} cells hold {directory.state[NUM_TRACKED]} tracked rows"
    assert len(tracked) + unused == len(directory.entries), (
        f"{len(tracked)} tracked and {unused} unused of {len(directory.entries)} entries"
    )
    for entry in tracked.tolist():
        found = find(directory, int(directory.entries["key"][entry]))
        assert found == entry, f"the key of entry {entry} leads to entry {found}"
    slots = np.sort(directory.entries["slot"][resident_entries(directory)])
    assert num_used <= num_slots, f"{num_used} slots in use of {num_slots}"
    assert np.array_equal(slots, np.arange(num_used)), f"{len(slots)} resident rows do not fill slots 0 to {num_used - 1}"
    dirty_only = np.count_nonzero(directory.entries["dirty"][tracked] & (directory.entries["slot"][tracked] == NONE))
    assert dirty_only == 0, f"{dirty_only} of {len(tracked)} tracked rows are dirty and not resident"


@compiled
def home(key: int, num_cells: int) -> int:
    """The cell where the search for a key begins. Folding first brings the table, which stands in the high bits, into play."""
    folded = np.uint64(key) ^ (np.uint64(key) >> np.uint64(32))
    return np.int64((folded * SPREAD) >> np.uint64(32)) & (num_cells - 1)  # type: ignore[return-value]


@compiled
def find(directory: Directory, key: int) -> int:
    """The entry of a tracked row, or NONE."""
    cells = directory.cells
    cell = home(key, len(cells))
    while cells[cell]["entry"] != NONE and cells[cell]["key"] != key:
        cell = (cell + 1) & (len(cells) - 1)
    return cells[cell]["entry"]  # type: ignore[no-any-return]


@compiled
def track(directory: Directory, key: int) -> int:
    """The entry of a row, a new one if it was not tracked. Room was made before."""
    entries, cells, state = directory
    cell = home(key, len(cells))
    while cells[cell]["entry"] != NONE:
        if cells[cell]["key"] == key:
            return cells[cell]["entry"]  # type: ignore[no-any-return]
        cell = (cell + 1) & (len(cells) - 1)
    entry = state[FIRST_UNUSED]
    state[FIRST_UNUSED] = entries[entry]["after"]
    state[NUM_TRACKED] += 1
    cells[cell]["key"] = key
    cells[cell]["entry"] = entry
    entries[entry]["key"] = key
    return entry  # type: ignore[no-any-return]


@compiled
def forget(directory: Directory, entry: int) -> None:
    """Ends the tracking of a row. Later cells of its cluster move up, so that no search ends too early."""
    entries, cells, state = directory
    last = len(cells) - 1
    hole = home(entries[entry]["key"], len(cells))
    while cells[hole]["entry"] != entry:
        hole = (hole + 1) & last
    cell = (hole + 1) & last
    while cells[cell]["entry"] != NONE:
        begin = home(cells[cell]["key"], len(cells))
        if ((cell - begin) & last) >= ((cell - hole) & last):
            cells[hole]["key"] = cells[cell]["key"]
            cells[hole]["entry"] = cells[cell]["entry"]
            hole = cell
        cell = (cell + 1) & last
    cells[hole]["entry"] = NONE
    entries[entry]["occurrence"] = NONE
    entries[entry]["after"] = state[FIRST_UNUSED]
    state[FIRST_UNUSED] = entry
    state[NUM_TRACKED] -= 1


@compiled
def num_unused(directory: Directory) -> int:
    """Unused entries, counted along their chain."""
    count = 0
    entry = directory.state[FIRST_UNUSED]
    while entry != NONE and count <= len(directory.entries):
        entry = directory.entries[entry]["after"]
        count += 1
    return count


@compiled
def copy_entries(old: Directory, new: Directory, tracked: I32) -> None:
    """Every entry keeps its number; the unused ones of `new` are chained again."""
    for entry in tracked:
        new.entries[entry] = old.entries[entry]
        cell = home(old.entries[entry]["key"], len(new.cells))
        while new.cells[cell]["entry"] != NONE:
            cell = (cell + 1) & (len(new.cells) - 1)
        new.cells[cell]["key"] = old.entries[entry]["key"]
        new.cells[cell]["entry"] = entry
    new.state[NUM_TRACKED] = len(tracked)
    chain = NONE
    position = len(tracked) - 1
    for entry in range(len(new.entries) - 1, -1, -1):
        if position >= 0 and tracked[position] == entry:
            position -= 1
        else:
            new.entries[entry]["after"] = chain
            chain = entry
    new.state[FIRST_UNUSED] = chain
