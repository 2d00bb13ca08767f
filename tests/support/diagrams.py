"""The diagrams of docs/architecture.md, from the tables of the code."""

import sys
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from rowcast.protocol.session import ROLES, TABLE, State
from rowcast.runtime.stages import StateTable


def mermaid(states: Iterable[StrEnum], first: StrEnum, edges: Iterable[tuple[StrEnum, StrEnum, str]]) -> str:
    names = [f'    state "{state}" as {state.name}' for state in states]
    lines = [f"    {before.name} --> {after.name}: {event}" for before, after, event in edges]
    return "\n".join(["```mermaid", "stateDiagram-v2", *names, f"    [*] --> {first.name}", *lines, "```", ""])


def conversation() -> str:
    """The messages that change the state, and a Markdown table of all allowed ones; a Failure is allowed in every state
    but the last."""
    allowed = {key: [event for event in following if event != "Failure"] for key, following in TABLE.items()}
    edges = [
        (state, TABLE[state, role][event], f"{role} sends {event}")
        for (state, role), events in allowed.items()
        for event in events
        if TABLE[state, role][event] != state
    ]
    rows = [
        f"| {state} | {' | '.join(' · '.join(TABLE[state, role]) or 'nothing' for role in ROLES)} |" for state in State
    ]
    table = ["| state | the prefetcher may send | the trainer may send |", "|---|---|---|", *rows]
    return "\n".join([mermaid(State, State.WAITING_HELLO, edges), *table, ""])


def barrier(table: StateTable[Any, Any]) -> str:
    states = dict.fromkeys(state for own, _, after in table.rows for state in (own, after))
    return mermaid(states, table.first, [(own, after, str(event)) for own, event, after in table.rows])


if __name__ == "__main__":
    sys.stdout.write(conversation())
