"""Who leaves: resident rows queued by next use, farthest first.

    queue            holds rows whose next use is          order within
    step % (h + 1)   that step of the horizon (h beyond)   (last use, key), ascending
    h + 1            unknown                               (last use, key), ascending

Victims come off the head of the unknown queue, then off the heads of the queues from the farthest step to the nearest but the plan's
own, so each tie is broken by the oldest last use, then the smallest key. A queue needs no sorting as plans go by, since a plan puts its
rows at the tails by ascending key; only the rows that move from the unknown queue when a batch enters the horizon are sorted.
"""

from typing import NamedTuple

import numpy as np

from prefetcher.compiled import compiled
from prefetcher.planner.directory import NONE, Directory, Records, forget
from prefetcher.planner.grouping import I32, I64, sort_pairs


class Queues(NamedTuple):
    """Doubly linked lists of entries; the links are in the entries."""

    first: I32  # [h + 2]
    last: I32  # [h + 2]
    num_rows: I32  # [h + 2]


def new_queues(horizon: int) -> Queues:
    return Queues(np.full(horizon + 2, NONE, np.int32), np.full(horizon + 2, NONE, np.int32), np.zeros(horizon + 2, np.int32))


@compiled
def queue_of(queues: Queues, next_use: int) -> int:
    """The queue of rows next used at a step, or at NONE: unknown."""
    unknown = len(queues.first) - 1
    return unknown if next_use == NONE else next_use % unknown


@compiled
def push(queues: Queues, queue: int, entries: Records, entry: int) -> None:
    """Puts an entry at the tail."""
    tail = queues.last[queue]
    entries[entry]["before"] = tail
    entries[entry]["after"] = NONE
    if tail == NONE:
        queues.first[queue] = entry
    else:
        entries[tail]["after"] = entry
    queues.last[queue] = entry
    queues.num_rows[queue] += 1


@compiled
def unlink(queues: Queues, queue: int, entries: Records, entry: int) -> None:
    before, after = entries[entry]["before"], entries[entry]["after"]
    if before == NONE:
        queues.first[queue] = after
    else:
        entries[before]["after"] = after
    if after == NONE:
        queues.last[queue] = before
    else:
        entries[after]["before"] = before
    queues.num_rows[queue] -= 1


@compiled
def clear(queues: Queues, queue: int) -> None:
    queues.first[queue] = queues.last[queue] = NONE
    queues.num_rows[queue] = 0


@compiled
def queue_in_order(queues: Queues, queue: int, entries: Records, moved: I32) -> None:
    """Fills an empty queue with entries that come by ascending key."""
    last_uses = np.empty(len(moved), np.int64)
    for i in range(len(moved)):
        last_uses[i] = entries[moved[i]]["last_use"]
    sort_pairs(last_uses, moved)
    for i in range(len(moved)):
        push(queues, queue, entries, moved[i])


@compiled
def take_victims(queues: Queues, step: int, farthest: int, entries: Records, victims: I32) -> int:
    """Fills `victims` with the rows to evict for the plan of `step`, dirty ones first, each part by ascending key. Returns how many
    are dirty. The caller made sure that the queues but the plan's own hold enough rows."""
    taken = np.empty(len(victims), np.int32)
    num_taken = take_heads(queues, queue_of(queues, NONE), entries, taken, 0)
    for next_use in range(farthest, step, -1):
        if num_taken == len(victims):
            break
        num_taken = take_heads(queues, queue_of(queues, next_use), entries, taken, num_taken)
    num_dirty = 0
    for i in range(num_taken):
        dirty = entries[taken[i]]["dirty"]
        victims[num_dirty if dirty else len(victims) - 1 - (i - num_dirty)] = taken[i]
        num_dirty += dirty
    sort_by_key(entries, victims[:num_dirty])
    sort_by_key(entries, victims[num_dirty:])
    return num_dirty


@compiled
def take_heads(queues: Queues, queue: int, entries: Records, taken: I32, num_taken: int) -> int:
    while num_taken < len(taken) and queues.first[queue] != NONE:
        taken[num_taken] = queues.first[queue]
        unlink(queues, queue, entries, queues.first[queue])
        num_taken += 1
    return num_taken


@compiled
def sort_by_key(entries: Records, some: I32) -> None:
    keys = np.empty(len(some), np.int64)
    for i in range(len(some)):
        keys[i] = entries[some[i]]["key"]
    sort_pairs(keys, some)


@compiled
def drop_victims(directory: Directory, victims: I32, head: int, keys: I64, slots: I32) -> int:
    """Takes the victims' slots, fills their `keys` and `slots`, and returns the last step that used one of them (NONE without victims).
    Victims with no occurrence from `head` on are tracked no longer."""
    entries = directory.entries
    last_use = NONE
    for i in range(len(victims)):
        entry = victims[i]
        keys[i], slots[i] = entries[entry]["key"], entries[entry]["slot"]
        last_use = max(last_use, entries[entry]["last_use"])
        entries[entry]["slot"] = NONE
        entries[entry]["dirty"] = 0
        if entries[entry]["occurrence"] < head:
            forget(directory, entry)
    return last_use


@compiled
def members(queues: Queues, queue: int, entries: Records) -> I32:
    """The entries of a queue from head to tail; a broken chain gives fewer or ends in a NONE."""
    found = np.full(queues.num_rows[queue] + 1, NONE, np.int32)
    entry = queues.first[queue]
    count = 0
    while entry != NONE and count < len(found):
        found[count] = entry
        entry = entries[entry]["after"]
        count += 1
    return found[:count]


def check_queues(queues: Queues, entries: Records, resident: I32, next_uses: I64) -> None:
    """Every resident row stands once, in the queue of its next use (NONE: unknown), in order of last use and key."""
    expected = np.where(next_uses == NONE, len(queues.first) - 1, next_uses % (len(queues.first) - 1))
    for queue in range(len(queues.first)):
        found = members(queues, queue, entries)
        assert len(found) == queues.num_rows[queue], f"queue {queue} counts {queues.num_rows[queue]} rows, but chains {len(found)}"
        belongs = resident[expected == queue]
        assert np.array_equal(np.sort(found), np.sort(belongs)), f"queue {queue} chains {len(found)} rows of which {len(belongs)} belong"
        order = np.lexsort((entries["key"][found], entries["last_use"][found]))
        assert np.array_equal(order, np.arange(len(found))), f"queue {queue} of {len(found)} rows is out of order at {order}"
