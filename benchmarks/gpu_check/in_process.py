"""Bits of runs in one process: both sides in this thread, the real streams of the device, every row against the same
run with all rows on the device.

orders    every stream starts its work late, by random times: what shows a missing wait that a fast device hides
ways      one run for each kind of batch, row, optimizer and setting that the other parts do not have
"""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.differences import loss_difference, state_difference
from benchmarks.gpu_check.findings import Findings, NotHere
from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, group_specs
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.device.cuda import CudaStream, CudaStreams, page_locked
from rowcast.trainer.device.streams import Closure, Streams
from rowcast.trainer.models.exchanges import LocalCollectives
from tests.support.batches import Bags, slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Settings, Sharing, StuckError

SEEDS = 20
LONGEST_CYCLES = 600_000  # a delay on the device, whose clock runs at about 2 GHz
GUESS_S = 10.0  # the first way takes this long, since it compiles kernels
EVERYTHING, ONE_BATCH = "everything", "one batch"


class LateStream(CudaStream):
    """Waits for a random time before each piece of work; some streams wait much longer than others."""

    def __init__(self, device: torch.device, chance: random.Random, priority: int = 0) -> None:
        super().__init__(device, priority)
        self._chance, self._cycles = chance, LONGEST_CYCLES * chance.choice((0.01, 0.2, 1.0))

    def run(self, closure: Closure) -> None:
        def late() -> None:
            torch.cuda._sleep(int(self._cycles * self._chance.random()))  # type: ignore[no-untyped-call]
            closure()

        super().run(late)


class LateStreams(CudaStreams):
    def __init__(self, device: torch.device, seed: int) -> None:
        chance = random.Random(seed)
        self.device = device
        self.copy_in, self.fill, self.evict = (LateStream(device, chance, priority=-1) for _ in range(3))
        self.compute = self.exchange = LateStream(device, chance)


class DeviceRun(InProcessRun):
    """On a CPU the seeded scheduler takes the place of late streams."""

    def __init__(self, device: torch.device, *arguments: Any, **options: Any) -> None:
        self._device = device
        super().__init__(*arguments, **options)

    def make_streams(self, settings: Settings) -> Streams:
        if self._device.type == "cpu":
            return super().make_streams(settings)
        return LateStreams(self._device, settings.seed) if settings.seeded_streams else CudaStreams(self._device)

    def run(self) -> InProcessRun:
        is_pinned = self._device.type == "cuda" and not self.settings.bounced
        with page_locked(self.rings.buffers, self._device) if is_pinned else nullcontext():
            return super().run()

    def advance_until(self, condition: Any) -> None:
        """A device may take longer than the turns after which a run counts as stuck."""
        stuck_at: Any = None
        while True:
            try:
                return super().advance_until(condition)
            except StuckError:
                at = self.trainer.loop.waiting_for, len(self.results.losses), self.prefetcher.waiting_for
                if self._device.type == "cpu" or at == stuck_at:
                    raise
                torch.cuda.synchronize(self._device)
                stuck_at = at


@dataclass(frozen=True, kw_only=True)
class Way:
    optimizer: str = "adagrad"
    bags: Bags = "multi"
    job: dict[str, Any] = field(default_factory=dict)  # keyword arguments for small_job
    settings: dict[str, Any] = field(default_factory=dict)
    parts: int = 1


WAYS = {
    "two groups, jagged bags": Way(),
    "weighted bags": Way(bags="weighted"),
    "Adam, bf16 rows with master": Way(optimizer="adam", bags="single", job={"dtypes": ("bf16",) * 4, "master": True}),
    "one trainer, ranks.parts = 8": Way(bags="single", job={"ranks": {"parts": 8}}, parts=8),
    "model.compile": Way(bags="single", job={"model": {"compile": True}}),
    "rings that are not page-locked": Way(settings={"bounced": True}),
    "averaged and empty bags, row-wise Adagrad": Way(optimizer="rowwise_adagrad", bags="mean"),
    "look-ups that are not pooled, SGD": Way(optimizer="sgd", bags="apart"),
    "rings mirrored as over TCP": Way(settings={"mirrored": True}),
}


def trained(device: torch.device, way: Way, job: Job, batches: Sequence[ScheduledBatch], settings: Settings) -> Any:
    rank = Rank(number=0, count=1, parts=way.parts)
    try:
        return DeviceRun(
            device, job, batches, settings, sharing=Sharing(rank=rank, collectives=LocalCollectives())
        ).run()
    except ConfigError as error:  # torch.compile without a compiler
        raise NotHere(str(error)) from error


class Comparison:
    """One way to train: with every row on the device once, and then with fewer, in other orders."""

    def __init__(self, device: torch.device, way: Way) -> None:
        self._device, self._way = device, way
        self._job = small_job(way.optimizer, way.bags, depth=4, horizon=4, **way.job)
        self._batches = small_batches(self._job, way.bags)
        self._slots = {name: slots_for(group_specs(self._job), self._batches, name) for name in (EVERYTHING, ONE_BATCH)}
        self.expected = self._run(EVERYTHING, seeded_streams=False)

    def _run(self, capacity: str, **settings: Any) -> Any:
        return trained(
            self._device, self._way, self._job, self._batches, Settings(slots=self._slots[capacity], **settings)
        )

    def compare(self, seed: int, **settings: Any) -> dict[str, Any]:
        run = self._run(ONE_BATCH, seed=seed, **settings)
        losses = [np.array(own.results.losses, np.float32) for own in (run, self.expected)]
        differs = {
            "losses": loss_difference(losses[0], losses[1]),
            "rows": state_difference(run.state(), self.expected.state()),
        }
        if differs["rows"]:
            differs["rows"] |= place_of(run, differs["rows"])
        evaluations = run.results.evaluations == self.expected.results.evaluations
        moved = sum(group.num_dirty for plan in run.plans for group in plan.groups)
        found = {name: difference for name, difference in differs.items() if difference}
        return {"rows_back": moved, "evaluations_equal": evaluations, **found, "passed": evaluations and not found}


def place_of(run: InProcessRun, found: dict[str, Any]) -> dict[str, Any]:
    """The group of a row that differs, and the slot that it came to last."""
    for index, group in enumerate(run.groups):
        for table in group.tables:
            if f".{table.name}." in found.get("name", ""):
                key = table.index << KEY_SHIFT | found["row"]
                plans = [own.groups[index] for own in run.plans]
                slots = [own.fetch_slots[own.fetch_keys == key] for own in plans]
                return {"group": group.name, "slot": next((int(own[0]) for own in reversed(slots) if len(own)), None)}
    return {}


def check_orders(findings: Findings, device: torch.device) -> None:
    made: list[Comparison] = []

    def prepare() -> dict[str, Any]:
        made.append(Comparison(device, Way()))
        return {}

    def order(seed: int) -> dict[str, Any]:
        ring = {"ring_bytes": 24 * 1024} if seed % 3 == 0 else {"staging_bytes": 16 * 1024} if seed % 3 == 1 else {}
        return made[0].compare(seed, late_store=seed % 4 == 0, bounced=seed % 5 == 0, **ring)

    findings.item("every row on the device", prepare, "prepare", GUESS_S)
    for seed in range(SEEDS) if made else ():
        findings.item(f"seed {seed}", partial(order, seed))


def check_ways(findings: Findings, device: torch.device) -> None:
    def compare(way: Way) -> dict[str, Any]:
        return Comparison(device, way).compare(1, **way.settings)

    for name, way in WAYS.items():
        findings.item(name, partial(compare, way), "", GUESS_S)
