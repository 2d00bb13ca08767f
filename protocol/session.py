"""Defines the conversation as a table, without I/O: what each side may send in each state, and the next state.

Each process has one `Session` and passes every message that it sends or receives through it. The two ends may be in
different states while frames are in flight; the table allows for that.

`encode` and `decode` turn envelopes into frames and back, and check them: only possible numbers and offsets pass.
`order.py` checks which piece is next, and `ring.py` that a piece's bytes are in the ring.
"""

from enum import StrEnum

import msgspec

from rowcast.protocol.messages import PROTOCOL_VERSION, AnyMessage, Envelope, Hello, Welcome
from rowcast.protocol.order import Order
from rowcast.runtime.errors import LocalProtocolError, Mismatch, ProtocolError, RemoteProtocolError
from rowcast.runtime.run_directory import Role

PREFETCHER: Role = "prefetcher"
TRAINER: Role = "trainer"
ROLES: tuple[Role, Role] = (PREFETCHER, TRAINER)


class State(StrEnum):
    WAITING_HELLO = "waiting for Hello"
    WAITING_WELCOME = "waiting for Welcome"
    RUNNING = "running"
    BARRIER = "barrier: rows come home"
    CHECKPOINT = "barrier: rows come home, then the model state"
    SAVING = "barrier: the model state comes"
    ENDED = "ended"
    PREFETCHER_LEFT = "prefetcher has left"
    TRAINER_LEFT = "trainer has left"
    CLOSED = "closed"


S = State
WORK = ("RowsBack", "PlanDone", "Released")  # the trainer's reports on plans
OF_SCRIPTS = ("Ids", "Ask", "Returned", "Save")  # a training script's look-ups and rows

# state, sender, what it may send (`Message.kind`), the state that follows
ROWS: tuple[tuple[State, Role, tuple[str, ...], State], ...] = (
    (S.WAITING_HELLO, TRAINER, ("Hello",), S.WAITING_WELCOME),
    (S.WAITING_HELLO, TRAINER, ("Heartbeat", "StopRequest"), S.WAITING_HELLO),
    (S.WAITING_HELLO, PREFETCHER, ("Heartbeat",), S.WAITING_HELLO),
    (S.WAITING_HELLO, PREFETCHER, ("Bye",), S.CLOSED),  # stopped before a trainer connected
    (S.WAITING_WELCOME, TRAINER, ("Heartbeat", "StopRequest"), S.WAITING_WELCOME),
    (S.WAITING_WELCOME, PREFETCHER, ("Welcome",), S.RUNNING),
    (S.WAITING_WELCOME, PREFETCHER, ("Heartbeat",), S.WAITING_WELCOME),
    (S.WAITING_WELCOME, PREFETCHER, ("Bye",), S.CLOSED),
    (S.RUNNING, PREFETCHER, ("Restore", "PlanReady", "Answer", "Released", "Heartbeat", "StopRequest"), S.RUNNING),
    (S.RUNNING, PREFETCHER, ("Flush",), S.BARRIER),
    (S.RUNNING, PREFETCHER, ("Flush (checkpoint)",), S.CHECKPOINT),
    (S.RUNNING, PREFETCHER, ("EndOfData",), S.ENDED),
    (S.RUNNING, TRAINER, (*WORK, *OF_SCRIPTS, "Heartbeat", "StopRequest"), S.RUNNING),
    (S.BARRIER, PREFETCHER, ("Flush (later piece)", "Released", "Heartbeat", "StopRequest"), S.BARRIER),
    (S.BARRIER, TRAINER, (*WORK, "RowsBack (barrier)", "Heartbeat", "StopRequest"), S.BARRIER),
    (S.BARRIER, TRAINER, ("RowsBack (barrier, last)",), S.RUNNING),
    (S.CHECKPOINT, PREFETCHER, ("Flush (later piece)", "Released", "Heartbeat", "StopRequest"), S.CHECKPOINT),
    (S.CHECKPOINT, TRAINER, (*WORK, "RowsBack (barrier)", "Heartbeat", "StopRequest"), S.CHECKPOINT),
    (S.CHECKPOINT, TRAINER, ("RowsBack (barrier, last)",), S.SAVING),
    (S.SAVING, PREFETCHER, ("Released", "Heartbeat", "StopRequest"), S.SAVING),
    (S.SAVING, TRAINER, ("Saved", "Released", "Heartbeat", "StopRequest"), S.SAVING),
    (S.SAVING, TRAINER, ("Saved (last)", "Replica"), S.RUNNING),
    (S.ENDED, PREFETCHER, ("Released", "Heartbeat", "StopRequest"), S.ENDED),
    (S.ENDED, PREFETCHER, ("Bye",), S.PREFETCHER_LEFT),
    (S.ENDED, TRAINER, ("Released", "Heartbeat", "StopRequest"), S.ENDED),
    (S.ENDED, TRAINER, ("Bye",), S.TRAINER_LEFT),
    (S.PREFETCHER_LEFT, TRAINER, ("Released", "Heartbeat", "StopRequest"), S.PREFETCHER_LEFT),
    (S.PREFETCHER_LEFT, TRAINER, ("Bye",), S.CLOSED),
    (S.TRAINER_LEFT, PREFETCHER, ("Released", "Heartbeat", "StopRequest"), S.TRAINER_LEFT),
    (S.TRAINER_LEFT, PREFETCHER, ("Bye",), S.CLOSED),
    *(
        (state, role, ("Failure",), S.CLOSED)
        for state in S
        for role in ROLES
        if (state, role) not in ((S.PREFETCHER_LEFT, PREFETCHER), (S.TRAINER_LEFT, TRAINER)) and state is not S.CLOSED
    ),
)

TABLE: dict[tuple[State, Role], dict[str, State]] = {(state, role): {} for state in State for role in ROLES}
for _state, _role, _events, _next in ROWS:
    TABLE[_state, _role].update(dict.fromkeys(_events, _next))


class Session:
    """One end of a conversation. Not thread-safe: a message gets its sequence number and its turn on the link together.

    The prefetcher chooses the incarnation, at least 1. A trainer's frames carry 0 until the Welcome names it. After an
    error only a Failure may be sent."""

    def __init__(self, role: Role, incarnation: int = 0) -> None:
        if (role == PREFETCHER) != (incarnation > 0):
            raise ValueError(
                f"a {role} cannot begin in incarnation {incarnation}; "
                "the prefetcher chooses one above 0, a trainer has none"
            )
        self.role: Role = role
        self.state = State.WAITING_HELLO
        self.incarnation = incarnation
        self._peer: Role = TRAINER if role == PREFETCHER else PREFETCHER
        self._peer_knows_incarnation = role == TRAINER
        self._num_sent = 0
        self._num_received = 0
        self._order = Order()

    def encode(self, message: AnyMessage) -> bytes:
        """Returns the frame to send now. Raises LocalProtocolError if the conversation does not allow the message."""
        try:
            self.state, frame = self._sent(message)
        except ProtocolError as error:
            raise LocalProtocolError(str(error)) from error
        self._num_sent += 1
        return frame

    def decode(self, frame: bytes) -> AnyMessage:
        """Returns the message in a frame. Raises RemoteProtocolError if the conversation does not allow it.

        Raises Mismatch if the frame greets with another protocol version. A refused frame changes nothing here."""
        try:
            envelope = decode(frame)
        except RemoteProtocolError:
            check_version(greeted_version(frame), self._peer)
            raise
        try:
            self.state = self._received(envelope)
        except ProtocolError as error:
            raise RemoteProtocolError(str(error)) from error
        self._num_received += 1
        return envelope.message

    def _sent(self, message: AnyMessage) -> tuple[State, bytes]:
        state = next_state(self.state, self.role, message)
        frame = encode(Envelope(incarnation=self.incarnation, sequence=self._num_sent, message=message))
        if isinstance(message, Welcome) and message.incarnation != self.incarnation:
            raise ProtocolError(
                f"a Welcome to incarnation {message.incarnation} cannot be sent in incarnation {self.incarnation}"
            )
        self._order.follow(message)
        return state, frame

    def _received(self, envelope: Envelope) -> State:
        message = envelope.message
        if envelope.sequence != self._num_received:
            raise ProtocolError(
                f"frame {envelope.sequence} of the {self._peer} came instead of frame {self._num_received}"
            )
        state = next_state(self.state, self._peer, message)
        incarnation = message.incarnation if isinstance(message, Welcome) else self.incarnation
        self._check_incarnation(envelope.incarnation, incarnation, message)
        self._order.follow(message)
        self.incarnation = incarnation
        self._peer_knows_incarnation |= incarnation != 0 and envelope.incarnation == incarnation
        return state

    def _check_incarnation(self, incarnation: int, now: int, message: AnyMessage) -> None:
        if isinstance(message, Hello) and incarnation != 0:
            raise ProtocolError(f"a Hello came from incarnation {incarnation}; a trainer begins without one")
        if now not in (0, incarnation) and (self._peer_knows_incarnation or incarnation != 0):  # 0: before the Welcome
            raise ProtocolError(f"a frame of incarnation {incarnation} came in incarnation {now}")


def next_state(state: State, sender: Role, message: AnyMessage) -> State:
    """Raises ProtocolError if `sender` may not send the message in this state."""
    following = TABLE[state, sender].get(message.kind)
    if following is None:
        allowed = ", ".join(TABLE[state, sender]) or "nothing"
        raise ProtocolError(f"the {sender} may not send {message.kind} in state '{state}', only {allowed}")
    return following


def check_version(version: int | None, peer: Role) -> None:
    """Raises Mismatch if the peer greeted with another protocol version; None means that it did not greet."""
    if version is not None and version != PROTOCOL_VERSION:
        raise Mismatch(
            f"the {peer} speaks protocol version {version} and this process {PROTOCOL_VERSION}; install the same "
            "rowcast for both"
        )


MAX_FRAME_BYTES = 4 * 2**20


SENTENCE_LIMIT = 1000  # characters of an error about a frame, because it may quote the frame


_encoder = msgspec.msgpack.Encoder()


_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """Raises LocalProtocolError for an envelope that `decode` would refuse."""
    try:
        frame = _encoder.encode(envelope)
        _decoder.decode(frame)  # checks the range of each number
        envelope.message.check()
    except (ValueError, OverflowError) as error:
        raise LocalProtocolError(f"a {type(envelope.message).__name__} message cannot be sent: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise LocalProtocolError(
            f"a {type(envelope.message).__name__} of {len(frame)} bytes is too long for a frame of {MAX_FRAME_BYTES}"
        )
    return frame


def decode(frame: bytes) -> Envelope:
    """Raises RemoteProtocolError, and nothing else, for every frame that is not a well-formed envelope."""
    if len(frame) > MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a frame of {len(frame)} bytes arrived; it may have up to {MAX_FRAME_BYTES}")
    try:
        envelope = _decoder.decode(frame)
        envelope.message.check()
    except (ValueError, OverflowError, RecursionError) as error:
        raise RemoteProtocolError(
            f"a frame of {len(frame)} bytes is no message: {str(error)[:SENTENCE_LIMIT]}"
        ) from error
    return envelope


class _Greeting(msgspec.Struct):
    protocol_version: int


class _AnyEnvelope(msgspec.Struct, array_like=True):
    incarnation: int
    sequence: int
    message: _Greeting


def greeted_version(frame: bytes) -> int | None:
    """Returns the protocol version of a Hello or Welcome, even if this version cannot read its other fields; None
    otherwise."""
    try:
        return msgspec.msgpack.decode(frame, type=_AnyEnvelope).message.protocol_version
    except (ValueError, OverflowError, RecursionError):
        return None
