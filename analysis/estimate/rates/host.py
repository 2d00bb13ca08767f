"""Times a step's host work beside its kernels: messages, checks, streams, and the model's Python.

The trainer itself is run: a small job, with plans made up here and rows that lie in its ring. What its kernels take is
subtracted.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from rowcast.analysis.estimate.device_rates import HostRates, KernelRates
from rowcast.analysis.estimate.rates.layers import small_job
from rowcast.analysis.estimate.rates.replay import RecordedPlan, Recording, Replay
from rowcast.analysis.estimate.rates.rows import FEATURES, SLOTS_PER_ROW, random_lookup
from rowcast.analysis.estimate.rates.stopwatch import Stopwatch
from rowcast.analysis.estimate.step_kernels import GroupCounts, StepCounts, model_calls, moves, row_calls
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import Batch
from rowcast.protocol.packing import plan_block
from rowcast.protocol.plan import GroupPlan, StepPlan
from rowcast.protocol.transport.link import Link
from rowcast.protocol.transport.zmq_link import ZmqLink

NUM_DENSE = 13
BATCHES, DIM = (128, 2048), 8
STEPS, WARM_STEPS, RUNS = 40, 8, 5
FETCHED_SHARE = 4  # a step fetches one row in four


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """Processor time per step; on a CPU its kernels are included."""

    all: float
    mail: float  # messages and checks of plans


class HostedJob:
    """A small job with one table group, and a run of it that can be replayed."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.job = small_job(FEATURES, DIM)
        self.groups = group_specs(self.job)
        self._batch, self._lookup = batch, random_lookup(batch, 0.5, np.random.default_rng(0))
        self._num_slots = SLOTS_PER_ROW * len(self._lookup.unique_slots)
        plans = list(self._plans())
        self.counts = counted(plans[-1])
        record_bytes = self.groups[0].record_bytes
        self._recording = Recording(
            self.groups, plans, (self._num_slots,), device, lambda _, keys: np.zeros(len(keys) * record_bytes, np.uint8)
        )

    def _plans(self) -> Iterator[RecordedPlan]:
        lookup, rng = self._lookup, np.random.default_rng(0)
        batch = Batch(
            dense=np.ones((self._batch, NUM_DENSE), np.float32),
            labels=np.ones(self._batch, np.float32),
            ids=np.zeros(0, np.int64),  # slots stand for them
        )
        keys = np.arange(len(lookup.unique_slots) // FETCHED_SHARE)
        for step in range(STEPS):
            victims = keys if step else keys[:0]
            group = GroupPlan(
                **lookup.named(),
                fetch_slots=rng.permutation(self._num_slots)[: len(keys)].astype(np.int32),
                fetch_keys=keys,
                evict_keys=victims,
                num_dirty=len(victims),
                fill_after=step - 1 if step else None,
                load_keys=keys[:0],
                spill_keys=keys[:0],
            )
            plan = StepPlan(
                step=step,
                kind="train",
                train_step=step,
                epoch=0,
                batch_size=batch.size,
                after_step=None,
                groups=(group,),
            )
            yield RecordedPlan(batch, plan)

    def seconds(self) -> HostSeconds:
        """The median of several runs: how often threads take Python's lock from each other differs between them."""
        found = [self._run() for _ in range(RUNS)]
        steps = STEPS - WARM_STEPS
        return HostSeconds(
            all=median(sum(spent.values()) for spent in found) / steps,
            mail=median(spent["mail"] for spent in found) / steps,
        )

    def _run(self) -> dict[str, float]:
        """Seconds of the processor, by thread: while one computes, the others wait for the lock."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="rowcast-rates-")))
            recording = stack.enter_context(self._recording)
            ends: list[ZmqLink] = []

            def make_links(on_receive: tuple[Callable[[], None], Callable[[], None]]) -> tuple[Link, Link]:
                for make, own in zip((ZmqLink.prefetcher, ZmqLink.trainer), on_receive, strict=True):
                    ends.append(stack.enter_context(make(folder, own, folder)))
                return ends[0], ends[1]

            replay = Replay(recording, self.job, make_links=make_links)
            replay.run(WARM_STEPS)
            before_s = ends[1].processor_seconds
            spent = replay.in_threads()
            return {**spent, "link": ends[1].processor_seconds - before_s}


def counted(recorded: RecordedPlan) -> StepCounts:
    (group,) = recorded.plan.groups
    return StepCounts(
        batch=recorded.batch.size,
        plan_bytes=plan_block(recorded.batch, recorded.plan).nbytes,
        groups=(
            GroupCounts(
                lookups=group.num_lookups,
                rows=len(group.unique_slots),
                fetched=len(group.fetch_keys),
                written_back=group.num_dirty,
            ),
        ),
    )


def host_rates(watch: Stopwatch, kernels: Mapping[str, KernelRates]) -> HostRates:
    small, large = (HostedJob(batch, watch.device) for batch in BATCHES)
    small_s, large_s = small.seconds(), large.seconds()
    # on a device, kernels take none of the host's time but that of their launch, which belongs to the host
    of_kernels = kernel_seconds(small, kernels) if watch.device.type == "cpu" else 0.0
    lookups = large.counts.groups[0].lookups - small.counts.groups[0].lookups
    return HostRates(
        per_step=max(0.0, small_s.all - of_kernels), per_lookup=max(0.0, (large_s.mail - small_s.mail) / lookups)
    )


def kernel_seconds(own: HostedJob, kernels: Mapping[str, KernelRates]) -> float:
    calls = [
        *moves(own.groups, own.counts),
        *row_calls(own.job, own.groups, own.counts),
        *model_calls(own.job, NUM_DENSE, own.counts),
    ]
    return sum(call.calls * kernels[call.kernel].seconds(call.counts) for call in calls)
