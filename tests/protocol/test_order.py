"""Steps, pieces, rows and barriers arrive exactly once and in order; a gap or a repeat is refused with both numbers."""

import msgspec
import pytest

from rowcast.protocol.messages import AnyMessage, ArraySpan
from rowcast.protocol.order import Order
from rowcast.runtime.errors import ProtocolError
from tests.support.facts import facts
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


def test_depth_steps_may_be_announced_beyond_the_oldest_that_is_not_done() -> None:
    followed = order(*(plan_ready(step, CLEAN) for step in range(5)), depth=4)
    with pytest.raises(ProtocolError, match=facts("plan 5", "plan 0", "depth 4")):
        followed.follow(plan_ready(5, CLEAN))


def test_victims_may_go_home_before_the_last_piece_of_their_own_plan_has_come() -> None:
    followed = order(
        FIRST, rows_back(1, last=False, count=2), SECOND, rows_back(1, piece=1, start=2, count=2), THIRD, plan_done(1)
    )
    assert not followed.open_plans
