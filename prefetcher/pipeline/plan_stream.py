"""The queue of plans and barriers from the planning stage to the fetcher, in order."""

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
    """An entry after a step. Every barrier of a run that makes checkpoints is one."""

    plan: BarrierPlan
    position: Position  # where training continues after it
    last: bool  # no entry follows

    def cut(self, position: Position, reason: str) -> "PlannedBarrier":
        """Returns this barrier for a run that stops at `position`: its checkpoint is at that position or earlier."""
        if self.position.step <= position.step:
            return self
        return replace(self, position=position, plan=replace(self.plan, reason=reason, finished=False))


PlanStream = deque[PlannedStep | PlannedBarrier]  # the planning thread appends, the fetcher's takes
