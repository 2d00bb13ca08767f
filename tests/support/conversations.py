"""Both ends of a conversation, and all that they say in a whole run."""

import msgspec

from rowcast.protocol.messages import AnyMessage, Bye, Failure, Released, StopRequest
from rowcast.protocol.session import PREFETCHER, TRAINER, Session
from rowcast.runtime.run_directory import Role
from tests.support import sample_messages
from tests.support.sample_messages import (
    barrier_rows,
    end_of_data,
    flush,
    flush_pieces,
    plan_done,
    plan_pieces,
    plan_ready,
    restore_pieces,
    rows_back,
    saved,
    saved_pieces,
)

Said = tuple[Role, AnyMessage]
Pair = dict[Role, Session]


def make_pair(incarnation: int = 3) -> Pair:
    return {PREFETCHER: Session(PREFETCHER, incarnation), TRAINER: Session(TRAINER)}


def other(role: Role) -> Role:
    return TRAINER if role == PREFETCHER else PREFETCHER


def say(pair: Pair, *said: Said) -> None:
    """Each message goes from one end to the other, which then agree on the state."""
    for role, message in said:
        assert pair[other(role)].decode(pair[role].encode(message)) == message
        assert pair[PREFETCHER].state == pair[TRAINER].state


def greeting(incarnation: int = 3, depth: int = 1) -> tuple[Said, Said]:
    return (TRAINER, sample_messages.hello()), (PREFETCHER, sample_messages.welcome(incarnation, depth))


WHOLE_RUN: list[Said] = [
    (PREFETCHER, sample_messages.heartbeat()),
    (TRAINER, sample_messages.hello()),
    (PREFETCHER, sample_messages.welcome(3, 1, restore_bytes=100)),
    *((PREFETCHER, piece) for piece in restore_pieces()),
    (TRAINER, sample_messages.ids(0)),
    (TRAINER, sample_messages.ask(0)),
    (PREFETCHER, sample_messages.answer(0)),
    (TRAINER, sample_messages.returned(1)),
    (TRAINER, sample_messages.save(1)),
    (PREFETCHER, msgspec.structs.replace(plan_ready(7), returned=1)),
    (TRAINER, Released(position=64)),
    (TRAINER, rows_back(7, piece=0, last=False, count=1)),
    (PREFETCHER, plan_pieces(8)[0]),
    (TRAINER, rows_back(7, piece=1, start=1, count=3)),
    (TRAINER, plan_done(7)),
    (PREFETCHER, Released(position=64)),
    *((PREFETCHER, piece) for piece in plan_pieces(8)[1:]),
    (TRAINER, rows_back(8)),
    (PREFETCHER, plan_ready(9, num_dirty=(0, 0))),
    (PREFETCHER, flush(4, 9, checkpoint=True)),
    (TRAINER, plan_done(8)),
    (TRAINER, plan_done(9)),
    (TRAINER, barrier_rows(4, 9, last=False, whole=False)),
    (TRAINER, msgspec.structs.replace(barrier_rows(4, 9, piece=1), rows=(sample_messages.rows(1, 0, 1, 0),))),
    *((TRAINER, piece) for piece in saved_pieces(4)),
    (PREFETCHER, plan_ready(10, num_dirty=(0, 0))),
    (TRAINER, plan_done(10)),
    *((PREFETCHER, piece) for piece in flush_pieces(5, 10)),
    (TRAINER, StopRequest(reason="SIGTERM")),
    (TRAINER, barrier_rows(5, 10)),
    (PREFETCHER, flush(6, 10, checkpoint=True, num_dirty=(0, 0))),
    (TRAINER, msgspec.structs.replace(barrier_rows(6, 10), payload=None, rows=())),
    (TRAINER, sample_messages.heartbeat()),
    (TRAINER, saved(6)),
    (PREFETCHER, flush(7, 10, checkpoint=True, num_dirty=(0, 0))),
    (TRAINER, msgspec.structs.replace(barrier_rows(7, 10), payload=None, rows=())),
    (TRAINER, sample_messages.replica(7)),
    (PREFETCHER, end_of_data(10)),
    (TRAINER, Bye()),
    (PREFETCHER, Released(position=128)),
    (PREFETCHER, Bye()),
]
EVERY_MESSAGE: list[AnyMessage] = [
    *(message for _, message in WHOLE_RUN),
    flush(1, None, num_dirty=(0, 0)),
    end_of_data(None),
    StopRequest(reason="SIGTERM", next_step=7),
    StopRequest(reason="SIGTERM", after_step=70),
    Failure(code=3, sentence="the trainer was lost"),
]
