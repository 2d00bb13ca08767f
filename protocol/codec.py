"""Encodes envelopes as frames, and decodes and checks them: `decode` passes only possible numbers and offsets.

`session.py` checks the order of a conversation (which message may follow, which piece is next); `ring.py` checks that a
piece's bytes are in the ring.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec

from rowcast.protocol.messages import (
    ArraySpan,
    ArraySpec,
    DensePiece,
    Envelope,
    Failure,
    Flush,
    PlanHeader,
    Replica,
    Restore,
    RingRef,
    RowsBack,
    RowSpan,
    Saved,
    StepReady,
    Welcome,
)
from rowcast.protocol.plan_layout import ITEM_BYTES
from rowcast.runtime.errors import LocalProtocolError, RemoteProtocolError

MAX_FRAME_BYTES = 4 * 2**20
NUMBER_LIMIT = 2**62  # two of them can be added in int64
STEP_LIMIT = 2**40  # a piece's stamp in the ring is one int64: the number of its step or barrier,
PIECE_LIMIT = 2**20  # and its piece's
MODEL_STATE_LIMIT = 2**36  # bytes of the model state
ITEM_LIMIT = 4096  # entries in a header's list of groups, arrays or spans of rows
TEXT_LIMIT = 4096  # characters
MAX_DIMENSIONS = 8  # dimensions of an array
SENTENCE_LIMIT = 1000  # characters of an error about a frame, because it may quote the frame
ALIGNMENT = 64

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
    check = _CHECKS.get(type(envelope.message))
    if check is not None:
        check(envelope.message)


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Returns the fields to check: a checksum may be any 64 bits, and `peer_failure` cleans a Failure's sentence."""
    return tuple(name for name in kind.__struct_fields__ if name not in ("checksum", "sentence"))


def _check_fields(owner: msgspec.Struct) -> None:
    for name in _fields(type(owner)):
        _check_value(owner, name, getattr(owner, name))


def _check_value(owner: msgspec.Struct, name: str, value: Any) -> None:
    """`value` is the field's value or an entry of it; errors about a struct inside it name that struct."""
    if isinstance(value, int | float):
        if not 0 <= value < NUMBER_LIMIT:
            raise ValueError(f"{type(owner).__name__}.{name} = {value} must be from 0 to 2^62")
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


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _check_piece(piece: int, num_pieces: int) -> None:
    _require(piece < num_pieces, f"piece {piece} of {num_pieces} does not exist")
    _require(num_pieces <= PIECE_LIMIT, f"{num_pieces} pieces come; there may be up to {PIECE_LIMIT}")


def _check_step(step: int, name: str) -> None:
    _require(step < STEP_LIMIT, f"{name} {step} is beyond 2^40")


def _check_ref(ref: RingRef) -> None:
    size = -(-ref.nbytes // ALIGNMENT) * ALIGNMENT
    _require(ref.position % ALIGNMENT == 0, f"a payload at position {ref.position} is not aligned to {ALIGNMENT}")
    _require(
        ref.end >= ref.position + size, f"a payload of {ref.nbytes} bytes at {ref.position} does not end by {ref.end}"
    )
    if ref.checksum is not None:
        _check_checksum(ref.checksum)


def _check_specs(specs: Sequence[ArraySpec], arrays_bytes: int) -> None:
    for spec in specs:
        _require(len(spec.shape) <= MAX_DIMENSIONS, f"array {spec.name} has {len(spec.shape)} dimensions")
        nbytes = math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
        _require(spec.offset % ALIGNMENT == 0, f"array {spec.name} at {spec.offset} is not aligned to {ALIGNMENT}")
        _require(
            spec.offset + nbytes <= arrays_bytes,
            f"array {spec.name} of {nbytes} bytes at {spec.offset} does not fit a block of {arrays_bytes}",
        )
    _require(len({spec.name for spec in specs}) == len(specs), "two arrays of a block have one name")


def _check_payload(payload: RingRef | None, arrays: ArraySpan | None, rows: tuple[RowSpan, ...]) -> None:
    """Checks that array bytes come first, then spans of rows at rising offsets, all inside the payload."""
    if payload is None:
        _require(arrays is None and not rows, "arrays or rows are announced without a payload")
        return
    _check_ref(payload)
    end = 0 if arrays is None else arrays.nbytes
    for span in rows:
        _require(span.count > 0, f"a span of group {span.group} has no rows")
        _require(span.offset % ALIGNMENT == 0, f"rows at offset {span.offset} are not aligned to {ALIGNMENT}")
        _require(span.offset >= end, f"rows at offset {span.offset} overlap what ends at {end}")
        end = span.offset + span.count  # at least one byte per row; only the receiver knows a row's size
    _require(end <= payload.nbytes, f"arrays and rows end at {end}, beyond their payload of {payload.nbytes} bytes")


def _check_plan(plan: PlanHeader, step: int) -> None:
    shares = () if plan.share is None else plan.share.groups
    _require(
        plan.share is None or len(shares) == len(plan.groups),
        f"{len(shares)} of {len(plan.groups)} groups are shared by ranks",
    )
    for group, share in itertools.zip_longest(plan.groups, shares):
        num_rows = group.num_unique if share is None else share.num_own
        _require(
            group.num_unique <= group.num_lookups, f"{group.num_lookups} look-ups cannot touch {group.num_unique} rows"
        )
        own, most = sum(group.sequence_lookups), group.num_lookups
        _require(own <= most, f"{own} look-ups of sequences are among {most}")
        _require(group.num_fetch <= num_rows, f"{group.num_fetch} rows are fetched for a batch of {num_rows}")
        _require(group.num_evict <= group.num_fetch, f"{group.num_evict} victims make room for {group.num_fetch} rows")
        _require(group.num_dirty <= group.num_evict, f"{group.num_dirty} of {group.num_evict} victims are dirty")
        _require(
            group.num_evict == 0 or group.fill_after is not None, "victims are evicted without a step to fill after"
        )
        _require(
            group.fill_after is None or group.fill_after < step, f"step {step} is filled after step {group.fill_after}"
        )
    _check_specs(plan.arrays, plan.arrays_bytes)


def _check_step_ready(message: StepReady) -> None:
    _check_piece(message.piece, message.num_pieces)
    _check_step(message.step, "step")
    _require(
        message.payload is not None or message.num_pieces == 1,
        f"piece {message.piece} of {message.num_pieces} brings nothing",
    )
    _require(
        (message.plan is not None) == (message.piece == 0),
        f"piece {message.piece} must carry a plan if, and only if, it is piece 0",
    )
    if message.plan is not None:
        _check_plan(message.plan, message.step)
    _check_payload(message.payload, message.arrays, message.rows)


def _check_rows_back(message: RowsBack) -> None:
    _require(message.step is not None or message.barrier is not None, "rows come home for neither a step nor a barrier")
    _require(message.piece < PIECE_LIMIT, f"piece {message.piece} of rows is beyond 2^20")
    _check_payload(message.payload, None, message.rows)


def _check_flush(message: Flush) -> None:
    _check_piece(message.piece, message.num_pieces)
    _check_step(message.barrier, "barrier")
    _require(
        message.payload is not None or message.num_pieces == 1,
        f"piece {message.piece} of {message.num_pieces} brings nothing",
    )
    _check_specs(message.arrays, message.arrays_bytes)
    _check_payload(message.payload, message.span, ())


def _check_replica(message: Replica) -> None:
    _check_checksum(message.checksum)


def _check_checksum(checksum: int) -> None:
    _require(0 <= checksum < 2**64, f"checksum {checksum} does not fit 64 bits")


def _check_dense(message: DensePiece) -> None:
    _check_piece(message.piece, message.num_pieces)
    _check_checksum(message.checksum)
    _require(
        0 < message.nbytes <= MODEL_STATE_LIMIT,
        f"a model state has 1 to {MODEL_STATE_LIMIT} bytes, not {message.nbytes}",
    )
    _require(message.span.nbytes > 0, f"piece {message.piece} of {message.num_pieces} brings nothing")
    end = message.span.offset + message.span.nbytes
    _require(end <= message.nbytes, f"bytes up to {end} travel, but the model state has {message.nbytes}")
    _require(
        message.span.nbytes == message.payload.nbytes,
        f"{message.span.nbytes} bytes travel in a payload of {message.payload.nbytes}",
    )
    _check_payload(message.payload, message.span, ())


def _check_welcome(message: Welcome) -> None:
    _require(message.incarnation > 0, "incarnation 0 belongs to a trainer before its Welcome")
    _require(message.depth > 0, "depth must be at least 1")
    _require(
        message.restore_bytes <= MODEL_STATE_LIMIT,
        f"a model state has up to {MODEL_STATE_LIMIT} bytes, not {message.restore_bytes}",
    )
    _require(bool(message.slots) and all(message.slots), f"slots {message.slots} must be at least one for each group")


def _check_failure(message: Failure) -> None:
    _require(1 <= message.code <= 255, f"code {message.code} is not the exit code of a failure")


_CHECKS: dict[type[Any], Callable[[Any], None]] = {
    StepReady: _check_step_ready,
    RowsBack: _check_rows_back,
    Flush: _check_flush,
    Saved: _check_dense,
    Restore: _check_dense,
    Replica: _check_replica,
    Welcome: _check_welcome,
    Failure: _check_failure,
}
