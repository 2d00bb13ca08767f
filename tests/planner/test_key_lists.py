"""Lists of keys between prefetchers: what was packed comes out, and any other bytes are one sentence."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.tables import KEY_SHIFT
from rowcast.prefetcher.pipeline.key_exchange import Unpacker, pack
from rowcast.protocol.parts import Shards
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import RemoteProtocolError
from tests.support.planner_runs import group, i64, table

GROUPS = (
    group(0, (table(0, 2**40, 4, "a"), table(2, 300, 4, "c")), (0, 2)),
    group(1, (table(1, 5_000, 8, "b"), table(3, 64, 8, "d")), (1, 3)),
)
KEYS = st.tuples(
    *(
        st.lists(
            st.sampled_from(own.tables).flatmap(
                lambda table: (
                    st.integers(0, min(table.num_embeddings, 10_000) - 1).map(
                        lambda row: table.index << KEY_SHIFT | row
                    )
                    | st.just(table.index << KEY_SHIFT | table.num_embeddings - 1)
                )
            ),
            max_size=60,
            unique=True,
        )
        for own in GROUPS
    )
)


def unpacker(count: int, number: int) -> Unpacker:
    return Unpacker(GROUPS, [Shards(own.tables, count) for own in GROUPS], number)


def of_shard(keys: tuple[list[int], ...], count: int, number: int) -> list[I64]:
    return [
        Shards(own.tables, count).rows_of(number, i64(sorted(rows))) for own, rows in zip(GROUPS, keys, strict=True)
    ]


@given(KEYS, st.integers(1, 9))
def test_every_owner_unpacks_what_was_packed_for_it(keys: tuple[list[int], ...], count: int) -> None:
    for number in range(count):
        packed = of_shard(keys, count, number)
        for content in (pack(packed), bytearray(pack(packed))):
            unpacked = unpacker(count, number).unpack(memoryview(content))
            assert [own.tolist() for own in unpacked] == [own.tolist() for own in packed]
            assert all(own.dtype == np.int64 for own in unpacked)


CHANGES = st.lists(
    st.tuples(st.sampled_from(("set", "insert", "delete", "cut")), st.integers(0, 10_000), st.integers(0, 255)),
    max_size=3,
)


def changed(content: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    found = bytearray(content)
    for kind, place, byte in changes:
        at = place % (len(found) + 1)
        found[at : len(found) if kind == "cut" else at + (kind != "insert")] = (
            bytes([byte]) if kind in ("set", "insert") else b""
        )
    return bytes(found)


@settings(max_examples=500)
@given(KEYS, CHANGES, st.binary(max_size=40) | st.none(), st.integers(1, 3))
def test_other_bytes_are_refused_or_are_what_their_keys_pack_to(
    keys: tuple[list[int], ...], changes: list[tuple[str, int, int]], noise: bytes | None, count: int
) -> None:
    content = changed(pack(of_shard(keys, count, 0)), changes) if noise is None else noise
    try:
        unpacked = unpacker(count, 0).unpack(memoryview(content))
    except RemoteProtocolError:
        return
    assert pack(unpacked) == content
    assert [own.tolist() for own in of_shard(tuple(own.tolist() for own in unpacked), count, 0)] == [
        own.tolist() for own in unpacked
    ]


def numbers(*values: int) -> bytes:
    """Each in LEB128."""
    content = bytearray()
    for value in values:
        while value >= 128:
            content.append(value % 128 + 128)
            value //= 128
        content.append(value)
    return bytes(content)


GAP = (1 << KEY_SHIFT) - 1  # between the first rows of two neighbouring tables, less one
ENDS, TOO_MANY, NO_ROW = "ends before its last number", "announces more of them than it has bytes", "one that is no row"
UNUSUAL, GOES_ON = "in more bytes than it needs, or of more than 63 bits", "goes on after its last group"
FAULTS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", ENDS),
    "no second group": (numbers(0), ENDS),
    "it ends inside a number": (numbers(1, 300)[:-1], ENDS),
    "it ends inside the second count": (numbers(0) + b"\x80", ENDS),
    "bytes left over": (numbers(1, 3, 0, 7, 8), GOES_ON),
    "a last byte left over": (numbers(1, 3, 0) + b"\x80", GOES_ON),
    "too many": (numbers(4, 0, 0, 0), TOO_MANY),
    "a great count": (numbers(2**63 - 1, 0, 0), TOO_MANY),
    "64 bits": (numbers(1, 2**63, 0), UNUSUAL),
    "65 bits": (numbers(1, 2**64, 0), UNUSUAL),
    "no end": (b"\xff" * 70, UNUSUAL),
    "more bytes than it needs": (b"\x81\x80\x00" + numbers(3, 0), UNUSUAL),
    "beyond its table": (numbers(0, 1, GAP + 1 + 5_000), NO_ROW),
    "a table of another group": (numbers(1, GAP + 1, 0), NO_ROW),
    "beyond all tables": (numbers(2, 3, 2**62, 0), NO_ROW),
    "the greatest gap": (numbers(2, 3, 2**63 - 1, 0), NO_ROW),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault: str) -> None:
    content, sentence = FAULTS[fault]
    with pytest.raises(RemoteProtocolError, match=sentence):
        unpacker(1, 0).unpack(memoryview(content))


def test_a_row_of_another_shard_is_refused() -> None:
    shards = Shards(GROUPS[0].tables, 3)
    row = next(row for row in range(0, 64_000, 64) if shards.owners(i64([row]))[0] == 2)
    with pytest.raises(RemoteProtocolError, match=NO_ROW):
        unpacker(3, 1).unpack(memoryview(pack([i64([row]), i64([])])))


@pytest.mark.parametrize("content", [b"\xff" * 2**16, b"\x80" * 2**16, numbers(2**62) + b"\x00" * 2**16])
def test_bytes_take_no_more_memory_than_they_could_hold_keys(content: bytes) -> None:
    own = unpacker(1, 0)
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError):
        own.unpack(memoryview(content))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * len(content)
