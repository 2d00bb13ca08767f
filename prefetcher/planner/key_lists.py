"""Packs the rows of a step that a rank wants of one owner, and reads them as an owner that trusts nobody.

    group 0 | count | gap gap gap ...         keys ascend: a gap is a key less the one before, less one
    group 1 | count | ...                     the first gap of a group is its first key

Every number is in LEB128: seven bits a byte, the lowest first, in as few bytes as hold it.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from rowcast.job.tables import KEY_SHIFT, GroupSpec
from rowcast.prefetcher.planner.directory import Records
from rowcast.protocol.parts import LINE, Shards, owner
from rowcast.runtime.arrays import I64, Bytes
from rowcast.runtime.compiled import compiled_loop, compiled_part
from rowcast.runtime.errors import RemoteProtocolError

MOST_BYTES = 9  # of a number: keys have 63 bits
TABLE = np.dtype([("first_key", np.int64), ("end_key", np.int64), ("line", LINE)])


def pack(keys: Sequence[I64]) -> bytes:
    """`keys`: of each group, distinct and ascending."""
    content, end = np.empty(MOST_BYTES * (len(keys) + sum(map(len, keys))), np.uint8), 0
    for own in keys:
        end = write_list(own, content, end)
    return content[:end].tobytes()


class Unpacker:
    """Reads what other ranks want of this one."""

    def __init__(self, groups: Sequence[GroupSpec], shards: Sequence[Shards], number: int) -> None:
        """`shards`: of each group. `number`: of this rank."""
        of_groups = zip(groups, shards, strict=True)
        tables = [(table, own.lines[table.index]) for group, own in of_groups for table in group.tables]
        keys = [(table.index << KEY_SHIFT, table.num_embeddings, line) for table, line in tables]
        self._tables = np.array([(first, first + rows, line) for first, rows, line in keys], TABLE)
        self._first_tables = np.array([0, *accumulate(len(group.tables) for group in groups)])
        self._count, self._number = shards[0].count, number

    def unpack(self, content: memoryview) -> tuple[I64, ...]:
        """Returns the keys of each group, ascending. Takes at most 8 bytes for a byte of `content`.

        Raises RemoteProtocolError if `pack` gives no such bytes for rows of this shard."""
        found = np.frombuffer(content, np.uint8)
        found.flags.writeable = False  # some are, and loops are compiled for one kind
        keys, ends = np.empty(len(found), np.int64), np.zeros(len(self._first_tables), np.int64)
        read_lists(found, self._tables, self._first_tables, self._count, self._number, keys, ends)
        return tuple(keys[start:end] for start, end in pairwise(ends.tolist()))


@compiled_loop
def write_list(keys: I64, content: Bytes, end: int) -> int:
    end, before = write_number(len(keys), content, end), np.int64(-1)
    for key in keys:
        end, before = write_number(key - before - 1, content, end), key
    return end


@compiled_part
def write_number(number: int, content: Bytes, end: int) -> int:
    while number >= 128:
        content[end] = number | 128
        number >>= 7
        end += 1
    content[end] = number
    return end + 1


@compiled_loop
def read_lists(
    content: Bytes, tables: Records, first_tables: I64, count: int, number: int, keys: I64, ends: I64
) -> None:
    """Group g's tables begin at first_tables[g], its keys at ends[g]."""
    at = found = 0
    for g in range(len(first_tables) - 1):
        num_keys, at = read_number(content, at)
        if num_keys > len(content) - at:
            raise RemoteProtocolError("a list of keys announces more of them than it has bytes")
        key, t, end_table = np.int64(-1), first_tables[g], first_tables[g + 1]
        end_key = tables[end_table - 1]["end_key"]
        for _ in range(num_keys):
            gap, at = read_number(content, at)
            key += 1 + min(gap, end_key - key)  # any gap: a key beyond the last table is none of its rows
            while t < end_table and key >= tables[t]["end_key"]:
                t += 1
            if t == end_table or key < tables[t]["first_key"] or owner(tables[t]["line"], key, count) != number:
                raise RemoteProtocolError("a list of keys has one that is no row of its group in this shard")
            keys[found] = key
            found += 1
        ends[g + 1] = found
    if at < len(content):
        raise RemoteProtocolError("a list of keys goes on after its last group")


@compiled_part
def read_number(content: Bytes, at: int) -> tuple[np.int64, int]:
    """Returns a number and where it ends."""
    number = np.int64(0)
    for shift in range(0, 7 * MOST_BYTES, 7):
        if at == len(content):
            raise RemoteProtocolError("a list of keys ends before its last number")
        byte = np.int64(content[at])
        at += 1
        number |= (byte & 127) << shift
        if byte == 0 and shift > 0:
            break
        if byte < 128:
            return number, at
    raise RemoteProtocolError("a list of keys has a number in more bytes than it needs, or of more than 63 bits")
