"""The part of the Trace Event Format that we write, checked strictly: every event's phase, its fields, their types, and
which events belong together. Source: "Trace Event Format" of the Chrome project; Perfetto reads it too.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
NUMBER = (int, float)
COMMON: dict[str, Any] = {"ph": str, "name": str, "pid": int, "tid": int}
TIMED = {**COMMON, "ts": NUMBER}
FIELDS: dict[str, dict[str, Any]] = {  # phase -> field -> type
    "M": {**COMMON, "args": dict},
    "X": {**TIMED, "cat": str, "dur": NUMBER},
    "b": {**TIMED, "cat": str, "id2": dict, "args": dict},
    "e": {**TIMED, "cat": str, "id2": dict, "args": dict},
    "C": {**TIMED, "args": dict},
    "i": {**TIMED, "s": str},
}
OPTIONAL: dict[str, dict[str, Any]] = {"X": {"args": dict}, "b": {"dur": NUMBER}, "i": {"args": dict}}
CLOCK = {"boot_id", "clock", "unix"}
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def check_events(file: Path) -> list[Event]:
    """Its events, once everything about them was found right. The closing bracket may be missing."""
    text = file.read_text()
    events: list[Event] = json.loads(text if text.endswith("]\n") else text + "]")
    for event in events:
        event.setdefault("tid", 0)
        check_fields(event)
    check_names(events)
    check_pairs(events)
    check_nesting(events)
    return events


def check_fields(event: Event) -> None:
    phase = event["ph"]
    needed, allowed = FIELDS[phase], {**FIELDS[phase], **OPTIONAL.get(phase, {})}
    assert needed.keys() <= event.keys() <= allowed.keys(), event
    for name, value in event.items():
        assert isinstance(value, allowed[name]), event
        assert not isinstance(value, bool), event
    if "ts" in event:
        assert math.isfinite(event["ts"]), event
        assert event["ts"] >= 0, event
    if phase == "X":
        assert event["dur"] >= 0, event
    if phase == "C":
        assert all(isinstance(value, NUMBER) for value in event["args"].values()), event
    if phase == "i":
        assert event["s"] in ("g", "p", "t"), event
    if phase == "M":
        assert set(event["args"]) - CLOCK == {METADATA[event["name"]]}, event


def check_names(events: list[Event]) -> None:
    """Every process and thread that has spans has a name of its own."""
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    threads = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert used <= set(threads)
    assert len(set(threads)) == len(threads)
    named = [(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"]
    assert len(set(named)) == len(named)
    assert {event["pid"] for event in events} == {event["pid"] for event in events if event["name"] == "process_name"}


def check_pairs(events: list[Event]) -> None:
    """Every begin has its end, not before it."""
    open_: dict[tuple[Any, ...], float] = {}
    for event in events:
        if event["ph"] not in ("b", "e"):
            continue
        (local,) = event["id2"].values()
        assert set(event["id2"]) == {"local"}, event
        assert int(local, 16) >= 0, event
        key = (event["pid"], event["cat"], local)
        if event["ph"] == "b":
            assert key not in open_, event
            open_[key] = event["ts"]
        else:
            assert open_.pop(key) <= event["ts"], event
    assert open_ == {}


def check_nesting(events: list[Event]) -> None:
    """Spans of one thread lie inside each other or apart."""
    threads: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        around: list[float] = []
        for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= began + 1e-3:  # a nanosecond: sums of decimals of microseconds are not exact
                around.pop()
            assert not around or ended <= around[-1] + 1e-3, (began, ended, around)
            around.append(ended)
