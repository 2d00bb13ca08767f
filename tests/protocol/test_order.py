"""Frames and their order: what is encoded comes back, whatever else arrives is refused, and nothing is out of order."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.protocol.messages import AnyMessage, Envelope, Failure, Released
from rowcast.protocol.order import Order
from rowcast.protocol.plan_layout import ArraySpan, ArraySpec, StepHeader
from rowcast.protocol.session import MAX_FRAME_BYTES, decode, encode, greeted_version
from rowcast.runtime.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from tests.support import sample_messages
from tests.support.conversations import EVERY_MESSAGE
from tests.support.sample_messages import (
    barrier_rows,
    end_of_data,
    flush,
    flush_pieces,
    plan,
    plan_done,
    plan_pieces,
    plan_ready,
    replica,
    restore_pieces,
    rows,
    rows_back,
    saved,
    saved_pieces,
    welcome,
)


def order(*messages: AnyMessage, depth: int = 1) -> Order:
    """An order that has followed these."""
    followed = Order()
    for message in (welcome(depth=depth), *messages):
        followed.follow(message)
    return followed


def change(message: AnyMessage, **changes: object) -> AnyMessage:
    return msgspec.structs.replace(message, **changes)


CLEAN = (0, 0)
FIRST, SECOND, THIRD = plan_pieces(1)
SLOTS, MORE_SLOTS = flush_pieces(0, None)

RESTORE = restore_pieces()
PAST = ArraySpan(offset=961, nbytes=40)
REFUSED: list[tuple[str, list[AnyMessage], AnyMessage]] = [
    ("plan 2 came instead of plan 1", [plan_ready(0), rows_back(0), plan_done(0)], plan_ready(2)),
    ("plan 0 came instead of plan 1", [plan_ready(0)], plan_ready(0)),
    ("step 2 came instead of step 1", [plan_ready(0)], change(plan_ready(1), steps=plan_ready(2).steps)),
    ("plan 2 came before plan 0 was done, at depth 1", [plan_ready(0), plan_ready(1)], plan_ready(2)),
    ("plan 2 came before the last piece of plan 1", [FIRST, SECOND], plan_ready(2)),
    ("a piece of plan 1 came while plan None is the newest", [], SECOND),
    ("a piece of plan 2 came while plan 1 is the newest", [FIRST], change(SECOND, plan=2)),
    ("piece 2 of 3 came instead of piece 1 of 3", [FIRST], THIRD),
    ("piece 1 of 3 came instead of piece 2 of 3", [FIRST, SECOND], SECOND),
    ("piece 1 of 4 came instead of piece 1 of 3", [FIRST], change(SECOND, num_pieces=4)),
    ("arrays continue at byte 64 instead of 128", [FIRST], change(SECOND, arrays=ArraySpan(offset=64, nbytes=128))),
    ("byte 257 of a block of 256 travels", [FIRST], change(SECOND, arrays=ArraySpan(offset=128, nbytes=129))),
    ("rows came after 128 of 256 array bytes", [FIRST], change(SECOND, arrays=None)),
    (
        "the pieces ended after 128 of 256 array bytes",
        [],
        change(plan_ready(0), arrays=ArraySpan(offset=0, nbytes=128), rows=()),
    ),
    ("rows of group 0 continue at 4 instead of 3", [FIRST, SECOND], change(THIRD, rows=(rows(0, 4, 1, 0),))),
    ("row 6 of group 0 travels, but there are 5", [FIRST, SECOND], change(THIRD, rows=(rows(0, 3, 3, 0),))),
    ("rows of group 2 travel, but there are 2 groups", [FIRST], change(SECOND, rows=(rows(2, 0, 1, 128),))),
    (
        r"the pieces ended after \(5, 0\) of \(5, 3\) rows in the groups",
        [FIRST, SECOND],
        change(THIRD, rows=(rows(0, 3, 2, 0),)),
    ),
    ("rows of plan 0 came home while no plan has dirty victims", [plan_ready(0, CLEAN)], rows_back(0)),
    ("rows of plan 0 came home while no plan has dirty victims", [plan_ready(0), rows_back(0)], rows_back(0)),
    ("rows of plan 1 came home before those of plan 0", [plan_ready(0), plan_ready(1)], rows_back(1)),
    ("rows of plan 5 came home before those of plan 0", [plan_ready(0)], rows_back(5)),
    ("piece 1 of rows came home instead of piece 0", [plan_ready(0)], rows_back(0, piece=1)),
    ("rows of group 0 continue at 1 instead of 0", [plan_ready(0)], rows_back(0, start=1, count=3)),
    ("row 5 of group 0 travels, but there are 4", [plan_ready(0)], rows_back(0, count=5)),
    (r"the last rows came home after \(3, 0\) of \(4, 0\)", [plan_ready(0)], rows_back(0, count=3)),
    ("plan 1 is reported done while plan 0 is next", [plan_ready(0), rows_back(0), plan_ready(1)], plan_done(1)),
    ("plan 0 is reported done while plan None is next", [plan_ready(0), rows_back(0), plan_done(0)], plan_done(0)),
    ("plan 1 is reported done before its last piece came", [FIRST, rows_back(1)], plan_done(1)),
    ("plan 0 is reported done before its victims came home", [plan_ready(0)], plan_done(0)),
    ("plan 0 is reported done before its victims", [plan_ready(0), rows_back(0, last=False)], plan_done(0)),
    ("barrier 0 came before the last piece of plan 1", [FIRST], flush(0, 1)),
    ("barrier 0 follows plan 0 instead of plan 1", [plan_ready(0), plan_ready(1)], flush(0, 0)),
    ("barrier 0 follows plan None instead of plan 0", [plan_ready(0)], flush(0, None)),
    ("barrier 2 came instead of 1", [flush(0, None), barrier_rows(0, None)], flush(2, None)),
    ("a piece of barrier 0 came while barrier None is the newest", [], MORE_SLOTS),
    ("a piece of barrier 1 came while barrier 0 is the newest", [SLOTS], change(MORE_SLOTS, barrier=1)),
    ("piece 1 of 2 came instead of piece 2 of 2", [SLOTS, MORE_SLOTS], MORE_SLOTS),
    ("arrays continue at byte 0 instead of 64", [SLOTS], change(MORE_SLOTS, span=SLOTS.span)),
    ("rows of barrier 1 after plan None came home, not those of 0", [flush(0, None)], barrier_rows(1, None)),
    ("rows of barrier 0 after plan 3 came home, not those of 0 after None", [flush(0, None)], barrier_rows(0, 3)),
    ("barrier 0 ended before its slots had come", [SLOTS], barrier_rows(0, None)),
    ("barrier 0 ended before every plan was done", [plan_ready(0, CLEAN), flush(0, 0)], barrier_rows(0, 0)),
    (r"the last rows came home after \(2, 0\) of \(2, 1\)", [flush(0, None)], barrier_rows(0, None, whole=False)),
    ("model state of barrier 1 came while barrier 0 is open", [flush(0, None)], saved(1)),
    ("piece 1 of 2 came instead of piece 0 of 2", [flush(0, None)], saved_pieces(0)[1]),
    ("model state of barrier 1 came while barrier 0 is open", [flush(0, None)], replica(1)),
    ("only a checksum of the model state of barrier 0", [flush(0, None), saved_pieces(0)[0]], replica(0)),
    (
        "bytes and checksum .* came after one of",
        [flush(0, None), saved_pieces(0)[0]],
        change(saved_pieces(0)[1], checksum=9),
    ),
    (
        "arrays continue at byte 961 instead of 960",
        [flush(0, None), saved_pieces(0)[0]],
        change(saved_pieces(0)[1], span=PAST),
    ),
    ("a model state of 100 bytes came, but 0 were announced", [welcome()], RESTORE[0]),
    ("a model state of 100 bytes came, but 99 were announced", [welcome(restore_bytes=99)], RESTORE[0]),
    ("a model state to start from came after the first step or barrier", [plan_ready(0)], RESTORE[0]),
    ("a model state to start from came after the first step or barrier", [flush(0, None)], RESTORE[0]),
    ("piece 1 of 2 came instead of piece 0 of 2", [welcome(restore_bytes=100)], RESTORE[1]),
    ("plan 0 came before the model state of 100 bytes", [welcome(restore_bytes=100), RESTORE[0]], plan_ready(0)),
    ("barrier 0 came before the model state of 100 bytes", [welcome(restore_bytes=100)], flush(0, None)),
    ("the end of data came before the model state of 100 bytes", [welcome(restore_bytes=100)], end_of_data(None)),
    ("the end of data came before the last piece of plan 1", [FIRST], end_of_data(1)),
    ("the end of data came before every plan was done", [plan_ready(0)], end_of_data(0)),
    ("the end of data follows plan 1 instead of plan 0", [plan_ready(0, CLEAN), plan_done(0)], end_of_data(1)),
]


@pytest.mark.parametrize(("sentence", "before", "message"), REFUSED, ids=[sentence for sentence, _, _ in REFUSED])
def test_what_is_out_of_order_is_refused_with_both_numbers(
    sentence: str, before: list[AnyMessage], message: AnyMessage
) -> None:
    followed = order(*before)
    with pytest.raises(ProtocolError, match=sentence):
        followed.follow(message)


def test_the_first_step_and_the_first_barrier_may_have_any_number() -> None:
    followed = order(plan_ready(1000, CLEAN), plan_done(1000), flush(7, 1000), barrier_rows(7, 1000))
    followed.follow(plan_ready(1001))
    assert followed.next_step == 1002
    assert followed.next_barrier == 8


def test_plans_count_by_one_and_steps_by_those_of_each_plan() -> None:
    steps = tuple(plan(step) for step in (7, 8, 9))
    followed = order(change(plan_ready(7), steps=steps), change(plan_ready(8), steps=(plan(10),)))
    assert (followed.next_plan, followed.next_step) == (9, 11)


def test_a_barrier_before_the_first_step_follows_a_step_of_an_earlier_conversation() -> None:
    followed = order(flush(3, 99), barrier_rows(3, 99), end_of_data(99))
    assert followed.next_step is None


def test_victims_may_go_home_before_the_last_piece_of_their_own_plan_has_come() -> None:
    followed = order(
        FIRST, rows_back(1, last=False, count=2), SECOND, rows_back(1, piece=1, start=2, count=2), THIRD, plan_done(1)
    )
    assert not followed.open_plans


FRAMES = [encode(Envelope(incarnation=1, sequence=5, message=message)) for message in EVERY_MESSAGE]


LARGEST = msgspec.structs.replace(sample_messages.plan_ready(1), payload=sample_messages.ref(checksum=2**64 - 1))


@pytest.mark.parametrize("message", [*EVERY_MESSAGE, LARGEST], ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message: AnyMessage) -> None:
    envelope = Envelope(incarnation=3, sequence=2**40, message=message)
    assert decode(encode(envelope)) == envelope


def refused(frame: bytes) -> bool:
    """Whether the frame is refused in the one way there is; what is taken must be fit to be sent."""
    try:
        envelope = decode(frame)
    except RemoteProtocolError:
        return True
    encode(envelope)
    return False


@settings(max_examples=200)
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
