"""Defines a state machine as a table of state, event and following state. `render` draws it."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from rowcast.runtime.errors import LocalProtocolError

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class StateTable(Generic[S, E]):
    def __init__(self, side: str, rows: Sequence[tuple[S, E, S]]) -> None:
        """The machine starts in the first row's state. Raises ValueError if two rows share state and event."""
        self.side = side
        self.first = rows[0][0]
        self.rows = tuple(rows)
        self._following = {(state, event): after for state, event, after in rows}
        if len(self._following) < len(rows):
            raise ValueError(f"the {side}'s table of states has two rows for the same state and event")

    def after(self, state: S, event: E) -> S:
        """Returns the next state. Raises LocalProtocolError if the event cannot happen in this state."""
        following = self._following.get((state, event))
        if following is None:
            allowed = ", ".join(f"'{event}'" for own, event, _ in self.rows if own is state) or "nothing"
            raise LocalProtocolError(
                f"'{event}' cannot happen in the {self.side}'s state '{state}'; {allowed} can: a bug of rowcast"
            )
        return following

    def render(self) -> str:
        states = dict.fromkeys(state for own, _, after in self.rows for state in (own, after))
        names = [f'    state "{state}" as {state.name}' for state in states]
        edges = [f"    {own.name} --> {after.name}: {event}" for own, event, after in self.rows]
        return "\n".join(["```mermaid", "stateDiagram-v2", *names, f"    [*] --> {self.first.name}", *edges, "```", ""])
