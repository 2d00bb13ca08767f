"""Measures the time that a step spends outside its kernels, by type.

It uses a small job, whose kernels are measured as well. The trainer itself runs, with plans made up here and rows that
lie in its ring: first in one thread, then in a thread for each stage. Its timeline shows what the phases of a step
take, and where a hand-over between threads waits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

from rowcast.analysis.estimate.planned import step_calls
from rowcast.analysis.estimate.rates.replay import RecordedPlan, Recording, Replay
from rowcast.analysis.estimate.rates_file import KernelRates
from rowcast.analysis.estimate.recorded import taken, usual
from rowcast.analysis.timeline.recording import began, ended, read_recording
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import Batch
from rowcast.protocol.plan import GroupPlan, StepPlan
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.protocol.transport.link import Link
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.run_directory import Role
from rowcast.runtime.telemetry.timeline import MAIN, Timeline
from rowcast.trainer.kernels.lookups import lookup_arrays

FEATURES, DIM, NUM_DENSE = 26, 8, 13
BATCHES = (128, 2048)  # the second one tells what each look-up adds
STEPS, WARM_STEPS, RUNS = 40, 8, 5
FETCHED_SHARE = 4  # a step fetches one row in four
SKEW = 3  # a feature looks up rows by a uniform random number to this power, so few rows have most look-ups
SLOTS_PER_ROW = 2  # rows of other batches are between those of a step
MESSAGE_S = 2e-4  # from one process to the other: measured in runs on idle cores


class Spent(NamedTuple):
    """Seconds of a step."""

    main: float  # processor time of the thread that computes
    others: float  # processor time of the threads that handle messages and checks
    phases: float  # wall-clock time of the step's phases, with no other thread running
    wait: float  # wall-clock time until the sender's thread takes up what it was given


def small_job() -> Job:
    """A job of small tables, whose model is as small."""
    return parse_job(
        {
            "job": {"run_dir": "unused"},
            "data": {"format": "synthetic", "batch_size": BATCHES[0], "synthetic": {"preset": "criteo-kaggle"}},
            "tables": [
                {"name": f"table_{n}", "num_embeddings": 4096, "embedding_dim": DIM, "features": [f"feature_{n}"]}
                for n in range(FEATURES)
            ],
            "model": {"kind": "dlrm", "bottom_mlp": [DIM], "top_mlp": [1]},
            "optimizer": {"sparse": {"kind": "sgd", "lr": 0.01}, "dense": {"kind": "sgd", "lr": 0.01}},
            "cache": {"capacity": "1MiB"},
        }
    )


def random_lookup(batch: int, share: float, rng: np.random.Generator, features: int) -> LookupArrays[npt.NDArray[Any]]:
    """One look-up in each bag; `share`: of the look-ups that are of distinct rows, at most. The features' tables have
    from few rows to many, and few rows have most look-ups."""
    most = np.geomspace(2, 4 * batch * share * 4, features)  # rows of each table
    chosen = [(rng.random(batch) ** SKEW * rows).astype(np.int64) + (number << 32) for number, rows in enumerate(most)]
    keys, rows = np.unique(np.concatenate(chosen), return_inverse=True)
    return lookup_arrays(rows, rng.permutation(SLOTS_PER_ROW * len(keys)).astype(np.int32)[rows])


class HostedJob:
    """The small job, and a run of it that can be replayed."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.job = small_job()
        self.groups = group_specs(self.job)
        self._batch, self._lookup = batch, random_lookup(batch, 0.5, np.random.default_rng(0), FEATURES)
        self._num_slots = SLOTS_PER_ROW * len(self._lookup.unique_slots)
        plans = list(self._plans())
        self.lookups = plans[-1].plan.groups[0].num_lookups
        self.calls = [*step_calls(self.job, self.groups, plans[-1].plan, plans[-1].batch.samples)]
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

    def spent(self) -> Spent:
        """The median of several runs: how often threads take Python's lock from each other differs between them."""
        return Spent(*map(median, zip(*(self._run() for _ in range(RUNS)), strict=True)))

    def _run(self) -> Spent:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="rowcast-rates-")))
            recording = stack.enter_context(self._recording)
            ends: list[ZmqLink] = []

            def make_links(on_receive: tuple[Callable[[], None], Callable[[], None]]) -> tuple[Link, Link]:
                for role, own in zip(get_args(Role), on_receive, strict=True):
                    ends.append(stack.enter_context(ZmqLink.of(role, folder, own, folder)))
                return ends[0], ends[1]

            replay = Replay(recording, self.job, make_links=make_links)
            with Timeline(folder, "trainer") as replay.counters.timeline:
                replay.run(WARM_STEPS)
                before_s = ends[1].processor_seconds
                of_threads = replay.in_threads()
                link_s = ends[1].processor_seconds - before_s
            seen, steps = read_recording(folder, "trainer"), STEPS - WARM_STEPS
        main_s = of_threads.pop("loop")
        return Spent(
            main=main_s / steps,
            others=(sum(of_threads.values()) + link_s) / steps,
            phases=median(phases_of(seen.track(MAIN))[WARM_STEPS // 2 : WARM_STEPS]),
            wait=usual(
                chain.from_iterable(taken(seen.named("fill"), seen.track("sender"), "copy out", [])[0].values())
            ),
        )


def phases_of(spans: list[Any]) -> list[float]:
    """Seconds of each step's spans; one within another counts once."""
    found, end = dict[int, float](), 0.0
    for span in spans:
        if span.cat == "work" and span.step is not None:
            found[span.step] = found.get(span.step, 0.0) + max(0.0, ended(span) - max(began(span), end)) / 1e6
            end = max(end, ended(span))
    return [found[step] for step in sorted(found)]


def overheads(device: torch.device, kernels: Mapping[str, KernelRates]) -> dict[str, KernelRates]:
    """`kernels`: of the small job."""
    small, large = (HostedJob(batch, device) for batch in BATCHES)
    spent, more = small.spent(), large.spent().others
    # on a device, kernels take none of the host's time but that of their launch
    on_host = device.type == "cpu"
    of_kernels = sum(call.calls * kernels[call.kernel].seconds(call.counts) for call in small.calls) if on_host else 0.0
    beside = max(0.0, spent.main - of_kernels)
    launch = min(beside, max(0.0, spent.phases - of_kernels))
    lookups = large.lookups - small.lookups
    a_lookup = max(0.0, (more - spent.others) / lookups)
    lock = max(0.0, spent.others - a_lookup * small.lookups)
    found = {"launch": launch, "Python": beside - launch, "message": MESSAGE_S, "lock": lock, "wait": spent.wait}
    rates = {name: KernelRates(terms={"1": seconds}) for name, seconds in found.items()}
    return rates | {"lock": KernelRates(terms={"1": lock, "lookups": a_lookup})}
