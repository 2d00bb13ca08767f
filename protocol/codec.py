"""Encodes envelopes as frames, and decodes and checks them: `decode` passes only possible numbers and offsets.

`session.py` checks the order of a conversation (which message may follow, which piece is next); `ring.py` checks that a
piece's bytes are in the ring.
"""

from functools import cache
from typing import Any

import msgspec

from rowcast.protocol.messages import Envelope
from rowcast.runtime.errors import LocalProtocolError, RemoteProtocolError

MAX_FRAME_BYTES = 4 * 2**20
NUMBER_BITS = 62  # two of them can be added in int64
ITEM_LIMIT = 4096  # entries in a header's list of groups, arrays or spans of rows
TEXT_LIMIT = 4096  # characters
SENTENCE_LIMIT = 1000  # characters of an error about a frame, because it may quote the frame

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """Raises LocalProtocolError for an envelope that `decode` would refuse."""
    try:
        check_message(envelope)
        frame = _encoder.encode(envelope)
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
        check_message(envelope)
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


def check_message(envelope: Envelope) -> None:
    """Raises ValueError with a sentence for a number or an offset that is never possible."""
    _check_fields(envelope)
    envelope.message.check()


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Returns the fields to check: `peer_failure` cleans a Failure's sentence."""
    return tuple(name for name in kind.__struct_fields__ if name != "sentence")


def _check_fields(owner: msgspec.Struct) -> None:
    for name in _fields(type(owner)):
        _check_value(owner, name, getattr(owner, name))


def _check_value(owner: msgspec.Struct, name: str, value: Any) -> None:
    """`value` is the field's value or an entry of it; errors about a struct inside it name that struct."""
    if isinstance(value, int | float):
        bits = 64 if name == "checksum" else NUMBER_BITS
        if not 0 <= value < 2**bits:
            raise ValueError(f"{type(owner).__name__}.{name} = {value} must be from 0 to 2^{bits}")
    elif isinstance(value, str):
        if len(value) > TEXT_LIMIT or not value.isprintable():
            raise ValueError(f"{type(owner).__name__}.{name} must be printable text of up to {TEXT_LIMIT} characters")
    elif isinstance(value, tuple):
        if len(value) > ITEM_LIMIT:
            raise ValueError(f"{type(owner).__name__}.{name} has {len(value)} entries; it may have up to {ITEM_LIMIT}")
        for item in value:
            _check_value(owner, name, item)
    elif isinstance(value, msgspec.Struct):
        _check_fields(value)
