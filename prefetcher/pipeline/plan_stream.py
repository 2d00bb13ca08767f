"""Passes plans and barriers from the planning stage to the fetcher, in order."""

from collections import deque
from dataclasses import dataclass, replace

from rowcast.prefetcher.readers.batch_parts import DenseBatch
from rowcast.protocol.plan import BarrierPlan, StepPlan
from rowcast.runtime.checkpoint_manifest import BatchChecksum, Position
from rowcast.runtime.errors import RowcastError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    dense: DenseBatch  # of this rank's parts
    plan: StepPlan
    batches: int  # the checksum that ranks compare, see `BatchShare`


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBarrier:
    """An entry after a step. Every barrier of a run that makes checkpoints is one."""

    plan: BarrierPlan
    position: Position  # where training continues after it
    last: bool  # no entry follows
    ahead: tuple[BatchChecksum, ...]  # of the batches that follow
    fault: RowcastError | None  # raised once the barrier's checkpoint is durable: the batch after it is bad

    def cut(self, position: Position, reason: str) -> "PlannedBarrier":
        """Returns this barrier for a run that stops at `position`: its checkpoint is at that position or earlier."""
        if self.position.step <= position.step:
            return self
        return replace(self, position=position, plan=replace(self.plan, reason=reason, finished=False), fault=None)


PlanStream = deque[PlannedStep | PlannedBarrier]  # the planning thread appends, the fetcher's takes
