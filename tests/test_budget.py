"""No room grows: lines, files, classes and syntax nodes of each are at most those of tests/budget.json.

    python -m tests.test_budget

lowers the levels of rooms that became smaller, and never raises one. To let a room grow, add an entry to "raises" by
hand: the room, how much of what, why, and what left for it elsewhere. Syntax nodes count what is written, so that
joining lines wins nothing.
"""

import ast
import functools
import json
from pathlib import Path
from typing import TypedDict

import pytest

ROOT = Path(__file__).parent.parent
BUDGET = Path(__file__).with_name("budget.json")
PRODUCT = ("analysis", "deploy", "job", "prefetcher", "protocol", "rowcast", "runtime", "serving", "trainer")
KEYS = ("lines", "files", "classes", "nodes")
SLACK = 0.02  # a room this far below its budget has given something back: it is written down, not spent again


class Raise(TypedDict):
    room: str
    by: dict[str, int]
    why: str
    left: str  # what went for it


class Budget(TypedDict):
    levels: dict[str, dict[str, int]]
    raises: list[Raise]


@functools.cache
def sizes() -> dict[str, dict[str, int]]:
    """A room is the first two folders of a path."""
    found: dict[str, dict[str, int]] = {}
    for package in (*PRODUCT, "tests"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            nodes = list(ast.walk(ast.parse(text)))
            classes = sum(isinstance(node, ast.ClassDef) for node in nodes)
            room = found.setdefault("/".join(path.relative_to(ROOT).parent.parts[:2]), dict.fromkeys(KEYS, 0))
            for key, size in zip(KEYS, (text.count("\n"), 1, classes, len(nodes)), strict=True):
                room[key] += size
    return dict(sorted(found.items()))


def raised(budget: Budget, room: str, key: str) -> int:
    return sum(entry["by"].get(key, 0) for entry in budget["raises"] if entry["room"] == room)


def allowed(budget: Budget, room: str, key: str) -> int:
    return budget["levels"].get(room, {}).get(key, 0) + raised(budget, room, key)


def lowered(budget: Budget, now: dict[str, dict[str, int]]) -> Budget:
    """A room that left gives back what was raised for it, too."""
    return {
        "levels": {
            room: {key: min(level[key], now[room][key] - raised(budget, room, key)) for key in KEYS}
            for room, level in budget["levels"].items()
            if room in now
        },
        "raises": [entry for entry in budget["raises"] if entry["room"] in now],
    }


@pytest.mark.parametrize("key", KEYS)
def test_no_room_grows(key: str) -> None:
    budget: Budget = json.loads(BUDGET.read_text())
    pairs = {room: (own[key], allowed(budget, room, key)) for room, own in sizes().items()}
    assert {room: pair for room, pair in pairs.items() if pair[0] > pair[1]} == {}


def test_what_a_room_gave_back_is_written_down() -> None:
    budget: Budget = json.loads(BUDGET.read_text())
    now = sizes()
    pairs = {
        room: (now[room]["lines"] if room in now else 0, allowed(budget, room, "lines")) for room in budget["levels"]
    }
    assert {room: pair for room, pair in pairs.items() if pair[0] < pair[1] * (1 - SLACK)} == {}


def test_a_raise_says_why_and_what_left_for_it() -> None:
    for entry in json.loads(BUDGET.read_text())["raises"]:
        assert min(len(entry["why"].split()), len(entry["left"].split())) >= 3, entry
        assert entry["by"].keys() <= set(KEYS), entry


if __name__ == "__main__":
    BUDGET.write_text(json.dumps(lowered(json.loads(BUDGET.read_text()), sizes()), indent=1) + "\n")
