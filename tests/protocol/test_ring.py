"""The byte ring and its mirrors: what fits, what is refused, and that a reader only sees what the writer committed."""

from collections import deque
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.schema import AUTO_MIRROR_BYTES, Transport
from rowcast.protocol.messages import Bye, RingRef, RingSpec
from rowcast.protocol.transport.ring import RingReader, RingSlice, RingWriter
from rowcast.protocol.transport.ring_file import RingMemory, attach_ring, create_ring, in_memory_buffer
from rowcast.protocol.transport.zmq_ends import MAX_PART_BYTES
from rowcast.runtime.arrays import Bytes
from rowcast.runtime.errors import LocalProtocolError, RemoteProtocolError
from tests.protocol.mirrors import End, exchange, make_end, rows_back
from tests.support.facts import facts
from tests.support.inproc_link import inproc_pair

RING_BYTES = 16 * 1024
STAMP = 7 << 20 | 3


def make_ring(nbytes: int = RING_BYTES) -> tuple[Bytes, RingWriter, RingReader]:
    buffer = in_memory_buffer(nbytes)
    return buffer, RingWriter(buffer), RingReader(buffer)


def put(writer: RingWriter, nbytes: int, value: int = 1, checksum: bool = False) -> RingRef:
    piece = writer.try_allocate(nbytes)
    assert piece is not None
    piece.payload[:] = value
    return writer.commit(piece, STAMP, checksum)


def test_a_piece_is_read_where_it_was_written() -> None:
    buffer, writer, reader = make_ring()
    ref = put(writer, 1000, value=5, checksum=True)
    payload = reader.view(ref, STAMP)
    assert payload.tolist() == [5] * 1000
    assert payload.flags.writeable  # torch.from_numpy warns otherwise
    assert np.shares_memory(payload, buffer)
    assert reader.done(ref) == ref.end
    writer.release(ref.end)
    assert writer.used_bytes == 0


@pytest.mark.parametrize("nbytes", [-1, RING_BYTES // 2 - 127, RING_BYTES])
def test_a_payload_that_never_fits_is_an_error_and_not_a_wait(nbytes: int) -> None:
    _, writer, _ = make_ring()
    with pytest.raises(ValueError, match=str(nbytes)):
        writer.try_allocate(nbytes)


def test_a_ring_too_small_for_two_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="1000 bytes is too small"):
        RingWriter(in_memory_buffer(1000))


def test_pieces_finish_in_any_order_and_space_is_released_in_order() -> None:
    _, writer, reader = make_ring()
    refs = [put(writer, 100) for _ in range(3)]
    for ref in refs:
        reader.view(ref, STAMP)
    assert reader.done(refs[1]) is None
    assert reader.done(refs[2]) is None
    assert reader.done(refs[0]) == refs[2].end


def test_several_slices_are_allocated_before_the_first_commit_and_committed_in_order() -> None:
    _, writer, _ = make_ring()
    first, second = writer.try_allocate(10), writer.try_allocate(10)
    assert first is not None
    assert second is not None
    with pytest.raises(LocalProtocolError, match=f"{second.position} is committed while the one at {first.position}"):
        writer.commit(second, STAMP, checksum=False)
    writer.commit(first, STAMP, checksum=False)
    writer.commit(second, STAMP, checksum=False)
    with pytest.raises(LocalProtocolError, match="None is the oldest"):
        writer.commit(second, STAMP, checksum=False)


def test_released_must_name_the_end_of_a_piece_that_the_peer_holds() -> None:
    _, writer, _ = make_ring()
    with pytest.raises(RemoteProtocolError, match="none"):
        writer.release(0)
    first, second = put(writer, 100), put(writer, 100)
    uncommitted = writer.try_allocate(10)
    assert uncommitted is not None
    for position in (uncommitted.end, first.end - 64, second.end + 64, -1):
        with pytest.raises(RemoteProtocolError, match=f"names position {position}; .* {first.end} to {second.end}"):
            writer.release(position)
    writer.release(second.end)
    for position in (first.end, second.end):  # going backwards, and a repeat
        with pytest.raises(RemoteProtocolError):
            writer.release(position)


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_torn_guard_is_noticed_when_viewed_and_when_done(side: str) -> None:
    buffer, writer, reader = make_ring()
    seen, unseen = put(writer, 100), put(writer, 100)
    reader.view(seen, STAMP)
    for ref in (seen, unseen):
        start = ref.position - 64 if side == "before" else ref.end - 64
        buffer[start] ^= 255
    with pytest.raises(RemoteProtocolError, match=f"{side} the piece at position {unseen.position}.*{STAMP}"):
        reader.view(unseen, STAMP)
    with pytest.raises(RemoteProtocolError, match=f"{side} the piece at position {seen.position}"):
        reader.done(seen)


def test_bytes_of_another_step_are_refused_with_both_stamps() -> None:
    _, writer, reader = make_ring()
    ref = put(writer, 100)
    with pytest.raises(RemoteProtocolError, match=f"{STAMP}, 64, 100.*{STAMP + 1}, 64, 100"):
        reader.view(ref, STAMP + 1)


def test_a_changed_payload_is_noticed_by_its_checksum() -> None:
    buffer, writer, reader = make_ring()
    ref = put(writer, 100, checksum=True)
    buffer[ref.position + 99] ^= 1
    with pytest.raises(RemoteProtocolError, match=f"position {ref.position} .*{ref.checksum:016x} was announced"):
        reader.view(ref, STAMP)


@pytest.mark.parametrize(
    ("position", "nbytes", "end"),
    [
        (64, 100, 256 + 64),  # too long
        (64, 100, 128),  # too short
        (64, 8000, 64 + 8000 + 64 + 64),
        (64, 16384, 64 + 16384 + 64),  # more than fits
        (64, -64, 64),
        (192, 100, 384),  # a gap
        (65, 100, 257),  # not aligned
        (-64, 100, 128),
    ],
)
def test_a_reference_outside_the_order_or_the_ring_is_refused(position: int, nbytes: int, end: int) -> None:
    _, writer, reader = make_ring()
    put(writer, 100)
    with pytest.raises(RemoteProtocolError):
        reader.view(RingRef(position=position, nbytes=nbytes, end=end), STAMP)


def test_a_piece_is_viewed_once_in_order_and_finished_once() -> None:
    _, writer, reader = make_ring()
    first, second = put(writer, 100), put(writer, 100)
    with pytest.raises(RemoteProtocolError, match=f"position {second.position} does not follow"):
        reader.view(second, STAMP)
    with pytest.raises(LocalProtocolError, match="not being read"):
        reader.done(first)
    reader.view(first, STAMP)
    with pytest.raises(RemoteProtocolError, match=f"position {first.position} does not follow"):
        reader.view(first, STAMP)
    reader.done(first)
    with pytest.raises(LocalProtocolError, match="not being read"):
        reader.done(first)


def test_a_piece_over_one_still_being_read_is_refused() -> None:
    _, writer, reader = make_ring()
    refs = [put(writer, writer.max_payload) for _ in range(2)]
    for ref in refs:
        reader.view(ref, STAMP)
    writer.release(refs[0].end)  # as if the reader had said so
    over = put(writer, writer.max_payload)
    with pytest.raises(RemoteProtocolError, match=f"overlaps the one at {refs[0].position}"):
        reader.view(over, STAMP)


PAYLOADS = st.integers(0, RING_BYTES // 2 - 128)


@settings(max_examples=100)
@given(st.integers(1024, RING_BYTES), st.lists(st.floats(0, 1), max_size=30))
def test_any_payload_and_any_two_fit_once_everything_is_released(ring_bytes: int, shares: list[float]) -> None:
    _, writer, reader = make_ring(ring_bytes)
    for share in [*shares, 1.0]:
        ref = put(writer, round(share * writer.max_payload))
        reader.view(ref, STAMP)
        writer.release(reader.done(ref) or -1)
    assert writer.used_bytes == 0
    assert put(writer, writer.max_payload).nbytes == put(writer, writer.max_payload).nbytes == writer.max_payload


@settings(max_examples=100)
@given(st.lists(PAYLOADS, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_pieces_arrive_whole_however_late_and_out_of_order_they_are_read(sizes: list[int], chance: Random) -> None:
    _, writer, reader = make_ring()
    todo = deque(enumerate(sizes))
    uncommitted: deque[tuple[RingSlice, int]] = deque()
    announced: deque[tuple[RingRef, int]] = deque()
    reading: list[tuple[RingRef, Bytes, int]] = []
    num_read = 0
    while num_read < len(sizes):
        queues = {"allocate": todo, "commit": uncommitted, "view": announced, "done": reading}
        move = chance.choice([name for name, queue in queues.items() if queue])
        if move == "allocate":
            piece = writer.try_allocate(todo[0][1])
            if piece is None:
                assert uncommitted or announced or reading, "an empty ring takes any piece"
                continue
            number, _ = todo.popleft()
            piece.payload[:] = number % 251
            uncommitted.append((piece, number))
        elif move == "commit":
            piece, number = uncommitted.popleft()
            announced.append((writer.commit(piece, number, chance.random() < 0.5), number))
        elif move == "view":
            ref, number = announced.popleft()
            reading.append((ref, reader.view(ref, number), number))
        else:
            ref, payload, number = reading.pop(chance.randrange(len(reading)))
            assert payload.ctypes.data % 64 == 0
            assert (payload == number % 251).all()
            position = reader.done(ref)
            if position is not None:
                writer.release(position)
            num_read += 1
    assert writer.used_bytes == 0


MIRROR_STAMP = 7


def make_ends(ring_bytes: int = RING_BYTES) -> tuple[End, End]:
    first, second = inproc_pair()
    return make_end(first, ring_bytes), make_end(second, ring_bytes)


@settings(max_examples=20)
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


def put_in_mirror(writer: RingWriter, nbytes: int, value: int = 1) -> tuple[RingRef, list[memoryview]]:
    piece = writer.try_allocate(nbytes)
    assert piece is not None
    piece.payload[:] = value
    ref = writer.commit(piece, MIRROR_STAMP, checksum=False)
    return ref, [writer.payload(ref)]


def test_every_piece_carries_a_checksum_whatever_its_writer_asks_for() -> None:
    _, writer, reader = make_mirror()
    ref, _ = put_in_mirror(writer, 100)
    assert ref.checksum is not None
    reader.deposit(ref, [memoryview(b"\x01" * 99 + b"\x02")])
    sentence = rf"position {ref.position} of a ring has checksum \w{{16}}; {ref.checksum:016x} was announced"
    with pytest.raises(RemoteProtocolError, match=sentence):
        reader.view(ref, MIRROR_STAMP)


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
    reader.deposit(*put_in_mirror(writer, 100))
    before = buffer.copy()
    ref = bad_refs(writer)[name]
    with pytest.raises(RemoteProtocolError):
        reader.deposit(ref, [memoryview(b"\xff" * ref.nbytes)])
    assert (buffer == before).all()


def test_a_piece_is_viewed_after_it_came_and_done_after_it_was_viewed() -> None:
    _, writer, reader = make_mirror()
    first, second = put_in_mirror(writer, 10), put_in_mirror(writer, 10)
    with pytest.raises(LocalProtocolError, match="the one at None is next"):
        reader.view(first[0], MIRROR_STAMP)
    reader.deposit(*first)
    reader.deposit(*second)
    with pytest.raises(LocalProtocolError, match=f"the one at {first[0].position} is next"):
        reader.view(second[0], MIRROR_STAMP)
    with pytest.raises(LocalProtocolError, match="not being read"):
        reader.done(first[0])
    assert reader.view(first[0], MIRROR_STAMP).tolist() == [1] * 10
    assert reader.done(first[0]) == first[0].end


@pytest.mark.parametrize("payload", [b"", b"x" * 99, b"x" * 101])
def test_a_message_comes_with_exactly_the_bytes_that_it_announces(payload: bytes) -> None:
    first, second = make_ends()
    ref, _ = put_in_mirror(first.writer, 100)
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
