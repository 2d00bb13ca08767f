"""The part of the Trace Event Format of the Chrome project that we write: the fields of each phase, and what belongs
together.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
FIELDS = {  # phase -> fields that it has, beside those that it may have
    "M": ("args", ""),
    "X": ("ts tid cat dur", "args"),
    "b": ("ts cat id2 args", "dur"),
    "e": ("ts cat id2 args", ""),
    "C": ("ts args", ""),
    "i": ("ts s", "args"),
}


def check_events(file: Path) -> list[Event]:
    """Its events, once everything about them was found right. The closing bracket may be missing."""
    text = file.read_text()
    events: list[Event] = json.loads(text if text.endswith("]\n") else text + "]")
    named: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    threads: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    begun: dict[tuple[Any, ...], float] = {}
    for event in events:
        needed, allowed = (set(names.split()) for names in FIELDS[event["ph"]])
        assert needed <= event.keys() - {"ph", "name", "pid"} <= needed | allowed | {"tid"}, event
        assert event.get("ts", 0) >= 0, event
        thread = event["pid"], event.get("tid", 0)
        key = event["pid"], event.get("cat"), str(event.get("id2"))
        match event["ph"]:
            case "M":
                named[event["name"]].append(thread)
            case "X":
                threads[thread].append((event["ts"], event["ts"] + event["dur"]))
            case "b":
                assert begun.setdefault(key, event["ts"]) == event["ts"], event
            case "e":
                assert begun.pop(key) <= event["ts"], event
    assert begun == {}
    assert threads.keys() <= set(named["thread_name"])
    assert len(set(named["thread_name"])) == len(named["thread_name"])
    assert {event["pid"] for event in events} == {pid for pid, _ in named["process_name"]}
    for spans in threads.values():  # they lie inside each other or apart
        around: list[float] = []
        for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= began + 1e-3:  # a nanosecond: sums of decimals of microseconds are not exact
                around.pop()
            assert not around or ended <= around[-1] + 1e-3, (began, ended, around)
            around.append(ended)
    return events
