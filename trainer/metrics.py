"""What the trainer counts, and how a scrape reads it. The report is made from the same counters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from protocol.messages import PlanHeader
from protocol.tables import GroupSpec
from protocol.telemetry.counters import Counters, CountersCollector, QueueCounters, counter_samples, new_groups
from protocol.telemetry.metrics import Sample

StallReason = Literal["rows", "ring", "results", "barrier"]
Phase = Literal["fill", "lookup", "forward", "backward", "update"]
Queue = Literal["steps", "rows_back"]
# rows: the loop waits for StepReady      ring: the sender waits for space in the back ring
# results: the loop waits for the device  barrier: the loop waits for the flush
#
# link -steps-> cache -rows_back-> sender


@dataclass(slots=True, kw_only=True)
class TrainerCounters(Counters):
    """Made by `new_counters`. Every counter has one writer: the thread that does the work."""

    loss: float | None = None  # of the last training step

    def stalled(self, reason: StallReason, seconds: float) -> None:
        self.stalls[reason] += seconds

    def spent(self, phase: Phase, seconds: float) -> None:
        self.phases[phase] += seconds

    def blocked(self, queue: Queue, side: Literal["producer", "consumer"], seconds: float) -> None:
        self.queues[queue].blocked(side, seconds)

    def step_done(self, plan: PlanHeader, loss: float | None) -> None:
        """The step is complete on the device. `loss` is None for an evaluation step."""
        self.step(plan.kind, plan.batch_size)
        for counters, group in zip(self.groups.values(), plan.groups, strict=True):
            counters.step(
                num_lookups=group.num_lookups,
                num_unique=group.num_unique,
                num_fetch=group.num_fetch,
                num_evict=group.num_evict,
            )
        self.loss = self.loss if loss is None else loss
        self.progressed()

    @property
    def waited_s(self) -> float:
        """Seconds that the loop waited for rows."""
        return self.stalls["rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerGauges:
    """Read from the scrape's thread: each must answer at once and take no lock that a stage holds while it works."""

    queue_depth: Callable[[Queue], int]
    ring_used_bytes: Callable[[], int]  # of the back ring
    ring_size_bytes: Callable[[], int]
    frames_refused: Callable[[], int]


def new_counters(groups: Sequence[GroupSpec]) -> TrainerCounters:
    """Counters at zero; `groups` comes from `group_specs`."""
    return TrainerCounters(
        groups=new_groups(groups),
        stalls=dict.fromkeys(get_args(StallReason), 0.0),
        phases=dict.fromkeys(get_args(Phase), 0.0),
        queues={name: QueueCounters() for name in get_args(Queue)},
    )


class TrainerCollector(CountersCollector):
    def __init__(self, counters: TrainerCounters, gauges: TrainerGauges, build: Mapping[str, str]) -> None:
        """`build` comes from `build_info`."""
        super().__init__("trainer", build)
        self._counters = counters
        self._gauges = gauges

    def samples(self) -> Iterator[Sample]:
        counters, gauges = self._counters, self._gauges
        yield from counter_samples(counters)
        for queue in get_args(Queue):
            yield "rowcast_queue_depth", (queue,), gauges.queue_depth(queue)
        yield "rowcast_ring_used_bytes", ("from_device",), gauges.ring_used_bytes()
        yield "rowcast_ring_size_bytes", ("from_device",), gauges.ring_size_bytes()
        yield "rowcast_frames_refused_total", (), gauges.frames_refused()
        if counters.loss is not None:
            yield "rowcast_loss", (), counters.loss
