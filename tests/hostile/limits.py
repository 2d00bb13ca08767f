"""A second check of every limit of a frame, over plain values: it knows the messages from this table alone and shares no code with
`rowcast.protocol.codec`; only the dtypes are those of the plan's arrays.

A field's kind: "n" number, "n?" or None, "f" seconds, "t" text, "s" a sentence, "y" bytes, "b" bool, "c" checksum, "[x]" a list of x,
a name in capitals one of the structs here, and words are the choices.
"""

import math
from typing import Any

from rowcast.protocol.plan_layout import ITEM_BYTES

Plain = dict[str, Any]
PIECE = {"piece": "n", "num_pieces": "n"}
DENSE = {**PIECE, "nbytes": "n", "checksum": "c", "payload": "REF", "span": "SPAN"}
STRUCTS: dict[str, dict[str, str]] = {
    "REF": {"position": "n", "nbytes": "n", "end": "n", "checksum": "c?"},
    "SPEC": {"name": "t", "dtype": " ".join(ITEM_BYTES), "shape": "[n]", "offset": "n"},
    "GROUP": {
        **{"num_lookups": "n", "num_unique": "n", "num_fetch": "n", "num_evict": "n"},
        **{"num_dirty": "n", "fill_after": "n?", "sequence_lookups": "[n]"},
    },
    "PLAN": {
        **{
            "kind": "train eval",
            "train_step": "n",
            "epoch": "n",
            "batch_size": "n",
            "groups": "[GROUP]",
            "arrays": "[SPEC]",
        },
        **{"arrays_bytes": "n", "num_checksums": "n"},
    },
    "ROWS": {"group": "n", "start": "n", "count": "n", "offset": "n"},
    "SPAN": {"offset": "n", "nbytes": "n"},
    "RING": {"path": "t", "nbytes": "n"},
    "POSITION": {"step": "n", "train_step": "n", "epoch": "n", "train_batch": "n", "eval_batch": "n?"},
    "StepReady": {"step": "n", **PIECE, "plan": "PLAN?", "payload": "REF?", "arrays": "SPAN?", "rows": "[ROWS]"},
    "RowsBack": {"step": "n?", "barrier": "n?", "piece": "n", "last": "b", "payload": "REF?", "rows": "[ROWS]"},
    "RowChecksums": {"step": "n?", "barrier": "n?", "start": "n", "checksums": "y"},
    "StepDone": {"step": "n", "rank": "n", "waited_s": "f", "step_s": "f"},
    "Released": {"position": "n"},
    "Hello": {
        **{
            "protocol_version": "n",
            "job_digest": "t",
            "rank": "n",
            "world_size": "n",
            "pid": "n",
            "threads": "n",
            "device": "t",
        },
        "mode": "train eval",
    },
    "Welcome": {
        **{
            "protocol_version": "n",
            "run_id": "t",
            "incarnation": "n",
            "pid": "n",
            "slots": "[n]",
            "num_dense": "n",
            "depth": "n",
        },
        **{
            "fetch_ring": "RING",
            "back_ring": "RING",
            "staging_bytes": "n",
            "train_steps": "n?",
            "first_train_step": "n",
        },
        **{"restore_bytes": "n", "verify": "f", "start": "POSITION", "fresh": "b", "replaces": "t"},
        **{"epoch_batches": "[n?]", "pairing": "t"},
    },
    "Flush": {
        **{"barrier": "n", "after_step": "n?", "num_dirty": "[n]", **PIECE, "arrays": "[SPEC]", "arrays_bytes": "n"},
        **{"payload": "REF?", "span": "SPAN?", "checkpoint": "b", "reason": "t", "num_checksums": "n"},
    },
    "Saved": {**DENSE, "barrier": "n"},
    "Restore": DENSE,
    "EndOfData": {"last_step": "n?", "finished": "b", "host_bytes": "n"},
    "StopRequest": {"reason": "t", "next_step": "n?"},
    "Heartbeat": {"step_begun": "n?", "step_done": "n?", "work": "n", "waiting_for": "t"},
    "Failure": {"code": "n", "sentence": "s"},
    "Bye": {},
}


def fits(value: Any, kind: str) -> bool:
    """Whether a plain value is of a kind."""
    if kind.endswith("?"):
        return value is None or fits(value, kind[:-1])
    if kind.startswith("["):
        return isinstance(value, list | tuple) and len(value) <= 4096 and all(fits(item, kind[1:-1]) for item in value)
    if kind in STRUCTS:
        fields = STRUCTS[kind]
        return (
            isinstance(value, dict)
            and value.keys() == fields.keys()
            and all(fits(value[name], fields[name]) for name in fields)
        )
    match kind:
        case "n":
            return type(value) is int and 0 <= value < 2**62
        case "f":
            return type(value) in (int, float) and 0 <= value < 2**62
        case "c":
            return type(value) is int and 0 <= value < 2**64
        case "t":
            return isinstance(value, str) and len(value) <= 4096 and all(letter.isprintable() for letter in value)
        case "s":
            return isinstance(value, str)
        case "y":
            return isinstance(value, bytes)
        case "b":
            return isinstance(value, bool)
        case _:
            return value in kind.split()


def within_limits(frame: bytes, envelope: list[Any]) -> bool:
    """Whether [incarnation, sequence, message], in plain values, may come out of a frame."""
    if len(frame) > 4 * 2**20 or len(envelope) != 3 or not all(fits(number, "n") for number in envelope[:2]):
        return False
    message = {name: value for name, value in envelope[2].items() if name != "type"}
    kind = envelope[2].get("type")
    return kind in STRUCTS and not kind.isupper() and fits(message, kind) and related(kind, message)


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
        case "RowChecksums":
            belongs = message["step"] is not None or message["barrier"] is not None
            return belongs and len(message["checksums"]) >= 8 and len(message["checksums"]) % 8 == 0
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
        case "Welcome":
            own = message["incarnation"] > 0 and message["depth"] > 0 and message["restore_bytes"] <= 2**36
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
        len(spec["shape"]) <= 2
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
