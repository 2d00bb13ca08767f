"""The stream of plans: what the planning stage hands to the fetcher's thread, in order."""

from collections import deque
from dataclasses import dataclass, replace

from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import BarrierPlan, StepPlan
from rowcast.runtime.position import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    batch: ScheduledBatch
    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBarrier:
    """An entry after a step. Every barrier is a checkpoint, where the run makes any."""

    plan: BarrierPlan
    position: Position  # where training goes on from it
    last: bool  # nothing follows

    def cut(self, position: Position, reason: str) -> "PlannedBarrier":
        """This barrier where the run stops at `position`: its checkpoint is not later than that."""
        if self.position.step <= position.step:
            return self
        return replace(self, position=position, plan=replace(self.plan, reason=reason, finished=False))


PlanStream = deque[PlannedStep | PlannedBarrier]  # the planning thread appends, the fetcher's takes
