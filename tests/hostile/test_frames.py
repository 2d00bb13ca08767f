"""Any bytes become an envelope that could be sent again, or an error, and change nothing."""

import signal
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from types import FrameType

import pytest

from rowcast.protocol.messages import Envelope
from rowcast.protocol.session import MAX_FRAME_BYTES, ROLES, Session, State
from rowcast.protocol.session import decode as decode_frame
from rowcast.protocol.session import encode as encode_frame
from rowcast.runtime.errors import MAX_PEER_SENTENCE, DataError, Mismatch, RemoteProtocolError, peer_failure
from tests.hostile.ends import End, every_end, remembered
from tests.hostile.mutate import Mutator, encode
from tests.support.repeats import count

NUM_FRAMES = count(40_000, 2_000_000)
FAMILY = 20  # one frame in 20 is not mutated, so that what is taken is tried too
LOOK_EVERY = 64  # frames between looks at a session that refused without having to look inside
RESIDENT_GROWTH_BYTES = 32 * 2**20  # over the whole run, once a tenth of it is behind
FRAME_GROWTH_BYTES = 256 * 2**10  # growth of the heap while one frame is decoded, with ...
GROWTH_A_BYTE = 64  # ... so much a byte of the frame
HANG_S = 60  # for one frame: only a hang takes as long

ENDS = every_end()
FRAMES = sorted({frame for end in ENDS for frame in end.frames})


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Listener:
    """Gives frames to the decoder and to one end after the other, and looks at what became of them."""

    def __init__(self, chance: Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self._chance = chance
        self._mutator = Mutator(chance, FRAMES)
        self._sessions = [end.copy() for end in ENDS]

    def hear_one(self, place: int) -> None:
        index = place % len(ENDS)
        end = ENDS[index]
        frame = end.frames[0] if self._chance.random() < 0.3 else self._chance.choice(end.frames)
        if place % FAMILY:
            frame = self._mutator.mutated(frame)
        self._hear(frame, end, index, place)

    def _hear(self, frame: bytes, end: End, index: int, place: int) -> None:
        envelope = decoded(frame)
        session = self._sessions[index]
        try:
            message = session.decode(frame)
        except (RemoteProtocolError, Mismatch):
            self.outcomes["refused frames" if envelope is None else "refused messages"] += 1
            if envelope is not None or place % LOOK_EVERY == 0:
                assert remembered(session) == end.remembered, (
                    f"a session of the {end.role} in '{end.session.state}' changed: {frame!r}"
                )
        else:
            assert envelope is not None, "what the decoder refuses, a session takes"
            assert message == envelope.message
            self.outcomes["taken"] += 1
            self._sessions[index] = end.copy()


def decoded(frame: bytes) -> Envelope | None:
    """None where the frame is refused as it should be. What is taken must be fit to be sent."""
    try:
        envelope = decode_frame(frame)
    except RemoteProtocolError:
        return None
    encode_frame(envelope)
    return envelope


def test_every_state_is_there_at_both_ends() -> None:
    assert {(end.session.state, end.role) for end in ENDS} == {(state, role) for state in State for role in ROLES}


@pytest.mark.timeout(count(300, 2400))
def test_mutated_frames_are_taken_whole_or_refused_and_leave_nothing_behind() -> None:
    listener = Listener(Random(5))
    early = 0
    for place in range(NUM_FRAMES):
        listener.hear_one(place)
        if place == NUM_FRAMES // 10:
            early = resident_bytes()
    grown = resident_bytes() - early
    assert grown < RESIDENT_GROWTH_BYTES, f"{grown} bytes more are resident after {NUM_FRAMES} frames"
    assert min(listener.outcomes[name] for name in ("refused frames", "refused messages", "taken")) > NUM_FRAMES // 50


def test_the_memory_of_one_frame_is_bounded_by_its_length() -> None:
    chance = Random(6)
    mutator = Mutator(chance, FRAMES)
    tracemalloc.start()
    try:
        for _ in range(3000):
            frame = mutator.mutated(chance.choice(FRAMES))
            grown = peak_bytes(Session("prefetcher", 3), frame)
            assert grown < FRAME_GROWTH_BYTES + GROWTH_A_BYTE * len(frame), (
                f"{grown} bytes for a frame of {len(frame)}: {frame[:100]!r}"
            )
    finally:
        tracemalloc.stop()


def peak_bytes(session: Session, frame: bytes) -> int:
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    with suppress(RemoteProtocolError, Mismatch):
        session.decode(frame)
    return tracemalloc.get_traced_memory()[1] - before


@contextmanager
def hang_guard() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"one frame took more than {HANG_S} s")

    previous = signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


SPEC = {"name": "a", "dtype": "u1", "shape": [2**61] * 400_000, "offset": 0}
PLAN = {
    "kind": "train",
    "train_step": 0,
    "epoch": 0,
    "batch_size": 1,
    "groups": [],
    "arrays": [SPEC],
    "arrays_bytes": 1,
}
READY = {"type": "PlanReady", "plan": 0, "piece": 0, "num_pieces": 1, "payload": None, "arrays": None, "rows": []}
ROW = {"group": 0, "start": 0, "count": 1, "offset": 0}
HUGE: dict[str, bytes] = {
    "a shape of 400,000 dimensions": encode([3, 0, {**READY, "steps": [PLAN]}]),
    "70,000 spans of rows": encode([3, 0, {**READY, "steps": [], "rows": [ROW] * 70_000}]),
    "4 million nils": encode([3, 0, [None] * 4_000_000]),
    "a million groups": encode([3, 0, {**READY, "steps": [{**PLAN, "arrays": [], "groups": [0] * 1_000_000}]}]),
    "4 million wide characters": encode([3, 0, {"type": "StopRequest", "reason": "é" * 2_000_000}]),
    "2 million levels": b"\x93\x03\x00" + b"\x91" * 2_000_000,
    "2 million levels of maps": b"\x93\x03\x00" + b"\x81\xa1a" * 1_300_000,
    "a greeting with a million fields": encode([3, 0, {"type": "Hello", **{str(i): 0 for i in range(300_000)}}]),
    "too long by one byte": b"\x93" + b"\x00" * MAX_FRAME_BYTES,
}


@pytest.mark.parametrize("name", HUGE)
def test_the_largest_frames_are_refused_without_a_hang(name: str) -> None:
    frame = HUGE[name]
    assert name == "too long by one byte" or len(frame) <= MAX_FRAME_BYTES
    for end in ENDS[::9]:
        session = end.copy()
        with hang_guard(), pytest.raises((RemoteProtocolError, Mismatch)) as refused:
            session.decode(frame)
        assert len(str(refused.value)) < 2000
        assert remembered(session) == end.remembered


def test_the_sentence_of_a_failure_is_fit_to_be_shown() -> None:
    error = peer_failure(4, "rows\x1b[2J\nlost\u202e" + "x" * 4_000_000)
    assert isinstance(error, DataError)
    assert str(error).startswith("rows [2J lost x")
    assert str(error).isprintable()
    assert len(str(error)) == MAX_PEER_SENTENCE
