"""The byte ring: what fits, what is refused, and that a reader only ever sees what the writer committed."""

from collections import deque
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.protocol.messages import RingRef
from rowcast.protocol.transport.ring import RingReader, RingSlice, RingWriter
from rowcast.protocol.transport.ring_file import in_memory_buffer
from rowcast.runtime.arrays import Bytes
from rowcast.runtime.errors import LocalProtocolError, RemoteProtocolError

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


def test_payloads_are_aligned_in_memory() -> None:
    _, writer, reader = make_ring()
    for nbytes in (1, 63, 64, 65, 0, 129):
        payload = reader.view(put(writer, nbytes), STAMP)
        assert len(payload) == nbytes
        assert payload.ctypes.data % 64 == 0


def test_a_full_ring_says_so_and_takes_the_piece_once_space_is_released() -> None:
    _, writer, reader = make_ring()
    refs = [put(writer, writer.max_payload, value) for value in (1, 2)]
    assert writer.try_allocate(1) is None
    assert writer.used_bytes == RING_BYTES
    reader.view(refs[0], STAMP)
    position = reader.done(refs[0])
    assert position is not None
    writer.release(position)
    third = put(writer, writer.max_payload, 3)
    assert reader.view(refs[1], STAMP)[0] == 2
    assert reader.view(third, STAMP)[0] == 3


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


@settings(max_examples=300)
@given(st.integers(1024, RING_BYTES), st.lists(st.floats(0, 1), max_size=30))
def test_any_payload_and_any_two_fit_once_everything_is_released(ring_bytes: int, shares: list[float]) -> None:
    _, writer, reader = make_ring(ring_bytes)
    for share in [*shares, 1.0]:
        ref = put(writer, round(share * writer.max_payload))
        reader.view(ref, STAMP)
        writer.release(reader.done(ref) or -1)
    assert writer.used_bytes == 0
    assert put(writer, writer.max_payload).nbytes == put(writer, writer.max_payload).nbytes == writer.max_payload


@settings(max_examples=300)
@given(st.lists(PAYLOADS, min_size=1, max_size=60), st.randoms(use_true_random=False))
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
            assert (payload == number % 251).all()
            position = reader.done(ref)
            if position is not None:
                writer.release(position)
            num_read += 1
    assert writer.used_bytes == 0
