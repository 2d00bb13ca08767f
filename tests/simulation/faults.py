"""What goes wrong in one incarnation, as a seed draws it."""

import math
import random
from dataclasses import dataclass
from typing import Literal

from tests.simulation.disk import DISK_FAULTS, DiskFault
from tests.simulation.link import FRAME_FAULTS, FrameFault
from tests.simulation.server import SERVER_FAULTS, ServerFault

Event = Literal[
    "kill trainer", "kill prefetcher", "kill both", "power loss", "link cut", "stop prefetcher", "stop trainer"
]
EVENTS: dict[Event, int] = {
    "kill trainer": 10,
    "kill prefetcher": 3,
    "kill both": 3,
    "power loss": 4,
    "link cut": 2,
    "stop prefetcher": 1,
    "stop trainer": 1,
}
LAST_ADVANCE = 6000  # a whole run takes 2,500 to 14,000
LAST_FRAME = 60
LAST_OPERATION = 80
LAST_CALL = 2000  # calls to a server; a whole run makes 100 to 10,000


@dataclass(frozen=True, kw_only=True, slots=True)
class Happening:
    event: Event
    at: int  # advances of any stage before it

    def __str__(self) -> str:
        return f"{self.event} at advance {self.at}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    happening: Happening | None = None
    # of what arrives at the prefetcher, at the trainer
    frames: tuple[FrameFault | None, FrameFault | None] = (None, None)
    disk: DiskFault | None = None
    server: ServerFault | None = None
    # advances of the writer after which a prefetcher that lost its trainer is killed as well
    settle_limit: int | None = None

    def __str__(self) -> str:
        parts = {
            "": self.happening,
            "to the prefetcher: ": self.frames[0],
            "to the trainer: ": self.frames[1],
            " ": self.disk,
            "  ": self.server,
        }
        planned = [f"{name.strip(' ')}{part}" for name, part in parts.items() if part is not None]
        return ", ".join(planned) or "nothing"


def draw_faults(chance: random.Random, *, has_server: bool) -> Faults:
    """At least one, though the incarnation may end before it would happen."""
    weights = {"process": 6, "frame": 4, "disk": 1} | ({"server": 8} if has_server else {})
    first = chance.choices(list(weights), list(weights.values()))[0]
    has = {kind: kind == first or chance.random() < 0.15 for kind in weights}
    frame = draw_frame_fault(chance) if has["frame"] else None
    return Faults(
        happening=draw_happening(chance) if has["process"] else None,
        frames=(frame, None) if chance.random() < 0.5 else (None, frame),
        disk=draw_disk_fault(chance) if has["disk"] else None,
        server=draw_server_fault(chance) if has.get("server") else None,
        settle_limit=chance.randrange(30) if chance.random() < 0.15 else None,
    )


def draw_happening(chance: random.Random) -> Happening:
    """Some of them soon: while the incarnation before is still being recovered from."""
    soon = round(math.exp(chance.uniform(0, math.log(LAST_ADVANCE))))
    return Happening(
        event=chance.choices(list(EVENTS), list(EVENTS.values()))[0],
        at=soon if chance.random() < 0.3 else chance.randrange(LAST_ADVANCE),
    )


def draw_frame_fault(chance: random.Random) -> FrameFault:
    return FrameFault(kind=chance.choice(FRAME_FAULTS), at=chance.randint(1, LAST_FRAME), share=chance.random())


def draw_disk_fault(chance: random.Random) -> DiskFault:
    return DiskFault(
        kind=chance.choice(DISK_FAULTS), at=chance.randrange(LAST_OPERATION), lasting=chance.random() < 0.3
    )


def draw_server_fault(chance: random.Random) -> ServerFault:
    at = round(math.exp(chance.uniform(0, math.log(LAST_CALL))))
    return ServerFault(kind=chance.choice(SERVER_FAULTS), at=at, share=chance.random())
