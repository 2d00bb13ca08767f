"""Sessions in every state that a conversation can be in, what each could hear next, and all that one remembers."""

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from rowcast.protocol.messages import AnyMessage, Bye, Envelope, Welcome
from rowcast.protocol.session import PREFETCHER, TRAINER, Session, State
from rowcast.runtime.run_directory import Role
from tests.support import sample_messages
from tests.support.conversations import EVERY_MESSAGE, WHOLE_RUN, Said, greeting, make_pair, other, say

ENDS_EARLY: list[Said] = [
    *greeting(),
    (PREFETCHER, sample_messages.end_of_data(None)),
    (PREFETCHER, Bye()),
    (TRAINER, Bye()),
]
FAILS: list[Said] = [*greeting(), (TRAINER, EVERY_MESSAGE[-1])]


@dataclass(frozen=True, slots=True)
class End:
    """One end of a conversation at one moment."""

    session: Session
    role: Role
    remembered: tuple[Any, ...]
    # each of the messages, numbered as the one that it expects; first the one that it would hear next
    frames: tuple[bytes, ...]

    def copy(self) -> Session:
        return copy.deepcopy(self.session)


def every_end() -> list[End]:
    """Both ends after each message of three conversations."""
    return [end for said in (WHOLE_RUN, ENDS_EARLY, FAILS) for end in ends_of(said)]


def ends_of(said: list[Said]) -> Iterator[End]:
    pair = make_pair()
    for place in range(len(said) + 1):
        for role in (PREFETCHER, TRAINER):
            following = [message for sender, message in said[place : place + 1] if sender == other(role)]
            session = copy.deepcopy(pair[role])
            frames = tuple(numbered(session, message) for message in (*following, *EVERY_MESSAGE))
            yield End(session, role, remembered(session), frames)
        if place < len(said):
            say(pair, said[place])


def numbered(session: Session, message: AnyMessage) -> bytes:
    """The frame of a message as this end expects its next one; the message itself may be wrong."""
    values = vars(session)
    incarnation = session.incarnation if values["_peer_knows_incarnation"] and session.incarnation else 0
    incarnation = message.incarnation if isinstance(message, Welcome) else incarnation
    return msgspec.msgpack.encode(Envelope(incarnation=incarnation, sequence=values["_num_received"], message=message))


def remembered(value: Any) -> tuple[Any, ...]:
    """Everything that an object holds, as plain values in one order."""
    return tuple(leaves(value))


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | deque):
        yield len(value)
        for item in value:
            yield from leaves(item)
    elif dataclasses.is_dataclass(value):
        for own in dataclasses.fields(value):
            yield from leaves(getattr(value, own.name))
    elif value is None or isinstance(value, int | float | str | State):
        yield value
    else:
        for name, item in vars(value).items():
            yield name
            yield from leaves(item)
