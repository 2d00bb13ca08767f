"""Valid conversations pass, also with many open steps; a frame out of turn is refused, and the rest passes."""

import re

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowcast.protocol.messages import AnyMessage, Envelope, PlanReady, RowsBack, Welcome
from rowcast.protocol.session import PREFETCHER, ROLES, TABLE, TRAINER, Session, State
from rowcast.runtime.errors import RemoteProtocolError
from tests.hostile.ends import numbered, remembered
from tests.hostile.talk import Said, conversations
from tests.support import sample_messages
from tests.support.conversations import EVERY_MESSAGE, Pair, make_pair, say
from tests.support.repeats import count

NUM_WHOLE, NUM_OUT_OF_TURN = count(60, 1_000), count(90, 1_500)
WORDS_A_STEP = 80  # that a session remembers
WORDS = 150  # without steps; a barrier's included
pytestmark = pytest.mark.timeout(count(300, 1800))


def times(number: int) -> settings:
    return settings(max_examples=number, suppress_health_check=list(HealthCheck), database=None)


def depth_of(said: list[Said]) -> int:
    return next(message.depth for _, message in said if isinstance(message, Welcome))


@times(NUM_WHOLE)
@given(conversations())
def test_a_valid_conversation_passes_and_is_remembered_within_a_bound(said: list[Said]) -> None:
    pair, bound = make_pair(), WORDS + WORDS_A_STEP * (depth_of(said) + 1)
    for one in said:
        say(pair, one)
        for role in ROLES:
            assert len(remembered(pair[role])) <= bound
    assert pair[PREFETCHER].state is pair[TRAINER].state is State.CLOSED


def refuse(session: Session, frame: bytes, sentence: str) -> None:
    before = remembered(session)
    with pytest.raises(RemoteProtocolError, match=sentence):
        session.decode(frame)
    assert remembered(session) == before


@times(NUM_OUT_OF_TURN)
@given(conversations(), st.data())
def test_a_frame_out_of_turn_is_refused_by_name_and_the_conversation_continues(
    said: list[Said], data: st.DataObject
) -> None:
    place = data.draw(st.integers(2, len(said) - 1), label="place")
    pair = make_pair()
    say(pair, *said[:place])
    role, message = said[place]
    refuse_out_of_turn(pair, role == PREFETCHER, message, data)
    say(pair, *said[place:])


def refuse_out_of_turn(pair: Pair, from_prefetcher: bool, message: AnyMessage, data: st.DataObject) -> None:
    session = pair[TRAINER if from_prefetcher else PREFETCHER]
    incarnation, sequence, _ = msgspec.msgpack.decode(numbered(session, message))
    for wrong in (sequence + 1, sequence - 1, 2**61):
        if wrong >= 0:
            frame = msgspec.msgpack.encode(Envelope(incarnation=incarnation, sequence=wrong, message=message))
            refuse(session, frame, re.escape(f"frame {wrong} of the"))
    frame = msgspec.msgpack.encode(Envelope(incarnation=incarnation + 1, sequence=sequence, message=message))
    refuse(session, frame, f"incarnation {incarnation + 1}")
    sender = PREFETCHER if from_prefetcher else TRAINER
    forbidden = [own for own in EVERY_MESSAGE if own.kind not in TABLE[session.state, sender]]
    refuse(
        session,
        numbered(session, data.draw(st.sampled_from(forbidden), label="forbidden")),
        f"the {sender} may not send",
    )


@pytest.mark.parametrize("depth", [1, 64])
def test_a_trainer_sent_steps_without_end_remembers_no_more_than_depth_allows(depth: int) -> None:
    session = Session(TRAINER)
    session.encode(sample_messages.hello())
    session.decode(numbered(session, sample_messages.welcome(3, depth)))
    for step in range(1, depth + 2):
        session.decode(numbered(session, sample_messages.plan_ready(step)))
    size = len(remembered(session))
    assert size <= WORDS + WORDS_A_STEP * (depth + 1)
    for step in range(depth + 2, depth + 22):
        refuse(
            session,
            numbered(session, sample_messages.plan_ready(step)),
            f"before plan 1 was done, at depth {depth}|instead of",
        )
    assert len(remembered(session)) == size


def test_pieces_that_bring_nothing_are_refused_so_that_nobody_is_kept_busy_by_them() -> None:
    pair = make_pair()
    empty = RowsBack(plan=1, barrier=None, piece=0, last=False, payload=None, rows=())
    say(
        pair,
        (TRAINER, sample_messages.hello()),
        (PREFETCHER, sample_messages.welcome(3)),
        (PREFETCHER, sample_messages.plan_pieces(1)[0]),
    )
    refuse(pair[PREFETCHER], numbered(pair[PREFETCHER], empty), "piece 0 of rows came home without any")
    nothing = PlanReady(plan=1, piece=1, num_pieces=3, steps=(), payload=None, arrays=None, rows=())
    refuse(pair[TRAINER], numbered(pair[TRAINER], nothing), "piece 1 of 3 brings nothing")
