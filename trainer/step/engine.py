"""Wires the trainer's stages to each other and to one conversation, without threads, sockets or clocks.

Nothing here belongs to a step: it checks the Welcome, makes the engine, and reads its state for /metrics."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rowcast.job.optimizers import learning_rate
from rowcast.job.schema import Job, Optimizer
from rowcast.job.tables import GroupSpec, group_specs, with_placements
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import Answer, Bye, EndOfData, Flush, PlanReady, Released, Restore, StopRequest, Welcome
from rowcast.protocol.parts import UNDIVIDED, InputSpec, Rank, belonging
from rowcast.protocol.plan import ARRAY_ALIGNMENT
from rowcast.protocol.scrape import CountersCollector, Gauges
from rowcast.protocol.transport.ring import largest_payload
from rowcast.runtime.errors import ProtocolError
from rowcast.runtime.stages import IDLE_WAIT_S, Stage, Wakes
from rowcast.runtime.telemetry.metrics import Sample, samples_of
from rowcast.trainer.device.cuda import RingEnds, peak_device_bytes, phase_clock
from rowcast.trainer.device.streams import FetchRing, PhaseClock, Streams, memory_for
from rowcast.trainer.models.evaluate import Evaluation
from rowcast.trainer.step.barrier import ModelState, Results, TrainerBarrier, TrainingState
from rowcast.trainer.step.cache import DeviceCache
from rowcast.trainer.step.loop import Steps, TrainingLoop
from rowcast.trainer.step.memory import Slots
from rowcast.trainer.step.metrics import Queue, TrainerCounters
from rowcast.trainer.step.plan_check import PlanCheck, require
from rowcast.trainer.step.sender import Sender

Side = Literal["sparse", "dense"]
ENTRY_LIMIT = 2**20  # values in an entry of one of the batch's arrays

# a message, or a turn of a thread -> the threads that it may unblock; no other thread waits for it
WAKES: Wakes = {
    PlanReady: ("main",),
    Restore: ("main",),
    Flush: ("main",),
    EndOfData: ("main",),
    StopRequest: ("main",),
    Answer: ("main",),
    Released: ("sender",),  # room in the back ring
    "to send": ("sender",),  # victims, a plan's report, the model state
    "sender": ("main",),  # room in evict staging
}


# from the records of each group, f32 [slots, record_floats], and the clock of the steps' stream. No steps: a training
# script computes them
MakeModel = Callable[[list[torch.Tensor], PhaseClock], tuple[ModelState, Steps | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerGauges(Gauges[Queue]):
    """The defaults hold without an engine: before the first Welcome and between attempts."""

    train_step: int  # train steps of the run so far
    learning_rates: Mapping[Side, float]  # for the next train step
    expected_train_steps: int | None = None  # train steps of the whole run
    evaluation: Evaluation | None = None  # the last


class TrainerEngine:
    """One thread advances each of `stages` and the main thread the loop; or one thread advances all, in any order."""

    def __init__(
        self,
        job: Job,
        welcome: Welcome,
        conversation: Conversation,
        rings: RingEnds,
        streams: Streams,
        make_model: MakeModel,
        results: Results,
        counters: TrainerCounters,
        rank: Rank = UNDIVIDED,
    ) -> None:
        """The caller closes the arguments. Raises ConfigError if device memory is short."""
        self.counters = counters
        self.conversation = conversation
        self.back_ring, self.has_page_locked_rings = rings.back, rings.page_locked
        self.device = streams.device
        is_tcp = rings.fetch.is_mirror
        if is_tcp:
            conversation.carry(rings.back, rings.fetch)
        self.slots = Slots(group_specs(job), welcome.slots, streams)
        groups, send = self.slots.groups, conversation.send
        clock = phase_clock(streams.compute, counters.lapped)
        with memory_for(f"no room for the model on {self.device} beside the cache", "make cache.capacity smaller"):
            model, steps = make_model(self.slots.records, clock)
        check = PlanCheck(
            groups,
            welcome.slots,
            welcome.inputs,
            welcome.first_train_step,
            welcome.staging_bytes,
            is_tcp=is_tcp,
            rank=rank,
        )
        training = TrainingState(
            model=model,
            results=results,
            job=job,
            train_steps=welcome.first_train_step,
        )
        self.sender = Sender(self.slots, welcome.staging_bytes, rings, counters, send)
        self.cache = DeviceCache(
            self.slots, self.sender, FetchRing(rings.fetch, rings.fetch_memory, send), welcome.depth, check, counters
        )
        self.barrier = TrainerBarrier(
            self.cache, training, check, resumes=welcome.restore_bytes > 0, sends_model_state=rank.number == 0
        )
        self.loop = TrainingLoop(self.cache, self.barrier, training, steps, clock, send)
        self.stages: dict[str, Stage] = {
            "mail": conversation.advance,
            "loop": self.loop.advance,
            "sender": self.sender.advance,
        }
        conversation.listen(
            {
                PlanReady: self.cache.accept,
                Released: lambda message: rings.back.release(message.position),
                Restore: self.barrier.accept_restore,
                Flush: self.barrier.accept_flush,
                EndOfData: self.barrier.accept_end,
            }
        )

    @property
    def looks_s(self) -> dict[str, Callable[[], float]]:
        """By thread, how long it may wait while it is idle: events of the device ring no bell."""
        return {"sender": lambda: self.loop.period.look_s if self.sender.awaits_device else IDLE_WAIT_S}

    @property
    def stall_clocks(self) -> dict[str, Callable[[float], None]]:
        """By thread, what counts its idle seconds; the main loop counts its own."""
        return {"sender": self.sender.idled}

    def gauges(self, idle: TrainerGauges) -> TrainerGauges:
        return replace(
            idle,
            queue_depths={"steps": self.cache.plans_waiting, "rows_back": self.sender.queued},
            ring_used_bytes=self.back_ring.used_bytes,
            ring_size_bytes=self.back_ring.capacity,
            frames_refused=self.conversation.frames_refused,
        )

    @property
    def device_bytes(self) -> int:
        """The peak memory of the device; on the CPU only of cache, staging and plans: the rest belongs to the
        process."""
        return peak_device_bytes(
            self.device, self.slots.cache_bytes + self.cache.staging_bytes + self.cache.plans_bytes
        )

    def say_bye(self) -> None:
        self.conversation.send(Bye())


def placed(job: Job, placements: Sequence[str]) -> Job:
    """`placements`: of a Welcome. Raises ProtocolError for what places no table of this job."""
    fits = len(placements) in (0, len(job.tables)) and "auto" not in placements
    require(fits, f"the prefetcher announces the placements {placements} for {len(job.tables)} tables")
    try:
        return with_placements(job, placements)
    except ValueError as error:
        raise ProtocolError(f"the prefetcher announces the placements {placements}, and {error}") from None


def check_welcome_fits(welcome: Welcome, job: Job, groups: Sequence[GroupSpec]) -> None:
    """Compares a Welcome with the job file, which both processes have, before any memory is allocated."""
    rows = tuple(group.num_rows for group in groups)
    fits = len(welcome.slots) == len(rows) and all(map(int.__le__, welcome.slots, rows))
    require(fits, f"the prefetcher announces {welcome.slots} slots for groups of {rows} rows")
    depth = job.lookahead.depth
    require(welcome.depth == depth, f"the prefetcher announces depth {welcome.depth}; lookahead.depth is {depth}")
    fetch, back = welcome.fetch_ring.nbytes, welcome.back_ring.nbytes
    require(fetch == back, f"the prefetcher announces rings of {fetch} and {back} bytes; both have one size")
    least, most = max(group.record_bytes for group in groups), largest_payload(fetch)
    require(
        least <= welcome.staging_bytes <= most and welcome.staging_bytes % ARRAY_ALIGNMENT == 0,
        f"the prefetcher announces {welcome.staging_bytes} bytes of staging; a multiple of {ARRAY_ALIGNMENT} from "
        f"{least} to {most} is required",
    )
    check_inputs(welcome.inputs, job)


def check_inputs(inputs: Sequence[InputSpec], job: Job) -> None:
    """Raises unless these may be the arrays of every batch: dense features, labels, and others as the job has them."""
    names = [array.name for array in inputs]
    require(
        names[:2] == ["dense", "labels"] and len(set(names)) == len(names),
        f"the prefetcher announces the arrays {names}; dense and labels come first, and no name twice",
    )
    of = belonging(job).arrays
    for array in inputs:
        what = f"the prefetcher announces {array.name} as {array.dtype} with entries of {array.shape}"
        require(all(n >= 0 for n in array.shape) and math.prod(array.shape) <= ENTRY_LIMIT, what)
        require(array.of == of.get(array.name, ""), f"{what} of {array.of!r}; the job says {of.get(array.name, '')!r}")
    dense, labels, *_ = inputs
    fits = len(dense.shape) == 1 and labels.shape == job.data.columns.label_shape
    require(
        fits and {dense.dtype, labels.dtype} == {"f4"},
        f"the prefetcher announces dense features {dense.dtype} {dense.shape} and labels {labels.dtype} {labels.shape}",
    )


def learning_rates(optimizer: Optimizer, train_steps: int) -> dict[Side, float]:
    """Without the dense side where the model has a step of its own."""
    rates: dict[Side, float] = {"sparse": learning_rate(optimizer.sparse, train_steps)}
    return rates if optimizer.dense is None else rates | {"dense": learning_rate(optimizer.dense, train_steps)}


class TrainerCollector(CountersCollector[TrainerCounters, TrainerGauges]):
    process, ring_direction = "trainer", "from_device"

    def own_samples(self, counters: TrainerCounters, gauges: TrainerGauges) -> Iterator[Sample]:
        for side, rate in gauges.learning_rates.items():
            yield "rowcast_learning_rate", (side,), rate
        evaluation = gauges.evaluation
        if evaluation is None:
            return
        yield from samples_of(evaluation, prefix="eval_")
        for figure, value in evaluation.ranking.items():
            yield "rowcast_eval_ranking", (figure,), value
        for name, mean in evaluation.means.items():
            if mean is not None:
                yield "rowcast_eval_mean", (name,), mean
        for task in evaluation.tasks:
            yield from samples_of(task, task.label, prefix="eval_task_")
