"""Two ends of a conversation without shared memory: pieces travel with messages from ring to mirror, both ways."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from rowcast.protocol.conversation import Conversation, Link
from rowcast.protocol.messages import AnyMessage, Envelope, Released, RingRef, RowsBack
from rowcast.protocol.session import Session, decode, encode
from rowcast.protocol.transport.ring import RingReader, RingWriter, release
from rowcast.protocol.transport.ring_file import in_memory_buffer


class LooseSession(Session):
    """Lets any message follow any other: these tests are about bytes."""

    def encode(self, message: AnyMessage) -> bytes:
        return encode(Envelope(incarnation=1, sequence=0, message=message))

    def decode(self, frame: bytes) -> AnyMessage:
        return decode(frame).message


def rows_back(ref: RingRef | None, number: int = 0) -> RowsBack:
    return RowsBack(plan=number, barrier=None, piece=0, last=True, payload=ref, rows=())


@dataclass
class End:
    """One of the two, with what arrived and was not read yet."""

    link: Link
    conversation: Conversation
    writer: RingWriter
    reader: RingReader
    arrived: deque[RowsBack] = field(default_factory=deque)

    def put(self, number: int, nbytes: int) -> bool:
        """Sends piece `number`, of bytes that name it; False while the ring is full."""
        piece = self.writer.try_allocate(nbytes)
        if piece is None:
            return False
        piece.payload[:] = contents(number, nbytes)
        self.conversation.send(rows_back(self.writer.commit(piece, number, checksum=False), number))
        return True

    def read(self) -> tuple[int, int]:
        """Checks the oldest piece that arrived and gives its space back; its number and length."""
        message = self.arrived.popleft()
        assert message.payload is not None
        assert message.plan is not None
        payload = self.reader.view(message.payload, message.plan)
        assert np.array_equal(payload, contents(message.plan, len(payload)))
        release(self.reader, message.payload, self.conversation.send)
        return message.plan, len(payload)


def contents(number: int, nbytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8)


def make_end(link: Link, ring_bytes: int, *, mirrored: bool = True) -> End:
    end = End(
        link=link,
        conversation=Conversation(LooseSession("trainer"), link),
        writer=RingWriter(in_memory_buffer(ring_bytes), always_checksum=True),
        reader=RingReader(in_memory_buffer(ring_bytes), mirror=True),
    )
    if mirrored:
        end.conversation.carry(end.writer, end.reader)
    end.conversation.listen(
        {RowsBack: end.arrived.append, Released: lambda message: end.writer.release(message.position)}
    )
    return end


def exchange(first: End, second: End, num_pieces: int, chance: Random, wait: Callable[[], None]) -> None:
    """`num_pieces` each way, of all lengths, in an order that `chance` decides. Calls `wait` while nothing arrives."""
    todo = {
        id(end): deque((n, chance.randint(0, end.writer.max_payload)) for n in range(num_pieces))
        for end in (first, second)
    }
    due = {id(first): deque(todo[id(second)]), id(second): deque(todo[id(first)])}
    while any(due.values()):
        end = chance.choice((first, second))
        queue = todo[id(end)]
        if queue and chance.random() < 0.5 and end.put(*queue[0]):
            queue.popleft()
        elif end.arrived and chance.random() < 0.5:
            assert end.read() == due[id(end)].popleft()
        elif not end.conversation.advance() and not first.arrived and not second.arrived:
            wait()
    while first.writer.used_bytes or second.writer.used_bytes:
        if not first.conversation.advance() and not second.conversation.advance():
            wait()
