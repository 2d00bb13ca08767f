"""A second check of every limit of a frame, over plain values. Fields have the messages' names and types; their limits
and how they depend on each other are written here a second time: of `rowcast.protocol.codec` it takes one number only.
"""

import functools
import math
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from rowcast.protocol.messages import MAX_DIMENSIONS, AnyMessage
from rowcast.protocol.plan_layout import ITEM_BYTES

Plain = dict[str, Any]
MESSAGES: dict[str, type[msgspec.Struct]] = {message.__name__: message for message in get_args(AnyMessage)}


@functools.cache
def fields_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(struct)


def fits(value: Any, hint: Any, name: str = "") -> bool:
    """Whether a plain value is of a field's type, and within the limits of that type."""
    if hint is int:
        return type(value) is int and 0 <= value < 2 ** (64 if name == "checksum" else 62)
    if hint is float:
        return type(value) in (int, float) and 0 <= value < 2**62
    if hint is str:
        return isinstance(value, str) and (
            name == "sentence" or (len(value) <= 4096 and all(map(str.isprintable, value)))
        )
    if hint in (bool, bytes, type(None)):
        return isinstance(value, hint)
    arguments = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return any(fits(value, own, name) for own in arguments)
    if get_origin(hint) is Literal:
        return value in arguments
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or len(value) > 4096:
            return False
        if arguments[-1] is not ...:
            return len(value) == len(arguments) and all(map(fits, value, arguments))
        return all(fits(item, arguments[0]) for item in value)
    fields = fields_of(hint)
    return (
        isinstance(value, dict)
        and value.keys() == fields.keys()
        and all(fits(value[name], kind, name) for name, kind in fields.items())
    )


def within_limits(frame: bytes, envelope: list[Any]) -> bool:
    """Whether [incarnation, sequence, message], in plain values, may come out of a frame."""
    if len(frame) > 4 * 2**20 or len(envelope) != 3 or not all(fits(number, int) for number in envelope[:2]):
        return False
    message = {name: value for name, value in envelope[2].items() if name != "type"}
    kind = envelope[2].get("type")
    return kind in MESSAGES and fits(message, MESSAGES[kind]) and related(kind, message)


def related(kind: str, message: Plain) -> bool:
    """What the fields of one message say of each other."""
    pieces = "num_pieces" not in message or message["piece"] < message["num_pieces"] <= 2**20
    match kind:
        case "StepReady":
            plan = (message["plan"] is not None) == (message["piece"] == 0) and (
                message["plan"] is None or plan_fits(message)
            )
            own = (
                plan
                and message["step"] < 2**40
                and payload_fits(message["payload"], message["arrays"], message["rows"])
            )
            return pieces and own and (message["payload"] is not None or message["num_pieces"] == 1)
        case "RowsBack":
            belongs = message["step"] is not None or message["barrier"] is not None
            return belongs and message["piece"] < 2**20 and payload_fits(message["payload"], None, message["rows"])
        case "Flush":
            own = specs_fit(message["arrays"], message["arrays_bytes"]) and payload_fits(
                message["payload"], message["span"], []
            )
            return (
                pieces
                and own
                and message["barrier"] < 2**40
                and (message["payload"] is not None or message["num_pieces"] == 1)
            )
        case "Saved" | "Restore":
            span = message["span"]
            own = (
                0 < span["nbytes"] == message["payload"]["nbytes"]
                and span["offset"] + span["nbytes"] <= message["nbytes"] <= 2**36
            )
            return pieces and own and payload_fits(message["payload"], span, [])
        case "Hello":
            return bool(message["machine"]["threads"] <= 2**12)
        case "Welcome":
            own = (
                message["incarnation"] > 0
                and message["machine"]["threads"] <= 2**12
                and message["depth"] > 0
                and message["restore_bytes"] <= 2**36
            )
            return own and len(message["slots"]) > 0 and min(message["slots"]) > 0
        case "Failure":
            return bool(1 <= message["code"] <= 255)
        case _:
            return True


def plan_fits(message: Plain) -> bool:
    for group in message["plan"]["groups"]:
        counts = [group[name] for name in ("num_dirty", "num_evict", "num_fetch", "num_unique", "num_lookups")]
        after = group["fill_after"]
        if sum(group["sequence_lookups"]) > group["num_lookups"]:
            return False
        if (
            counts != sorted(counts)
            or (group["num_evict"] and after is None)
            or (after is not None and after >= message["step"])
        ):
            return False
    return specs_fit(message["plan"]["arrays"], message["plan"]["arrays_bytes"])


def specs_fit(specs: list[Plain], nbytes: int) -> bool:
    inside = all(
        len(spec["shape"]) <= MAX_DIMENSIONS
        and spec["offset"] % 64 == 0
        and spec["offset"] + math.prod(spec["shape"]) * ITEM_BYTES[spec["dtype"]] <= nbytes
        for spec in specs
    )
    return inside and len({spec["name"] for spec in specs}) == len(specs)


def payload_fits(ref: Plain | None, span: Plain | None, rows: list[Plain]) -> bool:
    if ref is None:
        return span is None and not rows
    end = span["nbytes"] if span else 0
    for own in rows:
        if own["count"] == 0 or own["offset"] % 64 or own["offset"] < end:
            return False
        end = own["offset"] + own["count"]
    padded = (ref["nbytes"] + 63) // 64 * 64
    return ref["position"] % 64 == 0 and ref["end"] >= ref["position"] + padded and bool(end <= ref["nbytes"])
