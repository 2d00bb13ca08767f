"""Counts what the trainer does, for /metrics and for the report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rowcast.job.tables import GroupSpec
from rowcast.protocol.counters import Counters
from rowcast.protocol.parts import Rank, numbers_of_vectors
from rowcast.protocol.plan_layout import StepHeader
from rowcast.trainer.device.streams import Lap, Phase

StallReason = Literal["rows", "ring", "results", "barrier", "ranks"]
Queue = Literal["steps", "rows_back"]
# rows: the loop waits for PlanReady      ring: the sender waits for space in the back ring
# results: the loop waits for the device  barrier: the loop waits for the flush
# ranks: the compute stream waits for other ranks: until they reach the same point, and during the transfer
#
# link -steps-> cache -rows_back-> sender


@dataclass(slots=True, kw_only=True)
class TrainerCounters(Counters[StallReason, Phase, Queue]):
    """Made by `new_counters`. Each counter has one writer: the thread that does the work."""

    literals = StallReason, Phase, Queue

    loss: float | None = None  # the last train step's
    shared_samples: int = 0  # of train steps, over all ranks
    shared_eval_samples: int = 0
    rank_imbalance: float = 1.0  # in the last train step: the most rows that a rank owns over the mean
    imbalances: float = 0.0  # its excess over 1, summed over train steps
    _pooling: tuple[tuple[GroupSpec, Callable[[int], tuple[list[int], list[int]]]], ...] = ()

    def lapped(self, lap: Lap, seconds: float, step: int, ended_s: float) -> None:
        """Implements `Spent`: a wait for other ranks counts in its phase and as a stall."""
        if lap == "ranks":
            self.stalled("ranks", seconds, step, ended_s)
        self.spent("exchange" if lap == "ranks" else lap, seconds, step, ended_s)

    def step_done(self, step: StepHeader, loss: float | None) -> None:
        """Counts a step that is complete on the device. `loss` is None for an evaluation step."""
        self.step(step.kind, step.batch_size)
        of_all = step.batch_size if step.share is None else step.share.batch_size
        if step.share is not None:
            self.exchanged(step.kind, step.share.groups)
            for group, numbers in self._pooling:
                sent, received = map(sum, numbers(of_all))
                self.groups[group.name].pooled(sent, received, group.gradient_bytes, trains=step.kind == "train")
        self.shared_samples += of_all if step.kind == "train" else 0
        self.shared_eval_samples += of_all if step.kind == "eval" else 0
        self.loss = self.loss if loss is None else loss
        self.progressed()

    def plan_done(self, move: StepHeader, steps: Sequence[StepHeader]) -> None:
        """Counts the rows of a plan. `move`: the header with the plan's move. `steps`: that were computed."""
        for index, (counters, moved) in enumerate(zip(self.groups.values(), move.groups, strict=True)):
            counters.plan(
                num_lookups=sum([step.groups[index].num_lookups for step in steps]),
                num_unique=sum([step.num_rows(index) for step in steps]),
                num_fetch=moved.num_fetch,
                num_evict=moved.num_evict,
            )

    def pools(self, groups: Sequence[GroupSpec], rank: Rank) -> None:
        """Also counts pooled vectors, of tables with an owner among these groups."""
        pooling = (group for group in groups if any(table.point is not None for table in group.tables))
        self._pooling = tuple((group, numbers_of_vectors(group, rank)) for group in pooling)

    def balanced(self, imbalance: float) -> None:
        """Records how evenly the ranks own a train step's rows."""
        self.rank_imbalance = imbalance
        self.imbalances += imbalance - 1

    @property
    def mean_imbalance(self) -> float:
        return 1 + self.imbalances / max(1, self.train_steps)


new_counters = TrainerCounters.new
