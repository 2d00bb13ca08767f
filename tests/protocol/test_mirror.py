"""Rings whose ends share no memory: what a peer may put into the mirror, and that all of it arrives."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.schema import AUTO_MIRROR_BYTES, Transport
from rowcast.protocol.messages import Bye, RingRef, RingSpec
from rowcast.protocol.transport.link import MAX_PART_BYTES
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.protocol.transport.ring_file import RingMemory, attach_ring, create_ring, in_memory_buffer
from rowcast.runtime.arrays import Bytes
from rowcast.runtime.errors import LocalProtocolError, RemoteProtocolError
from tests.protocol.mirrors import End, exchange, make_end, rows_back
from tests.support.facts import facts
from tests.support.inproc_link import inproc_pair

RING_BYTES = 16 * 1024
STAMP = 7


def make_ends(ring_bytes: int = RING_BYTES) -> tuple[End, End]:
    first, second = inproc_pair()
    return make_end(first, ring_bytes), make_end(second, ring_bytes)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_every_piece_arrives_whole_in_whatever_order_the_two_ends_move(seed: int) -> None:
    exchange(*make_ends(), num_pieces=20, chance=Random(seed), wait=lambda: None)


def test_a_piece_of_many_parts_arrives_whole() -> None:
    first, second = make_ends(8 * MAX_PART_BYTES)
    nbytes = 3 * MAX_PART_BYTES + 5
    assert first.put(1, nbytes)
    assert second.conversation.advance()
    assert second.read() == (1, nbytes)


def make_mirror() -> tuple[Bytes, RingWriter, RingReader]:
    buffer = in_memory_buffer(RING_BYTES)
    return buffer, RingWriter(in_memory_buffer(RING_BYTES), always_checksum=True), RingReader(buffer, mirror=True)


def put(writer: RingWriter, nbytes: int, value: int = 1) -> tuple[RingRef, list[memoryview]]:
    piece = writer.try_allocate(nbytes)
    assert piece is not None
    piece.payload[:] = value
    ref = writer.commit(piece, STAMP, checksum=False)
    return ref, [writer.payload(ref)]


def test_every_piece_carries_a_checksum_whatever_its_writer_asks_for() -> None:
    _, writer, reader = make_mirror()
    ref, _ = put(writer, 100)
    assert ref.checksum is not None
    reader.deposit(ref, [memoryview(b"\x01" * 99 + b"\x02")])
    sentence = rf"position {ref.position} of a ring has checksum \w{{16}}; {ref.checksum:016x} was announced"
    with pytest.raises(RemoteProtocolError, match=sentence):
        reader.view(ref, STAMP)


def bad_refs(writer: RingWriter) -> dict[str, RingRef]:
    whole = writer.capacity
    return {
        "a gap": RingRef(position=64 + 320, nbytes=100, end=64 + 320 + 192, checksum=1),
        "too long for its place": RingRef(position=64 + 256, nbytes=100, end=64 + 256 + 256, checksum=1),
        "more than half a ring": RingRef(position=64 + 256, nbytes=whole - 128, end=256 + whole, checksum=1),
        "before the ring": RingRef(position=-64, nbytes=100, end=128, checksum=1),
        "not aligned": RingRef(position=65 + 256, nbytes=100, end=65 + 256 + 192, checksum=1),
        "without a checksum": RingRef(position=64 + 256, nbytes=100, end=64 + 256 + 192),
    }


@pytest.mark.parametrize("name", list(bad_refs(make_mirror()[1])))
def test_a_piece_in_a_place_that_is_not_its_own_is_refused_before_a_byte_is_written(name: str) -> None:
    buffer, writer, reader = make_mirror()
    reader.deposit(*put(writer, 100))
    before = buffer.copy()
    ref = bad_refs(writer)[name]
    with pytest.raises(RemoteProtocolError):
        reader.deposit(ref, [memoryview(b"\xff" * ref.nbytes)])
    assert (buffer == before).all()


def test_a_piece_is_viewed_after_it_came_and_done_after_it_was_viewed() -> None:
    _, writer, reader = make_mirror()
    first, second = put(writer, 10), put(writer, 10)
    with pytest.raises(LocalProtocolError, match="the one at None is next"):
        reader.view(first[0], STAMP)
    reader.deposit(*first)
    reader.deposit(*second)
    with pytest.raises(LocalProtocolError, match=f"the one at {first[0].position} is next"):
        reader.view(second[0], STAMP)
    with pytest.raises(LocalProtocolError, match="not being read"):
        reader.done(first[0])
    assert reader.view(first[0], STAMP).tolist() == [1] * 10
    assert reader.done(first[0]) == first[0].end


@pytest.mark.parametrize("payload", [b"", b"x" * 99, b"x" * 101])
def test_a_message_comes_with_exactly_the_bytes_that_it_announces(payload: bytes) -> None:
    first, second = make_ends()
    ref, _ = put(first.writer, 100)
    first.link.send(first.conversation.session.encode(rows_back(ref)), memoryview(payload))
    with pytest.raises(RemoteProtocolError, match=facts("RowsBack", f"{len(payload)} bytes", 100)):
        second.conversation.advance()
    assert not second.arrived


@pytest.mark.parametrize("message", [Bye(), rows_back(None)])
def test_a_message_that_announces_no_bytes_comes_without_any(message: Bye) -> None:
    first, second = make_ends()
    first.link.send(first.conversation.session.encode(message), memoryview(b"more"))
    with pytest.raises(RemoteProtocolError, match="4 bytes of payload instead of 0"):
        second.conversation.advance()


def test_rings_that_both_ends_share_take_no_bytes_from_the_link() -> None:
    near, far = inproc_pair()
    first, second = make_end(near, RING_BYTES), make_end(far, RING_BYTES, mirrored=False)
    assert first.put(1, 100)
    with pytest.raises(RemoteProtocolError, match="100 bytes of payload instead of 0"):
        second.conversation.advance()


TCP = Transport(endpoint="tcp://127.0.0.1:1", keys="keys", ring="1MiB")


def test_a_mirror_has_the_size_that_the_job_file_says() -> None:
    ring = create_ring(TCP, 5 * 2**20, "fetch")
    assert isinstance(ring, RingMemory)
    assert (ring.path, ring.nbytes, len(ring.buffer)) == ("", 2**20, 2**20)
    assert isinstance(attach_ring(TCP, RingSpec(path="", nbytes=2**20)), RingMemory)
    assert Transport(endpoint="tcp://h:1", keys="k").mirror_bytes == AUTO_MIRROR_BYTES


@pytest.mark.parametrize(
    ("transport", "spec"),
    [
        (TCP, RingSpec(path="", nbytes=2**40)),  # a peer does not decide what is allocated
        (TCP, RingSpec(path="/etc/hostname", nbytes=2**20)),
        (Transport(), RingSpec(path="", nbytes=2**20)),
    ],
)
def test_rings_that_do_not_go_with_the_transport_are_refused(transport: Transport, spec: RingSpec) -> None:
    with pytest.raises(RemoteProtocolError, match=f"a ring of {spec.nbytes} bytes at '{spec.path}'"):
        attach_ring(transport, spec)
