"""The conversation: what the table allows goes through, and everything else is refused by name."""

import itertools

import msgspec
import pytest

from rowcast.protocol.attempts import check_hello, check_welcome
from rowcast.protocol.messages import PROTOCOL_VERSION, AnyMessage, Bye, Envelope, Failure, Released
from rowcast.protocol.session import (
    PREFETCHER,
    ROLES,
    TABLE,
    TRAINER,
    Session,
    State,
    encode,
)
from rowcast.runtime.errors import LocalProtocolError, Mismatch, ProtocolError, RemoteProtocolError
from rowcast.runtime.run_directory import Role
from tests.support import sample_messages
from tests.support.conversations import EVERY_MESSAGE, WHOLE_RUN, greeting, make_pair, other, say
from tests.support.facts import facts
from tests.support.sample_messages import (
    barrier_rows,
    end_of_data,
    flush,
    plan_done,
    plan_ready,
    rows_back,
    saved,
)

BY_EVENT: dict[str, AnyMessage] = {message.kind: message for message in EVERY_MESSAGE}
EVENTS = {event for following in TABLE.values() for event in following}
FREE = {"Heartbeat", "StopRequest", "Failure", "Released"}  # follow no order
ALL_CASES = list(itertools.product(State, ROLES, sorted(EVENTS)))
REFUSED_CASES = [(state, role, event) for state, role, event in ALL_CASES if event not in TABLE[state, role]]


def test_a_whole_run_passes_both_ends_from_greeting_to_good_bye() -> None:
    pair = make_pair()
    say(pair, *WHOLE_RUN)
    assert pair[TRAINER].state is State.CLOSED
    assert pair[TRAINER].incarnation == 3


def test_an_untrained_run_has_only_a_barrier() -> None:
    pair = make_pair()
    say(pair, *greeting(), (PREFETCHER, flush(0, None, checkpoint=True, num_dirty=(0, 0))))
    say(pair, (TRAINER, msgspec.structs.replace(barrier_rows(0, None), payload=None, rows=())), (TRAINER, saved(0)))
    say(pair, (PREFETCHER, end_of_data(None)), (PREFETCHER, Bye()), (TRAINER, Bye()))
    assert pair[PREFETCHER].state is State.CLOSED


def test_good_byes_may_cross() -> None:
    pair = make_pair()
    say(pair, *greeting(), (PREFETCHER, end_of_data(None)))
    frames = {role: pair[role].encode(Bye()) for role in ROLES}
    for role in ROLES:
        pair[other(role)].decode(frames[role])
        assert pair[other(role)].state is State.CLOSED


def test_reports_that_cross_a_flush_are_received_behind_it() -> None:
    pair = make_pair()
    say(pair, *greeting(), (PREFETCHER, plan_ready(1)))
    crossing = [pair[TRAINER].encode(message) for message in (Released(position=64), rows_back(1), plan_done(1))]
    announced = pair[PREFETCHER].encode(flush(0, 1))
    for frame in crossing:
        pair[PREFETCHER].decode(frame)
    pair[TRAINER].decode(announced)
    say(pair, (TRAINER, barrier_rows(0, 1)))
    assert pair[PREFETCHER].state is State.RUNNING


@pytest.mark.parametrize(("state", "role", "event"), REFUSED_CASES)
def test_what_is_not_in_the_table_is_refused_by_name_at_both_ends(state: State, role: Role, event: str) -> None:
    message = BY_EVENT[event]
    words = [f"the {role} may not send {event} in state '{state}', only"]
    pair = make_pair()
    pair[TRAINER].incarnation = 3
    pair[role].state = pair[other(role)].state = state
    with pytest.raises(LocalProtocolError) as sent:
        pair[role].encode(message)
    with pytest.raises(RemoteProtocolError) as received:
        pair[other(role)].decode(encode(Envelope(incarnation=3, sequence=0, message=message)))
    for error in (sent, received):
        assert all(word in str(error.value) for word in words)
    assert pair[role].state is pair[other(role)].state is state


@pytest.mark.parametrize(
    ("state", "role", "event"), [case for case in ALL_CASES if case not in REFUSED_CASES and case[2] in FREE]
)
def test_what_follows_no_order_passes_wherever_the_table_has_it(state: State, role: Role, event: str) -> None:
    pair = make_pair()
    pair[TRAINER].incarnation = 3
    pair[PREFETCHER].state = pair[TRAINER].state = state
    say(pair, (role, BY_EVENT[event]))
    assert pair[role].state is TABLE[state, role][event]


def test_a_failure_can_still_be_sent_after_the_peer_broke_the_protocol() -> None:
    pair = make_pair()
    say(pair, *greeting())
    with pytest.raises(RemoteProtocolError):
        pair[PREFETCHER].decode(b"garbage")
    say(pair, (PREFETCHER, Failure(code=1, sentence="the trainer sent garbage")))
    assert pair[TRAINER].state is State.CLOSED
    with pytest.raises(LocalProtocolError, match="state 'closed', only nothing"):
        pair[PREFETCHER].encode(sample_messages.heartbeat())


@pytest.mark.parametrize("skip", [0, 2])
def test_repeated_and_missing_frames_are_refused_with_both_numbers(skip: int) -> None:
    pair = make_pair()
    say(pair, *greeting())
    frames = [pair[PREFETCHER].encode(sample_messages.heartbeat()) for _ in range(3)]
    pair[TRAINER].decode(frames[0])
    with pytest.raises(RemoteProtocolError, match=facts("prefetcher", f"frame {skip + 1}", "frame 2")):
        pair[TRAINER].decode(frames[skip])


@pytest.mark.parametrize("incarnation", [2, 4])
def test_a_frame_of_another_incarnation_is_refused_by_both_ends(incarnation: int) -> None:
    pair = make_pair()
    say(pair, *greeting())
    for role in ROLES:
        frame = encode(Envelope(incarnation=incarnation, sequence=1, message=sample_messages.heartbeat()))
        with pytest.raises(RemoteProtocolError, match=f"incarnation {incarnation} came in incarnation 3"):
            pair[role].decode(frame)


def test_frames_without_incarnation_are_accepted_only_before_the_welcome() -> None:
    pair = make_pair()
    say(pair, greeting()[0])
    crossing = pair[TRAINER].encode(sample_messages.heartbeat())
    welcomed = pair[PREFETCHER].encode(sample_messages.welcome(3))
    pair[PREFETCHER].decode(crossing)
    pair[TRAINER].decode(welcomed)
    say(pair, (TRAINER, sample_messages.heartbeat()))
    with pytest.raises(RemoteProtocolError, match="incarnation 0 came in incarnation 3"):
        pair[PREFETCHER].decode(encode(Envelope(incarnation=0, sequence=3, message=sample_messages.heartbeat())))


def test_a_trainer_of_an_earlier_conversation_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="Hello came from incarnation 3"):
        Session(PREFETCHER, 3).decode(encode(Envelope(incarnation=3, sequence=0, message=sample_messages.hello())))


def test_a_welcome_names_the_incarnation_of_its_own_frame() -> None:
    pair = make_pair()
    say(pair, greeting()[0])
    with pytest.raises(LocalProtocolError, match=facts("Welcome", "incarnation 4", "incarnation 3")):
        pair[PREFETCHER].encode(sample_messages.welcome(4))
    with pytest.raises(RemoteProtocolError, match="incarnation 3 came in incarnation 4"):
        pair[TRAINER].decode(encode(Envelope(incarnation=3, sequence=0, message=sample_messages.welcome(4))))


@pytest.mark.parametrize(("role", "incarnation"), [(PREFETCHER, 0), (TRAINER, 1)])
def test_only_the_prefetcher_chooses_an_incarnation(role: Role, incarnation: int) -> None:
    with pytest.raises(ValueError, match=f"a {role} cannot begin in incarnation {incarnation}"):
        Session(role, incarnation)


def test_a_message_out_of_order_is_the_senders_fault_at_either_end() -> None:
    pair = make_pair()
    say(pair, *greeting())
    with pytest.raises(LocalProtocolError, match=facts("plan 5", "plan None")):
        pair[TRAINER].encode(plan_done(5))
    with pytest.raises(RemoteProtocolError, match=r"plan 5 .* plan None"):
        pair[PREFETCHER].decode(encode(Envelope(incarnation=3, sequence=1, message=plan_done(5))))
    assert issubclass(LocalProtocolError, ProtocolError)


class HelloOfTomorrow(msgspec.Struct, tag="Hello"):
    protocol_version: int
    something_new: int


def test_a_greeting_of_another_version_is_a_mismatch_even_where_it_cannot_be_read() -> None:
    frame = msgspec.msgpack.encode([0, 0, HelloOfTomorrow(protocol_version=99, something_new=1)])
    with pytest.raises(Mismatch, match=rf"\b99\b.*\b{PROTOCOL_VERSION}\b"):
        Session(PREFETCHER, 3).decode(frame)


def test_a_trainer_of_this_job_is_welcome_and_others_are_told_why_not() -> None:
    later = PROTOCOL_VERSION + 1
    check_hello(sample_messages.hello(), sample_messages.DIGEST)
    check_welcome(sample_messages.welcome())
    with pytest.raises(Mismatch, match=facts("trainer", f"version {later}", PROTOCOL_VERSION)):
        check_hello(sample_messages.hello(protocol_version=later), sample_messages.DIGEST)
    with pytest.raises(Mismatch, match=facts("job files", "e" * 32, "d" * 32)):
        check_hello(sample_messages.hello(job_digest="e" * 32), sample_messages.DIGEST)
    with pytest.raises(Mismatch, match=facts("prefetcher", "evaluate", "trainer", "train")):
        check_hello(sample_messages.hello(), sample_messages.DIGEST, "eval")
    with pytest.raises(Mismatch, match=facts("rank 0 of 2", 1)):
        check_hello(sample_messages.hello(world_size=2), sample_messages.DIGEST)
    with pytest.raises(Mismatch, match="rank 2 of 2"):
        check_hello(sample_messages.hello(world_size=2, rank=2), sample_messages.DIGEST, world_size=2)
    with pytest.raises(Mismatch, match=facts("prefetcher", f"version {later}", PROTOCOL_VERSION)):
        check_welcome(msgspec.structs.replace(sample_messages.welcome(), protocol_version=later))
