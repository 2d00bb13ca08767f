"""One end of a link at which something goes wrong with a frame that arrives, once.

    sender -> inner link -> fault -> conversation

The conversation must refuse every fault but a delay. `must_refuse` says that such a frame was handed out; a
conversation that then asks for one more frame has accepted it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from rowcast.protocol.messages import EndOfData, Envelope, PlanDone
from rowcast.protocol.session import decode
from rowcast.protocol.transport.ring import Payload
from rowcast.runtime.errors import RemoteProtocolError
from tests.support.inproc_link import InprocLink, inproc_pair

FrameFaultKind = Literal["delay", "drop", "duplicate", "reorder", "cut short", "flip", "stale", "other incarnation"]
FRAME_FAULTS: tuple[FrameFaultKind, ...] = get_args(FrameFaultKind)
DELAY_POLLS = 400
# hold times and sizes that differ from run to run, so flips avoid them: a seed must replay
MEASURED = (PlanDone, EndOfData)

Arrival = tuple[bytes, Payload]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameFault:
    kind: FrameFaultKind
    at: int  # frames that arrive before it; the greeting is number 0
    share: float  # 0 to 1: where in a frame, or how long

    def __str__(self) -> str:
        return f"{self.kind} ({self.share:.2f}) of frame {self.at}"


class FaultyLink:
    """Implements `Link`."""

    def __init__(
        self, inner: InprocLink, fault: FrameFault | None, earlier: Sequence[Arrival], say: Callable[[str], None]
    ) -> None:
        """`earlier`: what arrived in an earlier incarnation. `say` is told when the fault happens."""
        self.arrived: list[Arrival] = []
        self.must_refuse = False
        self.lost_a_frame = False
        self.is_cut = False  # nothing arrives any more
        self._inner = inner
        self._fault = fault
        self._earlier = earlier
        self._say = say
        self._ready: deque[tuple[Arrival, bool]] = deque()  # with whether it must be refused
        self._held: Arrival | None = None
        self._polls_to_wait = 0
        self._refuse_at_once = False

    @property
    def refused(self) -> int:
        return self._inner.refused

    @property
    def delays(self) -> bool:
        return self._polls_to_wait > 0

    def send(self, frame: bytes, payload: memoryview | None = None) -> None:
        self._inner.send(frame, payload)

    def close(self) -> None:
        self._inner.close()

    def receive(self) -> Arrival | None:
        assert not self._refuse_at_once, f"a frame was accepted that had to be refused: {self._fault}"
        if self._polls_to_wait:
            self._polls_to_wait -= 1
            return None
        if self.is_cut:
            return None
        if not self._ready:
            self._take()
        if not self._ready:
            return None
        arrival, is_bad = self._ready.popleft()
        self.must_refuse |= is_bad
        self._refuse_at_once |= is_bad and not self._is_payload_flip(arrival)
        return arrival

    def _is_payload_flip(self, arrival: Arrival) -> bool:
        """Noticed only when the payload is looked at; the frame itself is as it was."""
        fault = self._fault
        return fault is not None and fault.kind == "flip" and arrival[0] == self.arrived[fault.at][0]

    def _take(self) -> None:
        arrival = self._inner.receive()
        if arrival is None:
            return
        self.arrived.append(arrival)
        if self._held is not None:
            self._ready += [(arrival, True), (self._held, True)]
        elif self._fault is not None and len(self.arrived) - 1 == self._fault.at:
            self._say(f"{self._fault}: a {type(decode(arrival[0]).message).__name__}")
            self._happen(self._fault, arrival)
        else:
            self._ready.append((arrival, self.lost_a_frame))

    def _happen(self, fault: FrameFault, arrival: Arrival) -> None:
        match fault.kind:
            case "delay":
                self._polls_to_wait = int(fault.share * DELAY_POLLS)
                self._ready.append((arrival, False))
            case "drop":
                self.lost_a_frame = True
            case "reorder":
                self.lost_a_frame, self._held = True, arrival
            case "duplicate":
                self._ready += [(arrival, False), (arrival, True)]
            case "cut short":
                self._ready.append((shortened(arrival, fault.share), True))
            case "flip":
                self._ready.append((flipped(arrival, fault.share), True))
            case "stale":
                stale = (
                    self._earlier[int(fault.share * len(self._earlier))]
                    if self._earlier
                    else of_other_incarnation(arrival)
                )
                self._ready.append((stale, True))
            case "other incarnation":
                self._ready.append((of_other_incarnation(arrival), True))


def shortened(arrival: Arrival, share: float) -> Arrival:
    frame, payload = arrival
    if payload and share < 0.5:
        return frame, (*payload[:-1], payload[-1][: int(share * len(payload[-1]))])
    return frame[: int(share * len(frame))], payload


def flipped(arrival: Arrival, share: float) -> Arrival:
    """One bit of the payload, or the first one of the frame, from a place on, that the codec can notice.

    Other bits change a number to another valid one: memory does not flip bits, and TCP frames are authenticated.
    """
    frame, payload = arrival
    if payload and share < 0.5:
        changed = bytearray(payload[0])
        changed[int(2 * share * len(changed))] ^= 1 << len(changed) % 8
        return frame, (memoryview(bytes(changed)), *payload[1:])
    if isinstance(decode(frame).message, MEASURED):
        return bytes([frame[0] ^ 0x10]) + frame[1:], payload
    bits = len(frame) * 8
    for bit in range(bits):
        place = (int(share * bits) + bit) % bits
        changed = bytearray(frame)
        changed[place // 8] ^= 1 << place % 8
        try:
            decode(bytes(changed))
        except RemoteProtocolError:
            return bytes(changed), payload
    raise AssertionError(f"no bit of a frame of {len(frame)} bytes matters")


def of_other_incarnation(arrival: Arrival) -> Arrival:
    """The same message with the next sequence number, but of the incarnation before."""
    envelope = decode(arrival[0])
    return msgspec.msgpack.encode(msgspec.structs.replace(envelope, incarnation=envelope.incarnation - 1)), arrival[1]


def faulty_pair(
    faults: tuple[FrameFault | None, FrameFault | None],
    earlier: tuple[Sequence[Arrival], Sequence[Arrival]],
    say: Callable[[str], None],
) -> tuple[FaultyLink, FaultyLink]:
    """The prefetcher's end and the trainer's; `faults` and `earlier` are of what arrives at each."""
    inner = inproc_pair()
    names = ("prefetcher", "trainer")
    ends = [
        FaultyLink(
            inner[side],
            faults[side],
            earlier[side],
            lambda what, name=names[side]: say(f"at the {name}: {what}"),  # type: ignore[misc]
        )
        for side in (0, 1)
    ]
    return ends[0], ends[1]


__all__ = ["FRAME_FAULTS", "Envelope", "FaultyLink", "FrameFault", "faulty_pair"]
