"""Keeps the state of a process for /healthz, /readyz and the metric `rowcast_state`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["starting", "connecting", "running", "stopping", "stopped", "failed"]
# connecting: waits for the peer, the first time or after a loss stopping: a stop was requested, and the plans already
# made are finished


def every_stage_lives() -> str | None:
    return None


@dataclass(slots=True)
class Health:
    """The process sets `state`; `dead_stage` returns the name of a stage whose thread has died, or None."""

    state: State = "starting"
    dead_stage: Callable[[], str | None] = every_stage_lives

    def healthz(self) -> tuple[bool, str]:
        dead = self.dead_stage()
        return dead is None, "ok" if dead is None else f"{dead} is dead"

    def readyz(self) -> tuple[bool, str]:
        healthy, word = self.healthz()
        return healthy and self.state == "running", self.state if healthy else word
