"""Frames: what is encoded comes back, and whatever else arrives is a RemoteProtocolError."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.protocol.codec import MAX_FRAME_BYTES, decode, encode, greeted_version
from rowcast.protocol.messages import (
    AnyMessage,
    ArraySpan,
    ArraySpec,
    Envelope,
    Failure,
    Released,
    StepHeader,
)
from rowcast.runtime.errors import LocalProtocolError, RemoteProtocolError
from tests.support import sample_messages
from tests.support.conversations import EVERY_MESSAGE

FRAMES = [encode(Envelope(incarnation=1, sequence=5, message=message)) for message in EVERY_MESSAGE]


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message: AnyMessage) -> None:
    envelope = Envelope(incarnation=3, sequence=2**40, message=message)
    assert decode(encode(envelope)) == envelope


def test_a_checksum_may_use_all_64_bits() -> None:
    message = msgspec.structs.replace(sample_messages.plan_ready(1), payload=sample_messages.ref(checksum=2**64 - 1))
    envelope = Envelope(incarnation=1, sequence=0, message=message)
    assert decode(encode(envelope)) == envelope


def refused(frame: bytes) -> bool:
    """Whether the frame is refused in the one way there is; what is taken must be fit to be sent."""
    try:
        envelope = decode(frame)
    except RemoteProtocolError:
        return True
    encode(envelope)
    return False


@settings(max_examples=1000)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_remote_protocol_errors(frame: bytes) -> None:
    assert refused(frame) or frame in FRAMES
    greeted_version(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc0",
        b"\x93\x01\x00" + b"\x91" * 100_000,  # nested without end
        FRAMES[0] + b"\x00",
        FRAMES[0][:-1],
        b"\x93\x01\x00\x81\xa4type\xdd\xff\xff\xff\xff",  # an array that claims 2**32 items
        b"\x93\x01\x00\x81\xa4type\xa4Evil",
        b"\x93\x01\x00\x82\xa4type\xa3Bye\xa5extra\x00",
        b"\x93\x01\x00\x82\xa4type\xa3Bye\xa2\xff\xfe\x00",  # not UTF-8
        b"\x00" * (MAX_FRAME_BYTES + 1),
    ],
)
def test_what_is_no_envelope_is_refused(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(frame)


def integer_paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the integers of a message's builtins are."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from integer_paths(item, (*path, key))


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("number", [-1, 2**62, 2**64 - 1])
def test_no_number_anywhere_may_be_negative_or_beyond_62_bits(message: AnyMessage, number: int) -> None:
    for path in integer_paths(plain := msgspec.msgpack.decode(FRAMES[EVERY_MESSAGE.index(message)])):
        if path[-1] == "checksum":
            continue
        changed = msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = number
        with pytest.raises(
            RemoteProtocolError, match=r"Expected `int` (>= 0|<= 4611686018427387903)|must be from 0 to 4096"
        ):
            decode(msgspec.msgpack.encode(changed))


def ready(**changes: Any) -> AnyMessage:
    return msgspec.structs.replace(sample_messages.plan_ready(3), **changes)


def ready_plan(**changes: Any) -> AnyMessage:
    return ready(steps=(msgspec.structs.replace(sample_messages.plan(3), **changes),))


def without_move(step: int, **changes: Any) -> StepHeader:
    """A later step of a plan."""
    group = msgspec.structs.replace(sample_messages.group(0, 0, step), fill_after=None)
    return msgspec.structs.replace(sample_messages.plan(step), groups=(group, group), **changes)


def ready_group(**changes: Any) -> AnyMessage:
    return ready_plan(
        groups=(msgspec.structs.replace(sample_messages.group(5, 4, 3), **changes), sample_messages.group(3, 0, 3))
    )


def spec(**changes: Any) -> AnyMessage:
    return ready_plan(arrays=(ArraySpec(**{"name": "a", "dtype": "i8", "shape": (4, 8), "offset": 0, **changes}),))


IMPOSSIBLE: list[tuple[AnyMessage, str]] = [
    (ready(piece=1, steps=()), "piece 1 of 1 does not exist"),
    (ready(num_pieces=0), "piece 0 of 0 does not exist"),
    (ready(steps=()), "piece 0 must carry steps"),
    (ready(piece=1, num_pieces=2), "piece 1 must carry steps if, and only if"),
    (ready(payload=None), "announced without a payload"),
    (ready(payload=msgspec.structs.replace(sample_messages.ref(), position=65)), "position 65 is not aligned"),
    (ready(payload=msgspec.structs.replace(sample_messages.ref(), end=1087)), "1024 bytes at 64 does not end by 1087"),
    (ready(payload=sample_messages.ref(checksum=-1)), "Expected `int` >= 0 - at `.*checksum`"),
    (ready(arrays=ArraySpan(offset=0, nbytes=2000), rows=()), "end at 2000, beyond their payload of 1024"),
    (ready(rows=(sample_messages.rows(0, 0, 0, 256),)), "a span of group 0 has no rows"),
    (ready(rows=(sample_messages.rows(0, 0, 5, 257),)), "offset 257 are not aligned"),
    (ready(rows=(sample_messages.rows(0, 0, 5, 192),)), "offset 192 overlap what ends at 256"),
    (
        ready(rows=(sample_messages.rows(0, 0, 5, 512), sample_messages.rows(1, 0, 3, 256))),
        "offset 256 overlap what ends at 517",
    ),
    (ready(rows=(sample_messages.rows(0, 0, 5, 1024),)), "end at 1029, beyond"),
    (spec(offset=8), "array a at 8 is not aligned"),
    (spec(offset=64), "array a of 256 bytes at 64 does not fit a block of 256"),
    (spec(shape=(2**40, 2**40)), "does not fit a block of 256"),
    (spec(shape=(1,) * 9), "array a has 9 dimensions"),
    (
        ready_plan(arrays=(ArraySpec(name="a", dtype="u1", shape=(), offset=0),) * 2),
        "two arrays of a block have one name",
    ),
    (ready_group(num_unique=21), "20 look-ups cannot touch 21 rows"),
    (ready_group(sequence_lookups=(8, 13)), "21 look-ups of sequences are among 20"),
    (ready_group(num_evict=6), "6 victims make room for 5 rows"),
    (ready_group(num_evict=3), "4 of 3 victims are dirty"),
    (ready_group(fill_after=None), "victims are evicted without a plan"),
    (ready_group(fill_after=3), "plan 3 is filled after plan 3"),
    (ready(steps=(sample_messages.plan(3), sample_messages.plan(4))), "step 4 of plan 3 fetches 5 rows"),
    (ready(steps=(sample_messages.plan(3), without_move(5))), r"\(5, 'train', 2\) .* instead of \(4, 'train', 2\)"),
    (ready(steps=(sample_messages.plan(3), without_move(4, kind="eval"))), r"\(4, 'eval', 2\) .* instead of"),
    (msgspec.structs.replace(sample_messages.rows_back(1), plan=None), "neither a plan nor a barrier"),
    (msgspec.structs.replace(sample_messages.rows_back(1), payload=None), "announced without a payload"),
    *(
        (msgspec.structs.replace(message, rows=bytes(15)), "15 bytes are no whole numbers of rows")
        for message in (sample_messages.ids(0), sample_messages.ask(0), sample_messages.returned(1))
    ),
    (msgspec.structs.replace(sample_messages.ids(0), step=2**40), "step 1099511627776 is beyond 2.40"),
    (msgspec.structs.replace(sample_messages.flush(0, 1), piece=1), "piece 1 of 1 does not exist"),
    (msgspec.structs.replace(sample_messages.flush(0, 1), payload=None), "announced without a payload"),
    (
        msgspec.structs.replace(sample_messages.flush(0, 1), arrays_bytes=64),
        "1.slots of 4 bytes at 64 does not fit a block of 64",
    ),
    (msgspec.structs.replace(sample_messages.welcome(), incarnation=0), "incarnation 0 belongs to a trainer"),
    (msgspec.structs.replace(sample_messages.welcome(), depth=0), "depth must be at least 1"),
    (msgspec.structs.replace(sample_messages.welcome(), slots=(100, 0)), "at least one for each group"),
    (msgspec.structs.replace(sample_messages.welcome(), slots=()), "at least one for each group"),
    (msgspec.structs.replace(sample_messages.welcome(), restore_bytes=2**36 + 1), "a model state has up to"),
    (msgspec.structs.replace(sample_messages.saved(0), nbytes=0), "a model state has 1 to"),
    (msgspec.structs.replace(sample_messages.saved(0), nbytes=999), "up to 1000 travel, but the model state has 999"),
    (
        msgspec.structs.replace(sample_messages.saved(0), payload=sample_messages.ref(1001)),
        "1000 bytes travel in a payload of 1001",
    ),
    (Failure(code=0, sentence="none"), "code 0 is not the exit code"),
]


@pytest.mark.parametrize(("message", "sentence"), IMPOSSIBLE, ids=[sentence for _, sentence in IMPOSSIBLE])
def test_an_impossible_message_is_refused_by_both_ends_with_what_is_wrong(message: AnyMessage, sentence: str) -> None:
    envelope = Envelope(incarnation=1, sequence=0, message=message)
    with pytest.raises(LocalProtocolError, match=f"{type(message).__name__} message cannot be sent: .*{sentence}"):
        encode(envelope)
    with pytest.raises(RemoteProtocolError, match=sentence):
        decode(msgspec.msgpack.encode(envelope))


def test_a_message_too_long_for_a_frame_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match=f"Failure of .* too long for a frame of {MAX_FRAME_BYTES}"):
        encode(Envelope(incarnation=1, sequence=0, message=Failure(code=1, sentence="x" * MAX_FRAME_BYTES)))


def test_a_number_beyond_64_bits_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="a Released message cannot be sent: "):
        encode(Envelope(incarnation=1, sequence=0, message=Released(position=2**70)))


def unlimited(kind: msgspec.inspect.Type, path: str, seen: set[type]) -> Iterator[str]:
    """The numbers and texts of a type that may be of any size."""
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType) and kind.ge != 0:
        yield path
    if isinstance(kind, msgspec.inspect.StrType) and (kind.max_length is None or kind.pattern is None):
        yield path
    if isinstance(kind, msgspec.inspect.StructType) and kind.cls not in seen:
        seen.add(kind.cls)
        for field in kind.fields:
            yield from unlimited(field.type, f"{kind.cls.__name__}.{field.name}", seen)
    for own in getattr(kind, "types", getattr(kind, "item_types", ())):
        yield from unlimited(own, path, seen)
    if hasattr(kind, "item_type"):
        yield from unlimited(kind.item_type, path, seen)


def test_every_number_and_text_of_a_message_has_limits_but_a_sentence_that_is_cleaned() -> None:
    assert [*unlimited(msgspec.inspect.type_info(Envelope), "Envelope", set())] == ["Failure.sentence"]
