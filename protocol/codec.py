"""Encodes envelopes as frames, and decodes and checks them: `decode` passes only possible numbers and offsets.

`session.py` checks the order of a conversation (which message may follow, which piece is next); `ring.py` checks that a
piece's bytes are in the ring.
"""

import msgspec

from rowcast.protocol.messages import Envelope
from rowcast.runtime.errors import LocalProtocolError, RemoteProtocolError

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
